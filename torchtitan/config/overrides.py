"""Values from the TOML file and from flags, each checked against its key; legacy keys and values are translated."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pydantic

from torchtitan.config.keys import Key, keys_of_entry
from torchtitan.config.legacy_keys import (
    LEGACY_KEYS,
    RULES,
    SECTIONS,
    Values,
    notice_of_value,
    shown,
    translate_value,
)
from torchtitan.errors import ConfigError, nearest

__all__ = ["ValueChecks", "values_of_file", "values_of_flags"]


@dataclasses.dataclass
class ValueChecks:
    """The keys that values are checked against; collects problems and notices."""

    keys: dict[str, Key]
    problems: list[str]
    notices: list[str]
    implied: Values = dataclasses.field(default_factory=dict)
    seen: set[str] = dataclasses.field(default_factory=set)
    late: dict[str, tuple[Any, bool, str]] = dataclasses.field(default_factory=dict)
    current: dict[bool, Values] = dataclasses.field(default_factory=lambda: {False: {}, True: {}})  # flags: True

    def take(self, values: Values, key: str, value: Any, strict: bool, where: str) -> None:
        """Adds the checked value of a key, or a problem. Translates legacy values."""
        spec = self.keys[key]
        if spec.is_list and isinstance(value, str):
            self.notices.append(f"{where} = {shown(value)} is now a list, separated at commas")
            value, strict = [item.strip() for item in value.split(",") if item.strip()], False
        others: Values = {}
        if strict or value != "":  # an empty flag may be an unset shell variable
            value, others, legacy = translate_value(key, value)
            self.notices += [notice_of_value(key, entry) for entry in legacy]
            self.seen |= {f"{key} = {entry}" for entry in legacy}
        for other in others:  # where the file or command line sets it, that wins
            _take(self.implied, other, self.keys[other], others[other], True, where, self.problems)
        if value is not None:
            _take(values, key, spec, value, strict, where, self.problems)

    def take_text(self, values: Values, key: str, text: str, where: str) -> None:
        """Adds the checked value of a flag, or a problem."""
        try:
            value = _value_of_text(self.keys[key], text)
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            self.problems.append(f"{where} is not Unicode text: {text[:80]!r}.")
            return
        except (ValueError, RecursionError) as error:
            self.problems.append(f'{where} begins with [, so it must be JSON, such as ["a", "b, c"] ({error}).')
            return
        self.take(values, key, value, self.keys[key].is_bool, where)

    def with_implied(self, values: Values) -> Values:
        """These values of a file or command line, and what legacy ones among them imply for other keys."""
        implied, self.implied = self.implied, {}
        return {**self._new(implied, values), **values}

    def take_legacy(self, values: Values, key: str, value: Any, of_flag: bool, where: str) -> None:
        """Adds the translation of a legacy key. A current key that is given too wins. What depends on other keys is
        left to `finish`."""
        self.seen.add(key)
        if LEGACY_KEYS[key].late:
            self.late[key] = value, of_flag, where
            return
        values.update(self._new(self._translated(values, key, value, of_flag, where), values))

    def finish(self, values: Values) -> None:
        """Adds what depends on several keys, when those of the file and of the flags are known."""
        for key, (value, of_flag, where) in self.late.items():
            given = {**({} if of_flag else self.current[False]), **self.current[True]}
            values.update(self._new(self._translated(values, key, value, of_flag, where), given))
        self.notices += filter(None, [rule.apply(values, self._lookup(values), self.seen) for rule in RULES])

    def _new(self, values: Values, given: Values) -> Values:
        """Those `values` whose keys are not given under their current names, which win."""
        self.notices += [
            f"{key} = {shown(given[key])} is set too, and wins"
            for key, value in values.items()
            if given.get(key, value) != value
        ]
        return {key: value for key, value in values.items() if key not in given}

    def _lookup(self, values: Values) -> Callable[[str], Any]:
        return lambda key: values.get(key, self.keys[key].default)

    def _translated(self, values: Values, key: str, value: Any, of_flag: bool, where: str) -> Values:
        try:
            translated = LEGACY_KEYS[key].translate(value, self._lookup(values))
        except ValueError as error:
            self.problems.append(f"{where} = {value} is not supported: {error}.")
            return {}
        self.notices.append(f"{where} {LEGACY_KEYS[key].notice(value, translated)}")
        checked: Values = {}
        for new, item in translated.items():
            if of_flag and isinstance(item, str):
                self.take_text(checked, new, item, where)
            else:
                self.take(checked, new, item, True, where)
        return checked


def values_of_file(path: str, table: dict[str, Any], checks: ValueChecks) -> Values:
    keys, problems = checks.keys, checks.problems
    sections = list(dict.fromkeys(key.split(".", 1)[0] for key in keys))
    values: Values = {}
    legacy: dict[str, Any] = {}
    for section, content in table.items():
        if section not in sections and section not in SECTIONS:
            problems.append(f"{path}: unknown section [{section}]{nearest(section, sections)}.")
        elif not isinstance(content, dict):
            problems.append(f"{path}: [{section}] must be a table of keys, not {content!r}.")
        else:
            for key, value in _leaves(section, content, keys):
                if key not in keys and key in LEGACY_KEYS:
                    legacy[key] = value
                elif key not in keys:
                    problems.append(f"{path}: unknown key {key}{nearest(key, list(keys))}.")
                elif keys[key].entry:
                    _take_tables(values, key, keys, value, path, problems)
                else:
                    checks.take(values, key, value, True, f"{path}: {key}")
    checks.current[False] = dict(values)
    for key, value in legacy.items():
        checks.take_legacy(values, key, value, False, f"{path}: {key}")
    return checks.with_implied(values)


def _leaves(name: str, content: dict[str, Any], keys: dict[str, Key]) -> Iterator[tuple[str, Any]]:
    """Keys and values of a table, including nested tables such as [quantize.linear.float8]."""
    for key, value in content.items():
        full = f"{name}.{key}"
        if isinstance(value, dict) and full not in keys:
            yield from _leaves(full, value, keys)
        else:
            yield full, value


def values_of_flags(argv: list[str], checks: ValueChecks) -> Values:
    keys, problems = checks.keys, checks.problems
    values: Values = {}
    try:
        flags, left_over = _Parser(keys).parse_known_args(argv)
    except ConfigError as error:  # a flag without a value; argparse stops at the first one
        problems.extend(error.problems)
        return values
    before = ""
    for argument in left_over:
        name = argument.split("=", 1)[0]
        if name.startswith("-"):
            problems.append(f"Command line: unknown flag {name}{nearest(name.lstrip('-'), list(keys))}.")
        elif not before.startswith("-") or "=" in before:  # else it is the value of an unknown flag
            problems.append(f"Command line: unexpected argument {argument!r}; write flags as --section.key=value.")
        before = argument
    legacy = {key: text for key, text in vars(flags).items() if key not in keys}
    for key, text in vars(flags).items():
        if key in legacy:
            continue
        if keys[key].entry:
            problems.append(
                f"--{key} is a list of tables and cannot be set by a flag; write [[{key}]] in the TOML file."
            )
            continue
        checks.take_text(values, key, text, f"--{key}")
    checks.current[True] = dict(values)
    for key, text in legacy.items():
        checks.take_legacy(values, key, text, True, f"--{key}")
    return checks.with_implied(values)


def _value_of_text(spec: Key, text: str) -> Any:
    if spec.is_list and text.lstrip().startswith("["):
        return json.loads(text)
    if spec.is_list:
        return [item.strip() for item in text.split(",") if item.strip()]
    if spec.is_bool:  # accept only these words; pydantic would also accept "yes" and "1"
        return {"true": True, "false": False}.get(text.lower(), text)
    return text


def _take(values: Values, key: str, spec: Key, value: Any, strict: bool, where: str, problems: list[str]) -> None:
    """Adds the checked value, or a problem. `strict` refuses a string for a number. "none" is None if optional."""
    if spec.optional and isinstance(value, str) and value.lower() == "none":
        values[key] = None
        return
    try:
        values[key] = pydantic.TypeAdapter(spec.annotation).validate_python(value, strict=strict)
    except pydantic.ValidationError:
        problems.append(f"{where} must be {spec.expected}, not {value!r}.")


def _take_tables(values: Values, key: str, keys: dict[str, Key], tables: Any, path: str, problems: list[str]) -> None:
    """Adds a list of tables as entries of its dataclass. If that has a field `sections`, a nested table holds keys of
    the section of that name."""
    entry = keys[key].entry
    assert entry is not None
    own = keys_of_entry(entry)
    has_sections = any(field.name == "sections" for field in dataclasses.fields(entry))
    if not (isinstance(tables, list) and all(isinstance(table, dict) for table in tables)):
        problems.append(f"{path}: {key} must be a list of tables, each headed [[{key}]], not {tables!r}.")
        return
    entries = []
    for number, table in enumerate(tables, 1):
        where = f"{path}: [[{key}]] {number}"
        checked: Values = {}
        sections: dict[str, Values] = {}
        for name, value in table.items():
            if name in own:
                _take(checked, name, own[name], value, True, f"{where}: {name}", problems)
            elif not (has_sections and isinstance(value, dict)):
                problems.append(f"{where}: unknown key {name}{nearest(name, list(own))}.")
            else:
                sections[name] = {}
                for key_of_section, item in value.items():
                    full = f"{name}.{key_of_section}"
                    if full in keys:
                        _take(sections[name], key_of_section, keys[full], item, True, f"{where}: {full}", problems)
                    else:
                        problems.append(f"{where}: unknown key {full}{nearest(full, list(keys))}.")
        entries.append(entry(**checked, **({"sections": sections} if has_sections else {})))
    values[key] = entries


class _Parser(argparse.ArgumentParser):
    """Flags for every key, without defaults: the result holds only what is on the command line."""

    def __init__(self, keys: dict[str, Key]) -> None:
        super().__init__(prog="train.py", allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
        for key, spec in keys.items():
            section, name = key.split(".", 1)
            if spec.is_bool:
                self.add_argument(f"--{key}", dest=key, nargs="?", const="true")
                self.add_argument(f"--{section}.no_{name}", dest=key, action="store_const", const="false")
            else:
                self.add_argument(f"--{key}", dest=key)
        for key in LEGACY_KEYS.keys() - keys.keys():
            section, name = key.rsplit(".", 1)
            self.add_argument(f"--{key}", dest=key, nargs="?", const="true")
            self.add_argument(f"--{section}.no_{name}", dest=key, action="store_const", const="false")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"Command line: {message}.")
