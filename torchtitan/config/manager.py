"""Merges the command line and a TOML file into one frozen `JobConfig`.

pydantic checks types and ranges; argparse splits the command line. This module does the merging and words the errors.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan.config.extension import extend
from torchtitan.config.job_config import JobConfig
from torchtitan.config.keys import fields_by_key, heading, keys_of_entry, section_class
from torchtitan.config.legacy_values import Values, spelled
from torchtitan.config.overrides import (
    FlagParser,
    ValueChecks,
    as_spelled,
    by_section,
    leaves,
    take_flags_of_stages,
    values_of_file,
    values_of_flags,
)
from torchtitan.config.overrides import tomllib as tomllib
from torchtitan.errors import HIDDEN, ConfigError, nearest, parsing, was_hidden
from torchtitan.files import PathError, local_path, regular_file

SHIPPED_CONFIGS = Path(__file__).parents[1] / "train_configs"
MOST_STAGES = 1000
MOST_PARTS = 100  # limit for a dotted key
KEY_PART = r"""(?:[\w-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')[ \t]*"""
LONG_KEY = re.compile(rf"(?:^|[{{,])[ \t\[]*(?:{KEY_PART}\.[ \t]*){{{MOST_PARTS}}}", re.MULTILINE)
CUSTOM_ARGS_MODULE = ("experimental.custom_args_module", "job.custom_config_module")  # now and formerly


class ConfigManager:
    """Fills a `JobConfig`.

    Args:
        config_class: dataclass of the sections; a user's `experimental.custom_args_module` is merged into it.

    Attributes:
        notices: one line per translated key or value of another version.
    """

    def __init__(self, config_class: type[JobConfig] = JobConfig) -> None:
        self.config_class = config_class
        self.notices: list[str] = []

    def parse_args(self, argv: Sequence[str] | None = None) -> JobConfig:
        """Merges defaults, the TOML file given by `--job.config_file`, and `argv` (without the program name).

        Raises:
            ConfigError: with one sentence per mistake, all of them at once.
        """
        argv = [as_spelled(flag) for flag in (sys.argv[1:] if argv is None else argv) if flag != "--"]
        # Which keys exist depends on these flags, or on the file.
        first = FlagParser(dict.fromkeys(("job.config_file", *CUSTOM_ARGS_MODULE), False))
        early = vars(first.parse_known_args(argv)[0])
        path = shipped(early.get("job.config_file") or "")
        table = read_toml(path) if path else {}
        module = next(filter(None, map({**leaves(table), **early}.get, CUSTOM_ARGS_MODULE)), None)
        # A module that is not a string is reported below, with all other wrong types.
        config_class = extend(self.config_class, module) if module and isinstance(module, str) else self.config_class
        if {"--help", "-h"} & set(argv):
            print_help(config_class)
            raise SystemExit(0)

        checks = ValueChecks(fields_by_key(config_class), [], self.notices)
        if isinstance(table.get("stage"), list):  # [[stage]]
            if len(table["stage"]) > MOST_STAGES:
                raise ConfigError(f"{path}: it has {len(table['stage']):,} [[stage]], and a run {MOST_STAGES} at most.")
            table["stage"] = {"entries": table["stage"]}
        elif isinstance(table.get("stage"), dict) and "entries" not in table["stage"]:
            raise ConfigError("[stage] is one table, but stages are a list of them; write [[stage]].")
        with parsing(lambda reason: ConfigError(f"{path}: {reason}.")):
            values = values_of_file(path, table, checks)
        argv = take_flags_of_stages(argv, values, checks)
        values.update(values_of_flags(argv, checks))
        checks.finish(values)
        checks.problems += [
            f"{key} = {spelled(value)} has lost its password or token ({HIDDEN}): set it again."
            for key, value in values.items()
            if was_hidden(value)
        ]
        if checks.problems:
            raise ConfigError(*checks.problems)
        return build(config_class, values)


def build(config_class: type[JobConfig], values: Values) -> JobConfig:
    """The configuration with `values`, which are already checked, in place of defaults."""
    return config_class(**{name: section_class(config_class, name)(**own) for name, own in by_section(values).items()})


def to_toml(config: JobConfig, shown: Callable[[Any], Any] = lambda tables: tables) -> str:
    """The resolved configuration as TOML, which loads to an equal one. With `errors.public` as `shown` it has no
    passwords, and loading it asks for them."""
    return tables_to_toml(shown(dataclasses.asdict(config)))


def tables_to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of keys as TOML. TOML has no null, so None is written "none"."""
    import tomli_w

    written = {section: {key: _in_toml(value) for key, value in keys.items()} for section, keys in tables.items()}
    stages = written.pop("stage", {}).get("entries", [])
    headed = (tomli_w.dumps({"stage": stage}).replace("[stage]", "[[stage]]", 1) for stage in stages)  # not in one line
    return "\n".join([tomli_w.dumps(written), *headed])


def _in_toml(value: Any) -> Any:
    if value is None:
        return "none"
    if isinstance(value, list):
        return [_in_toml(item) for item in value]
    if isinstance(value, dict):  # an entry in a list of tables, whose sections become tables inside it
        own = {key: item for key, item in value.items() if key != "sections"}
        return {key: _in_toml(item) for key, item in {**own, **value.get("sections", {})}.items()}
    return value


def shipped(path: str) -> str:
    """`path`; or, if it is only the name of a shipped file (debug_model) and no file here, the shipped file's path."""
    file = SHIPPED_CONFIGS / f"{path.removesuffix('.toml')}.toml"
    return str(file) if Path(path).name == path and not Path(path).is_file() and file.is_file() else path


def read_toml(path: str) -> dict[str, Any]:
    """The tables of a TOML file; any failure is a ConfigError that names the file."""
    try:
        text = regular_file(local_path(path)).read_text(encoding="utf-8-sig")
        with parsing(lambda reason: ConfigError(f"{path}: invalid TOML: {reason}.")):
            if LONG_KEY.search(text):  # the parser would take half a minute, and its result has no use
                raise ValueError(f"a key has more than {MOST_PARTS} parts")
            table = tomllib.loads(text)
        return table
    except FileNotFoundError:
        names = sorted(file.stem for file in SHIPPED_CONFIGS.glob("*.toml"))
        about = nearest(Path(path).name.removesuffix(".toml"), names)
        about += f"; torchtitan comes with {', '.join(names)}" if Path(path).name == path else ""
        raise ConfigError(f"job.config_file: {path} not found (working directory: {Path.cwd()}){about}.") from None
    except OSError as error:
        raise ConfigError(f"job.config_file: {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (invalid byte at offset {error.start}).") from None
    except PathError as error:
        raise ConfigError(f"job.config_file: {error}") from None


def print_help(config_class: type[JobConfig]) -> None:
    """Prints every key with its help, type and default."""
    print(f"usage: {Path(sys.argv[0]).name} [--job.config_file FILE.toml] [--section.key=value ...]\n")
    print("Flags override the TOML file, which overrides the defaults. Separate the items of a list by commas; a list")
    print('that begins with [ is JSON, whose items may hold commas: --section.key=\'["a, b", "c"]\'.')
    print("Booleans: --section.key or --section.no_key (or =true, =false).")
    for section, keys in by_section(fields_by_key(config_class)).items():
        doc = (section_class(config_class, section).__doc__ or "").strip().split("\n")[0]
        print(f"\n[{section}]  {doc}")
        for name, key in keys.items():
            flag = heading(f"{section}.{name}") if key.entry else f"--{section}.{name}"
            print(f"  {flag}\n      {key.help} ({key.expected}; default {key.shown_default})")
            for inner, own in (keys_of_entry(key.entry) if key.entry else {}).items():
                print(f"    {inner}\n      {own.help} ({own.expected}; default {own.shown_default})")
