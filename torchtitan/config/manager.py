"""From the command line and a TOML file to one frozen `JobConfig`.

pydantic checks types and ranges, argparse splits the command line and prints help; what is written here is the
merging and the sentences that a user reads.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pydantic

from torchtitan.config.extension import extend
from torchtitan.config.job_config import JobConfig
from torchtitan.config.keys import Key, fields_by_key, keys_of_entry, section_class
from torchtitan.errors import ConfigError, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Values = dict[str, Any]  # "section.key" -> value


class ConfigManager:
    """Fills a `JobConfig`.

    Args:
        config_class: the dataclass of sections; a user's `experimental.custom_args_module` is merged into it.
    """

    def __init__(self, config_class: type[JobConfig] = JobConfig) -> None:
        self.config_class = config_class

    def parse_args(self, argv: Sequence[str] | None = None) -> JobConfig:
        """Merges defaults, the TOML file of `--job.config_file`, and `argv` (without the program's name).

        Raises:
            ConfigError: with one sentence for each mistake, all of them at once.
        """
        argv = list(sys.argv[1:] if argv is None else argv)
        early = _raw_flags(argv)
        path = early.get("job.config_file")
        table = read_toml(path) if path else {}
        module = early.get("experimental.custom_args_module", _of_table(table, "experimental", "custom_args_module"))
        # what is no string is reported below, with all other wrong types
        config_class = extend(self.config_class, module) if module and isinstance(module, str) else self.config_class
        if {"--help", "-h"} & set(argv):
            print_help(config_class)
            raise SystemExit(0)

        keys = fields_by_key(config_class)
        problems: list[str] = []
        values = _values_of_file(str(path), table, keys, problems)
        values.update(_values_of_flags(argv, keys, problems))
        if problems:
            raise ConfigError(*problems)
        return build(config_class, values)


def build(config_class: type[JobConfig], values: Values) -> JobConfig:
    """The configuration with `values`, already checked, in place of defaults."""
    sections = {}
    for section in dataclasses.fields(config_class):
        mine = {key.split(".", 1)[1]: value for key, value in values.items() if key.split(".", 1)[0] == section.name}
        sections[section.name] = section_class(config_class, section.name)(**mine)
    return config_class(**sections)


def to_toml(config: JobConfig) -> str:
    """The resolved configuration as TOML that loads again to an equal one. TOML has no null: None is written "none"."""
    import tomli_w

    return tomli_w.dumps(
        {
            section: {key: _in_toml(value) for key, value in keys.items()}
            for section, keys in dataclasses.asdict(config).items()
        }
    )


def _in_toml(value: Any) -> Any:
    if value is None:
        return "none"
    if isinstance(value, list):
        return [_in_toml(item) for item in value]
    if isinstance(value, dict):  # an entry in a list of tables, which in the file holds its sections directly
        own = {key: item for key, item in value.items() if key != "sections"}
        return {key: _in_toml(item) for key, item in {**own, **value.get("sections", {})}.items()}
    return value


def read_toml(path: str) -> dict[str, Any]:
    """The tables of a TOML file, or a ConfigError that names the file."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"job.config_file: there is no file {path} (looked from {Path.cwd()}).") from None
    except OSError as error:
        raise ConfigError(f"job.config_file: {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}).") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}.") from None


def _values_of_file(path: str, table: dict[str, Any], keys: dict[str, Key], problems: list[str]) -> Values:
    sections = list(dict.fromkeys(key.split(".", 1)[0] for key in keys))
    values: Values = {}
    for section, content in table.items():
        if section not in sections:
            problems.append(f"{path}: unknown section [{section}]{nearest(section, sections)}.")
        elif not isinstance(content, dict):
            problems.append(f"{path}: [{section}] must be a table of keys, not {content!r}.")
        else:
            for name, value in content.items():
                key = f"{section}.{name}"
                if key not in keys:
                    problems.append(f"{path}: unknown key {key}{nearest(key, list(keys))}.")
                elif keys[key].entry:
                    _take_tables(values, key, keys, value, path, problems)
                else:
                    _take(values, key, keys[key], value, True, f"{path}: {key}", problems)
    return values


def _values_of_flags(argv: list[str], keys: dict[str, Key], problems: list[str]) -> Values:
    values: Values = {}
    try:
        given, left_over = _Parser(keys).parse_known_args(argv)
    except ConfigError as error:  # a flag without its value; argparse stops at the first
        problems.extend(error.problems)
        return values
    before = ""
    for argument in left_over:
        name = argument.split("=", 1)[0]
        if name.startswith("-"):
            problems.append(f"Command line: unknown flag {name}{nearest(name.lstrip('-'), list(keys))}.")
        elif not before.startswith("-") or "=" in before:  # else it is an unknown flag's value
            problems.append(f"Command line: {argument!r} belongs to no flag; flags are --section.key=value.")
        before = argument
    for key, text in vars(given).items():
        spec = keys[key]
        value: Any = text
        if spec.entry:
            problems.append(f"--{key} is a list of tables and has no flag: write [[{key}]] in --job.config_file.")
            continue
        if spec.is_list:
            value = [item.strip() for item in text.split(",") if item.strip()]
        elif spec.is_bool:  # only these two words, where pydantic would also take "yes" or "1"
            value = {"true": True, "false": False}.get(text.lower(), text)
        _take(values, key, spec, value, spec.is_bool, f"--{key}", problems)
    return values


def _take(values: Values, key: str, spec: Key, value: Any, strict: bool, where: str, problems: list[str]) -> None:
    """Adds the checked value, or a problem. `strict` refuses a string for a number. "none" is None if that may be."""
    if spec.optional and isinstance(value, str) and value.lower() == "none":
        values[key] = None
        return
    try:
        values[key] = pydantic.TypeAdapter(spec.annotation).validate_python(value, strict=strict)
    except pydantic.ValidationError:
        problems.append(f"{where} must be {spec.expected}, not {value!r}.")


def _take_tables(values: Values, key: str, keys: dict[str, Key], tables: Any, path: str, problems: list[str]) -> None:
    """Adds a list of tables as entries of its dataclass. A table within a table holds keys of that section."""
    entry = keys[key].entry
    own = keys_of_entry(entry)
    if not (isinstance(tables, list) and all(isinstance(table, dict) for table in tables)):
        problems.append(f"{path}: {key} must be a list of tables, each headed [[{key}]], not {tables!r}.")
        return
    entries = []
    for number, table in enumerate(tables, 1):
        where = f"{path}: [[{key}]] {number}"
        mine: Values = {}
        sections: dict[str, Values] = {}
        for name, value in table.items():
            if name in own:
                _take(mine, name, own[name], value, True, f"{where}: {name}", problems)
            elif not isinstance(value, dict):
                problems.append(f"{where}: unknown key {name}{nearest(name, list(own))}.")
            else:
                sections[name] = {}
                for key_of_section, item in value.items():
                    full = f"{name}.{key_of_section}"
                    if full in keys:
                        _take(sections[name], key_of_section, keys[full], item, True, f"{where}: {full}", problems)
                    else:
                        problems.append(f"{where}: unknown key {full}{nearest(full, list(keys))}.")
        entries.append(entry(**mine, sections=sections))
    values[key] = entries


class _Parser(argparse.ArgumentParser):
    """Flags for every key, without defaults: what is not on the command line is not in the result."""

    def __init__(self, keys: dict[str, Key]) -> None:
        super().__init__(prog="train.py", allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
        for key, spec in keys.items():
            section, name = key.split(".", 1)
            if spec.is_bool:
                self.add_argument(f"--{key}", dest=key, nargs="?", const="true")
                self.add_argument(f"--{section}.no_{name}", dest=key, action="store_const", const="false")
            else:
                self.add_argument(f"--{key}", dest=key)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"Command line: {message}.")


def _raw_flags(argv: list[str]) -> dict[str, str]:
    """The two flags that decide which keys exist, before the keys are known."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--job.config_file")
    parser.add_argument("--experimental.custom_args_module")
    parser.exit_on_error = False
    try:
        return vars(parser.parse_known_args(argv)[0])
    except argparse.ArgumentError as error:
        raise ConfigError(f"Command line: {error}.") from None


def _of_table(table: dict[str, Any], section: str, key: str) -> Any:
    content = table.get(section)
    return content.get(key) if isinstance(content, dict) else None


def print_help(config_class: type[JobConfig]) -> None:
    """Every key with its help, type and default."""
    print("usage: train.py [--job.config_file FILE.toml] [--section.key=value ...]\n")
    print("Defaults, then the TOML file, then these flags. A list is one comma-separated value;")
    print("a boolean is --section.key or --section.no_key (or =true, =false).")
    keys = fields_by_key(config_class)
    for section in dataclasses.fields(config_class):
        doc = (section_class(config_class, section.name).__doc__ or "").strip().split("\n")[0]
        print(f"\n[{section.name}]  {doc}")
        for key, spec in keys.items():
            if key.split(".", 1)[0] == section.name:
                flag = f"[[{key}]]" if spec.entry else f"--{key}"
                print(f"  {flag}\n      {spec.help} ({spec.expected}; default {spec.shown_default})")
                for name, own in (keys_of_entry(spec.entry) if spec.entry else {}).items():
                    print(f"    {name}\n      {own.help} ({own.expected}; default {own.shown_default})")
