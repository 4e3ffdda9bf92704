"""Maps names in a TOML file to what they stand for; users can register their own entries."""

from collections.abc import Mapping
from typing import Generic, TypeVar

from torchtitan.errors import ConfigError, nearest

T = TypeVar("T")


class Registry(Generic[T]):
    """Entries by name: `noun` is what messages call an entry ("model"), `key` the configuration key whose value is
    looked up ("model.name")."""

    def __init__(self, noun: str, key: str, builtin: Mapping[str, T]) -> None:
        self.noun = noun
        self.key = key
        self._entries = dict(builtin)

    def register(self, name: str, entry: T) -> None:
        """Adds an entry; a name that is already taken is a ConfigError."""
        if self._entries.get(name, entry) is not entry:
            raise ConfigError(f"A {self.noun} named {name!r} is registered already; choose another name.")
        self._entries[name] = entry

    def replace(self, name: str, entry: T) -> None:
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
        return self._entries[name]

    def names(self) -> list[str]:
        return sorted(self._entries)
