"""Maps names in a TOML file to what they stand for; users can register their own entries. What only some runs use is
declared by a row, a text such as "torchtitan.optim.muon:Muon", and is imported when it is first asked for."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

from torchtitan.errors import ConfigError, nearest

T = TypeVar("T")


def load(row: str) -> Any:
    """Imports the module that a row "package.module:name" begins with, and returns what it calls `name`."""
    module, _, name = row.partition(":")
    return getattr(import_module(module), name)


def deferred(row: str) -> Callable[..., Any]:
    """A function that is imported when it is first called."""
    return lambda *args, **kwargs: load(row)(*args, **kwargs)


class Registry(Generic[T]):
    """Entries by name, each as itself or as a row (see `load`): `noun` is what messages call an entry ("model"), `key`
    the configuration key whose value is looked up ("model.name")."""

    def __init__(self, noun: str, key: str, builtin: Mapping[str, T | str]) -> None:
        self.noun = noun
        self.key = key
        self._entries = dict(builtin)

    def register(self, name: str, entry: T | str) -> None:
        """Adds an entry; a name that is already taken is a ConfigError."""
        if self._entries.get(name, entry) is not entry:
            raise ConfigError(f"A {self.noun} named {name!r} is registered already; choose another name.")
        self._entries[name] = entry

    def replace(self, name: str, entry: T | str) -> None:
        """Changes an entry."""
        self.get(name)
        self._entries[name] = entry

    def get(self, name: str, key: str = "") -> T:
        """The entry, or a ConfigError listing the known names. `key`: the key to blame, if not `self.key`."""
        if name not in self._entries:
            raise ConfigError(
                f"{key or self.key}: unknown {self.noun} {name!r}{nearest(name, self.names())}; "
                f"known: {', '.join(self.names())}."
            )
        entry = self._entries[name]
        if not isinstance(entry, str):
            return entry
        loaded: T = load(entry)
        self._entries[name] = loaded
        return loaded

    def names(self) -> list[str]:
        return sorted(self._entries)
