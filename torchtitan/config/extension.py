"""Imports a user's module, and merges the sections that it adds to the configuration."""

import argparse
import dataclasses
import importlib
import sys
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from torchtitan.errors import ConfigError
from torchtitan.files import expand_any

T = TypeVar("T")


def extend(config_class: type[T], module_name: str) -> type[T]:
    """`config_class` plus the sections and keys of the dataclass `JobConfig` in a user's module.

    The user's keys are added to an existing section; a new section is added unchanged.
    """
    where = "experimental.custom_args_module"
    users = getattr(import_user_module(module_name, where), "JobConfig", None)
    if not dataclasses.is_dataclass(users):
        raise ConfigError(f"{where}: module {module_name} has no dataclass named JobConfig; add one.")
    hints = typing.get_type_hints(users, include_extras=True)
    ours = typing.get_type_hints(config_class)
    sections = []
    for name in (field.name for field in dataclasses.fields(users)):
        if not dataclasses.is_dataclass(hints[name]):
            raise ConfigError(f"{where}: section {name} of {module_name}.JobConfig is not a dataclass; make it one.")
        merged = _frozen(hints[name], ours.get(name))
        sections.append((name, merged, dataclasses.field(default_factory=merged)))
    return dataclasses.make_dataclass("JobConfig", sections, bases=(config_class,), frozen=True)


def _frozen(section: type[Any], base: type[Any] | None) -> type[Any]:
    """A frozen copy of a user's section, derived from ours of that name if any; the user's types and defaults win."""
    hints = typing.get_type_hints(section, include_extras=True)
    fields: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(section):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"experimental.custom_args_module: {section.__name__}.{field.name} needs a default.")
        copy = dataclasses.field(default=field.default, default_factory=field.default_factory)
        fields.append((field.name, hints[field.name], copy))
    new = dataclasses.make_dataclass(section.__name__, fields, bases=(base,) if base else (), frozen=True)
    new.__doc__ = (base or section).__doc__
    return new


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """For commands that run a trained model."""
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: the faster on this device"
    )
    parser.add_argument("--tokenizer-path", type=expand_any, help="default: the model's own")
    add_ema(parser)
    add_custom_import(parser)


def add_ema(parser: argparse.ArgumentParser) -> None:
    """Adds --ema, for commands that use a checkpoint's weights."""
    parser.add_argument(
        "--ema", action="store_true", help="take the moving averages of the weights (runs with optimizer.ema_decay)"
    )


def add_custom_import(parser: argparse.ArgumentParser) -> None:
    """The flag that names a module to import. Names in a checkpoint or a published folder are never imported."""
    parser.add_argument("--custom-import", help="module that registers the model family", metavar="MODULE")


def import_user_module(name: str, key: str) -> types.ModuleType:
    """Imports a user's module, which may be in the working directory."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        if name.startswith("."):  # a relative import, with nothing to be relative to
            raise ModuleNotFoundError(name=name)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise  # the module exists; one of its imports does not
        raise ConfigError(
            f"{key}: no module {name!r} in the working directory or on PYTHONPATH; set it to a dotted name such as "
            "my_package.my_module."
        ) from None
