"""Checks the values of a start that has keys or values of other torchtitan versions, and translates these."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchtitan.config.fields import Key, spelled
from torchtitan.config.legacy_keys import LEGACY_KEYS, LEGACY_VALUES, RULES, LegacyKey
from torchtitan.config.manager import ValueChecks, Values, items_of


@dataclass
class LegacyChecks(ValueChecks):
    """Translates the `former` keys too.

    Attributes:
        implied: values of other keys that the legacy values seen so far imply.
        seen: the legacy keys, and values as in `key = value`.
        late: legacy keys that depend on others: value, whether it is a flag's, and where it is.
        current: the values of current keys in the file (False) and the flags (True).
        of_table: whether these are the keys of a table in a list. There values of other versions are refused: what they
            mean depends on other keys (`RULES`), which a table may leave to the file.
    """

    former: Mapping[str, LegacyKey] = field(default_factory=lambda: LEGACY_KEYS)
    implied: Values = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    late: dict[str, tuple[Any, bool, str]] = field(default_factory=dict)
    current: dict[bool, Values] = field(default_factory=lambda: {False: {}, True: {}})
    of_table: bool = False

    @property
    def flags(self) -> dict[str, bool]:
        return {**dict.fromkeys(self.former, True), **super().flags}

    def for_table(self, keys: dict[str, Key]) -> ValueChecks:
        has_sections = any("." in key for key in keys)
        former = {key: legacy for key, legacy in LEGACY_KEYS.items() if has_sections and not legacy.late}
        return LegacyChecks(keys, self.problems, self.notices, former, of_table=True)

    def values_of(self, given: Values, of_flags: bool, prefix: str) -> Values:
        """A current key that is given too wins over what legacy keys and values mean for it; what depends on several
        keys is left to `finish`."""
        former = {key: value for key, value in given.items() if key in self.former and key not in self.keys}
        current = {key: value for key, value in given.items() if key not in former}
        values = self.current[of_flags] = super().values_of(current, of_flags, prefix)
        merged = dict(values)
        for key, value in former.items():
            self.seen.add(key)
            if self.former[key].late:
                self.late[key] = value, of_flags, prefix + key
            else:
                self._add(merged, self._translated(merged, key, value, of_flags, prefix + key), merged)
        implied, self.implied = self.implied, {}
        self._add(merged, implied, merged)
        return merged

    def finish(self, values: Values) -> None:
        for key, (value, of_flag, where) in self.late.items():
            given = {**({} if of_flag else self.current[False]), **self.current[True]}
            translated = self._translated(values, key, value, of_flag, where)
            self._add(values, translated, {} if self.former[key].adds else given)
        self.notices += filter(None, [rule.apply(values, partial(self.lookup, values), self.seen) for rule in RULES])
        super().finish(values)

    def _check(self, values: Values, key: str, value: Any, strict: bool, where: str) -> None:
        if strict and isinstance(value, str) and self.keys[key].takes(list) and "." in key:
            self.notices.append(f"{where} = {spelled(value)} is now a list, separated at commas")
            value, strict = items_of(value), False
        if strict or value != "":  # an empty flag may be an unset shell variable
            value, others, legacy = translate_value(key, value)
            if legacy and self.of_table:
                meaning = "; ".join(notice_of_value(key, entry) for entry in legacy)
                self.problems.append(f"{where}: {meaning}; write it so: tables take no names of other versions.")
                return
            self.notices += [notice_of_value(key, entry) for entry in legacy]
            self.seen |= {f"{key} = {entry}" for entry in legacy}
            for other in others:  # where the file or command line sets it, that wins
                super()._check(self.implied, other, others[other], True, where)
        if value is not None:
            super()._check(values, key, value, strict, where)

    def _add(self, values: Values, new: Values, given: Values) -> None:
        """Adds the `new` values whose keys are not given under their current names, which win."""
        for key, value in new.items():
            if key not in given:
                values[key] = value
            elif given[key] != value:
                self.notices.append(f"{key} = {spelled(given[key])} is set too, and wins")

    def _translated(self, values: Values, key: str, value: Any, of_flag: bool, where: str) -> Values:
        try:
            translated = self.former[key].translate(value, partial(self.lookup, values))
        except ValueError as error:
            self.problems.append(f"{where} = {value} is not supported: {error}.")
            return {}
        self.notices.append(f"{where} {self.former[key].notice(value, translated)}")
        checked: Values = {}
        for new, item in translated.items():
            self._take(checked, new, item, of_flag, where)
        return checked


def translate_value(key: str, value: Any) -> tuple[Any, Values, list[str]]:
    """For a value of a current key: the current value, other keys that it sets, and the legacy entries in it."""
    table = LEGACY_VALUES.get(key, {})
    entries = value if isinstance(value, list) else [value]
    legacy = [str(entry) for entry in entries if str(entry) in table]
    if not legacy:
        return value, {}, []
    new = [table.get(str(entry), (entry, {}))[0] for entry in entries]
    new = list(dict.fromkeys(entry for entry in new if entry is not None))
    others = {name: other for entry in legacy for name, other in table[entry][1].items()}
    return (new if isinstance(value, list) else next(iter(new), None)), others, legacy


def notice_of_value(key: str, entry: str) -> str:
    """What a legacy value means here, as a sentence."""
    new, others = LEGACY_VALUES[key][entry]
    now = {**({key: new} if new is not None else {}), **others}
    return f"{key} = {spelled(entry)} is now {', '.join(f'{k} = {spelled(v)}' for k, v in now.items()) or 'ignored'}"
