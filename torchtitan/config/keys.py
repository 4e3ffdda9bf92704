"""The configuration's keys, read from its dataclasses: annotation, default, help, and valid values."""

import dataclasses
import types
import typing
from typing import Any, ClassVar, Literal, Protocol

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from typing_extensions import Doc

from torchtitan.config.fields import Expected

NOUNS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list[str]: "a list of strings",
    list[float]: "a list of numbers",
}
LIMITS = {
    Gt: "above {0.gt}",
    Ge: "of at least {0.ge}",
    Lt: "below {0.lt}",
    Le: "at most {0.le}",
    MinLen: "that is not empty",
    MaxLen: "of at most {0.max_length} entries",
}


class Section(Protocol):
    """A dataclass of keys: a section of the configuration, or an entry in a list of tables."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


@dataclasses.dataclass(frozen=True)
class Key:
    """One configuration key: its annotation, default and help."""

    annotation: Any
    default: Any
    help: str

    def takes(self, plain: type[Any]) -> bool:
        """Whether its values may be of this type, such as bool, list or dict (a table)."""
        return any(plain in (member, typing.get_origin(member)) for member, _ in _members(self.annotation))

    @property
    def entry(self) -> type[Any] | None:
        """The dataclass of the entries if the value is a list of tables, else None."""
        items = [arg for plain, _ in _members(self.annotation) for arg in typing.get_args(plain)]
        return next((item for item in items if dataclasses.is_dataclass(item) and isinstance(item, type)), None)

    @property
    def optional(self) -> bool:
        return self.takes(types.NoneType)

    @property
    def expected(self) -> str:
        """'an integer above 0', 'one of bfloat16, float32' ..."""
        if self.entry:
            return "a list of tables"
        members = [_described(*member) for member in _members(self.annotation) if member[0] is not types.NoneType]
        return " or ".join(dict.fromkeys(members)) + (", or none" if self.optional else "")

    @property
    def shown_default(self) -> str:
        if isinstance(self.default, list):
            return ",".join(map(str, self.default)) or "empty"
        shown = str(self.default) if self.default != "" else "empty"
        return shown.lower() if self.default is None or isinstance(self.default, bool) else shown


def heading(key: str) -> str:
    """The heading of each table of a list of tables in a file."""
    return f"[[{key.removesuffix('.entries')}]]"


def fields_by_key(config_class: type) -> dict[str, Key]:
    """Every "section.key" with its annotation, default and help."""
    return {
        f"{section.name}.{name}": key
        for section in dataclasses.fields(config_class)
        for name, key in _keys_of(section_class(config_class, section.name)).items()
    }


def keys_of_entry(entry: type[Any]) -> dict[str, Key]:
    """The keys of an entry in a list of tables; fields without help are not keys."""
    return {name: key for name, key in _keys_of(entry).items() if key.help}


def section_class(config_class: type, name: str) -> type[Any]:
    section: type[Any] = typing.get_type_hints(config_class)[name]
    return section


def _keys_of(section: type[Any]) -> dict[str, Key]:
    hints, defaults = typing.get_type_hints(section, include_extras=True), section()
    keys = {}
    for name in (field.name for field in dataclasses.fields(section)):
        docs = [item.documentation for item in getattr(hints[name], "__metadata__", ()) if isinstance(item, Doc)]
        keys[name] = Key(hints[name], getattr(defaults, name), "".join(docs[:1]))
    return keys


def _members(annotation: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """The members of a union, or any other type alone: each without its `Annotated`, and what that adds to it."""
    metadata = getattr(annotation, "__metadata__", ())
    plain = annotation.__origin__ if metadata else annotation
    if typing.get_origin(plain) not in (typing.Union, types.UnionType):
        return [(plain, metadata)]
    return [(inner, (*own, *metadata)) for arm in plain.__args__ for inner, own in _members(arm)]


def _described(plain: Any, metadata: tuple[Any, ...]) -> str:
    if expected := [item for item in metadata if isinstance(item, Expected)]:
        return expected[-1]
    if typing.get_origin(plain) is Literal:
        return f"one of {', '.join(map(str, plain.__args__))}"
    limits = [LIMITS[type(item)].format(item) for item in metadata if type(item) in LIMITS]
    return " ".join([NOUNS.get(plain, str(plain)), " and ".join(dict.fromkeys(limits))]).strip()
