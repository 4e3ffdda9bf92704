"""Values from the TOML file and from flags, each checked against its key; legacy keys and values are translated."""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pydantic

from torchtitan.config.keys import Key, heading, keys_of_entry
from torchtitan.config.legacy_values import WITH_RULES, Values, notice_of_value, spelled, translate_value
from torchtitan.errors import ConfigError, nearest
from torchtitan.files import UriError
from torchtitan.registry import load

if TYPE_CHECKING:
    from torchtitan.config.legacy_keys import LegacyKey

if sys.version_info >= (3, 11):
    import tomllib as tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


def legacy_keys() -> "Mapping[str, LegacyKey]":
    """Keys of other versions. Call it only for a key that is not current."""
    keys: Mapping[str, LegacyKey] = load("torchtitan.config.legacy_keys:LEGACY_KEYS")
    return keys


@dataclass
class ValueChecks:
    """The keys that values are checked against; collects problems and notices."""

    keys: dict[str, Key]
    problems: list[str]
    notices: list[str]
    implied: Values = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    late: dict[str, tuple[Any, bool, str]] = field(default_factory=dict)
    current: dict[bool, Values] = field(default_factory=lambda: {False: {}, True: {}})  # True: flags

    def values_of(self, given: Values, of_flags: bool, prefix: str) -> Values:
        """The checked values of a file or of the flags. A current key that is given too wins over what legacy keys and
        values mean for it; what depends on several keys is left to `finish`. Messages put `prefix` in front of keys."""
        values = self.current[of_flags]
        for key in filter(self.keys.__contains__, given):
            self._take(values, key, given[key], of_flags, prefix + key)
        merged = dict(values)
        for key in (key for key in given if key not in self.keys):
            self.seen.add(key)
            if legacy_keys()[key].late:
                self.late[key] = given[key], of_flags, prefix + key
            else:
                self._add(merged, self._translated(merged, key, given[key], of_flags, prefix + key), merged)
        implied, self.implied = self.implied, {}
        self._add(merged, implied, merged)
        return merged

    def finish(self, values: Values) -> None:
        """Adds what depends on several keys, once the values of the file and the flags are known."""
        for key, (value, of_flag, where) in self.late.items():
            given = {**({} if of_flag else self.current[False]), **self.current[True]}
            self._add(values, self._translated(values, key, value, of_flag, where), given)
        lookup = self._lookup(values)
        if self.seen or any(lookup(key) == value for key, value in WITH_RULES.items()):
            rules = load("torchtitan.config.legacy_keys:RULES")
            self.notices += filter(None, [rule.apply(values, lookup, self.seen) for rule in rules])

    def _take(self, values: Values, key: str, value: Any, of_flag: bool, where: str) -> None:
        """Adds the checked value of a key, or a problem. Translates legacy values."""
        spec, is_text = self.keys[key], of_flag and isinstance(value, str)
        strict = not is_text or spec.takes(bool)
        if spec.entry:
            if of_flag:
                self.problems.append(
                    f"{where} is a list of tables and cannot be set by a flag; write {heading(key)} in a file."
                )
            else:
                self._take_tables(values, key, spec.entry, value, where)
            return
        if is_text:
            text = value
            try:
                value = _value_of_text(spec, text)
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                self.problems.append(f"{where} is not Unicode text: {text[:80]!r}.")
                return
            except (ValueError, RecursionError, TypeError) as error:
                form = f"it must be {spec.expected}" if spec.takes(dict) else 'it must be JSON, such as ["a", "b, c"]'
                self.problems.append(f"{where} begins with {text.lstrip()[0]}, so {form} ({error}).")
                return
        elif spec.takes(list) and isinstance(value, str):
            self.notices.append(f"{where} = {spelled(value)} is now a list, separated at commas")
            value, strict = _split(value), False
        if strict or value != "":  # an empty flag may be an unset shell variable
            value, others, legacy = translate_value(key, value)
            self.notices += [notice_of_value(key, entry) for entry in legacy]
            self.seen |= {f"{key} = {entry}" for entry in legacy}
            for other in others:  # where the file or command line sets it, that wins
                self._check(self.implied, other, self.keys[other], others[other], True, where)
        if value is not None:
            self._check(values, key, spec, value, strict, where)

    def _take_tables(self, values: Values, key: str, entry: type[Any], tables: Any, where: str) -> None:
        """Adds a list of tables as entries of a dataclass. If that has a field `sections`, tables may hold sections."""
        if not (isinstance(tables, list) and all(isinstance(table, dict) for table in tables)):
            self.problems.append(f"{where} must be a list of tables, each headed {heading(key)}, not {tables!r}.")
            return
        has_sections = any(field.name == "sections" for field in fields(entry))
        known = {**keys_of_entry(entry), **(self.keys if has_sections else {})}
        values[key] = []
        for number, table in enumerate(tables, 1):
            title = f"{where.removesuffix(key)}{heading(key)} {number}: "
            checked: Values = {}
            for name, value in leaves(table, known).items():
                name = "model.converters" if name == "precision.converters" else name  # a precision phase calls it so
                if name in known and (tables_of := known[name].entry):
                    self._take_tables(checked, name, tables_of, value, title + name)
                elif name in known:
                    self._check(checked, name, known[name], value, True, title + name)
                elif has_sections and name in legacy_keys() and not legacy_keys()[name].late:
                    checked |= self._translated(checked, name, value, False, title + name)
                else:
                    self.problems.append(f"{title}unknown key {name}{nearest(name, list(known))}.")
            own = {name: checked.pop(name) for name in list(checked) if "." not in name}
            values[key].append(entry(**own, **({"sections": by_section(checked)} if has_sections else {})))

    def _check(self, values: Values, name: str, spec: Key, value: Any, strict: bool, where: str) -> None:
        """Adds a checked value, or a problem. `strict` refuses a string for a number. "none" is None if optional."""
        if spec.optional and isinstance(value, str) and value.lower() == "none":
            values[name] = None
            return
        try:
            values[name] = pydantic.TypeAdapter(spec.annotation).validate_python(value, strict=strict)
        except pydantic.ValidationError as error:
            faults = (fault.get("ctx", {}).get("error") for fault in error.errors())
            of_uri = next((fault for fault in faults if isinstance(fault, UriError)), None)
            self.problems.append(f"{where}: {of_uri}" if of_uri else f"{where} must be {spec.expected}, not {value!r}.")

    def _add(self, values: Values, new: Values, given: Values) -> None:
        """Adds the `new` values whose keys are not given under their current names, which win."""
        for key, value in new.items():
            if key not in given:
                values[key] = value
            elif given[key] != value:
                self.notices.append(f"{key} = {spelled(given[key])} is set too, and wins")

    def _lookup(self, values: Values) -> Callable[[str], Any]:
        return lambda key: values.get(key, self.keys[key].default)

    def _translated(self, values: Values, key: str, value: Any, of_flag: bool, where: str) -> Values:
        try:
            translated = legacy_keys()[key].translate(value, self._lookup(values))
        except ValueError as error:
            self.problems.append(f"{where} = {value} is not supported: {error}.")
            return {}
        self.notices.append(f"{where} {legacy_keys()[key].notice(value, translated)}")
        checked: Values = {}
        for new, item in translated.items():
            self._take(checked, new, item, of_flag, where)
        return checked


def values_of_file(path: str, table: Values, checks: ValueChecks) -> Values:
    sections = list(dict.fromkeys(key.split(".", 1)[0] for key in checks.keys))
    given: Values = {}
    for section, content in table.items():
        if section not in sections and section not in load("torchtitan.config.legacy_keys:SECTIONS"):
            checks.problems.append(f"{path}: unknown section [{section}]{nearest(section, sections)}.")
        elif not isinstance(content, dict):
            checks.problems.append(f"{path}: [{section}] must be a table of keys, not {content!r}.")
        else:
            given |= leaves(content, checks.keys, f"{section}.")
    for key in [key for key in given if key not in checks.keys and key not in legacy_keys()]:
        del given[key]
        checks.problems.append(f"{path}: unknown key {key}{nearest(key, list(checks.keys))}.")
    return checks.values_of(given, False, f"{path}: ")


def take_flags_of_stages(argv: list[str], values: Values, checks: ValueChecks) -> list[str]:
    """Applies flags such as --stage.anneal.training.seq_len=16384 to a file's stages. Returns the other arguments."""
    entries = values.get("stage.entries", [])
    keys = {**keys_of_entry(type(entries[0])), **checks.keys} if entries else {}
    flags = {f"stage.{entry.name}.{key}": spec.takes(bool) for entry in entries for key, spec in keys.items()}
    given, left_over = FlagParser(flags).parse_known_args(argv)
    for number, entry in enumerate(entries):
        prefix = f"stage.{entry.name}."
        taken: Values = {}
        own = ValueChecks(keys, checks.problems, checks.notices)
        for flag, text in vars(given).items():
            if flag.startswith(prefix):
                own._take(taken, flag.removeprefix(prefix), text, True, f"--{flag}")
        sections = by_section({key: value for key, value in taken.items() if "." in key})
        merged = {
            name: {**entry.sections.get(name, {}), **sections.get(name, {})} for name in entry.sections | sections
        }
        plain = {key: value for key, value in taken.items() if "." not in key}
        entries[number] = replace(entry, sections=merged, **plain)
    unknown = [flag for flag in left_over if flag.startswith("--stage.")]
    for name in (flag.partition("=")[0] for flag in unknown):
        checks.problems.append(f"Command line: unknown flag {name}{nearest(name.removeprefix('--'), list(flags))}.")
    return [flag for flag in left_over if flag not in unknown]


def as_spelled(argument: str) -> str:
    """A flag with underscores for hyphens in its key, as other programs take them: not in the name of a stage."""
    flag, equals, value = argument.partition("=")
    if not flag.startswith("--"):
        return argument
    parts = flag[2:].split(".")
    kept = 2 if parts[0] == "stage" and len(parts) > 2 else 0
    return f"--{'.'.join([*parts[:kept], *(part.replace('-', '_') for part in parts[kept:])])}{equals}{value}"


def values_of_flags(argv: list[str], checks: ValueChecks) -> Values:
    bools = {key: spec.takes(bool) for key, spec in checks.keys.items()}
    flags_given = {argument[2:].partition("=")[0] for argument in argv if argument.startswith("--")}
    if any(name not in bools and name.replace(".no_", ".", 1) not in bools for name in flags_given):
        bools = {**dict.fromkeys(legacy_keys(), True), **bools}
    try:
        flags, left_over = _parser_of(tuple(bools.items())).parse_known_args(argv)
    except ConfigError as error:  # a flag without a value; argparse stops at the first one
        checks.problems.extend(error.problems)
        return {}
    before = ""
    for argument in left_over:
        name = argument.split("=", 1)[0]
        if name.startswith("-"):
            close = nearest(name.lstrip("-"), list(checks.keys))
            checks.problems.append(f"Command line: unknown flag {name}{close}.")
        elif not before.startswith("-") or "=" in before:  # else it is the value of an unknown flag
            checks.problems.append(
                f"Command line: unexpected argument {argument!r}; write flags as --section.key=value."
            )
        before = argument
    return checks.values_of(vars(flags), True, "--")


class FlagParser(argparse.ArgumentParser):
    """Flags without defaults: the result holds only what is on the command line.

    Args:
        keys: each key, and whether its value may be left out, or negated by `--section.no_key`.
    """

    def __init__(self, keys: Mapping[str, bool]) -> None:
        super().__init__(prog="train.py", allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
        for key, is_bool in keys.items():
            section, name = key.rsplit(".", 1)
            if is_bool:
                self.add_argument(f"--{key}", dest=key, nargs="?", const="true")
                self.add_argument(f"--{section}.no_{name}", dest=key, action="store_const", const="false")
            else:
                self.add_argument(f"--{key}", dest=key)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"Command line: {message}.")


@functools.cache
def _parser_of(keys: tuple[tuple[str, bool], ...]) -> FlagParser:
    return FlagParser(dict(keys))  # 600 flags take 30 ms


def leaves(content: Values, keys: Collection[str] = (), prefix: str = "") -> Values:
    """Dotted keys and values of a table and of those nested in it, such as [quantize.linear.float8]."""
    values: Values = {}
    for name, value in content.items():
        key = prefix + name
        values |= leaves(value, keys, f"{key}.") if isinstance(value, dict) and key not in keys else {key: value}
    return values


def by_section(values: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """The values of dotted keys, as a table for each section."""
    sections: dict[str, dict[str, T]] = {}
    for key, value in values.items():
        section, name = key.split(".", 1)
        sections.setdefault(section, {})[name] = value
    return sections


def _value_of_text(spec: Key, text: str) -> Any:
    if spec.takes(list):
        return json.loads(text) if text.lstrip().startswith("[") else _split(text)
    if spec.takes(dict) and text.lstrip().startswith("{"):
        return tomllib.loads(f"value = {text}")["value"]
    # A boolean is only one of these words; pydantic would also accept "yes" and "1".
    return {"true": True, "false": False}.get(text.lower(), text) if spec.takes(bool) else text


def _split(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]
