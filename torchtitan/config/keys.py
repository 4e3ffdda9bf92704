"""The configuration's keys, read from its dataclasses: annotation, default, help, and valid values."""

import dataclasses
import types
import typing
from typing import Any, ClassVar, Literal, Protocol

import annotated_types
import pydantic
from typing_extensions import Doc

from torchtitan.files import expand


class Section(Protocol):
    """A dataclass of keys: a section of the configuration, or an entry in a list of tables."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


@dataclasses.dataclass(frozen=True)
class Key:
    """One configuration key: its annotation, default and help."""

    annotation: Any
    default: Any
    help: str

    @property
    def is_bool(self) -> bool:
        return any(_plain(arm) is bool for arm in _union_members(self.annotation))

    @property
    def is_list(self) -> bool:
        return any(typing.get_origin(_plain(arm)) is list for arm in _union_members(self.annotation))

    @property
    def entry(self) -> type[Any] | None:
        """The dataclass of the entries if the value is a list of tables, else None."""
        plain = _plain(self.annotation)
        of_list: type[Any] | None = typing.get_args(plain)[0] if typing.get_origin(plain) is list else None
        return of_list if dataclasses.is_dataclass(of_list) else None

    @property
    def choices(self) -> list[Any]:
        literals = [_plain(arm) for arm in _union_members(self.annotation) if typing.get_origin(_plain(arm)) is Literal]
        return [value for literal in literals for value in literal.__args__]

    @property
    def optional(self) -> bool:
        return types.NoneType in _union_members(self.annotation)

    @property
    def expected(self) -> str:
        """'an integer above 0', 'one of bfloat16, float32' ..."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}" + (", or none" if self.optional else "")
        if self.entry:
            return "a list of tables"
        names = {
            int: "an integer",
            float: "a number",
            bool: "true or false",
            str: "a string",
            list[str]: "a list of strings",
            list[float]: "a list of numbers",
        }
        arms = [arm for arm in _union_members(self.annotation) if arm is not types.NoneType]
        constraints = [item for arm in [self.annotation, *arms] for item in _constraints(arm)]
        if pydantic.AfterValidator(expand) in constraints:
            names[str], constraints = "a path on this machine", []
        kinds = [names.get(_plain(arm), str(_plain(arm))) for arm in arms]
        limits = [_limit(item) for item in constraints]
        return " ".join([" or ".join(kinds), " and ".join(dict.fromkeys(filter(None, limits)))]).strip() + (
            ", or none" if self.optional else ""
        )

    @property
    def shown_default(self) -> str:
        if self.default is None:
            return "none"
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if isinstance(self.default, list):
            return ",".join(map(str, self.default)) or "empty"
        return str(self.default) if self.default != "" else "empty"


def fields_by_key(config_class: type) -> dict[str, Key]:
    """Every "section.key" with its annotation, default and help."""
    keys = {}
    for section in dataclasses.fields(config_class):
        of_section = _keys_of(section_class(config_class, section.name))
        keys.update({f"{section.name}.{name}": key for name, key in of_section.items()})
    return keys


def keys_of_entry(entry: type[Any]) -> dict[str, Key]:
    """The keys of an entry in a list of tables; fields without help are not keys."""
    return {name: key for name, key in _keys_of(entry).items() if key.help}


def _keys_of(cls: type[Any]) -> dict[str, Key]:
    keys = {}
    hints, defaults = typing.get_type_hints(cls, include_extras=True), cls()
    for field in dataclasses.fields(cls):
        annotation = hints[field.name]
        docs = [item.documentation for item in _constraints(annotation) if isinstance(item, Doc)]
        keys[field.name] = Key(annotation, getattr(defaults, field.name), docs[0] if docs else "")
    return keys


def section_class(config_class: type, name: str) -> type[Any]:
    section: type[Any] = typing.get_type_hints(config_class)[name]
    return section


def _constraints(annotation: Any) -> list[Any]:
    return list(getattr(annotation, "__metadata__", ()))


def _plain(annotation: Any) -> Any:
    """The annotation without its `Annotated` wrapper."""
    return annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation


def _union_members(annotation: Any) -> list[Any]:
    """The members of a union; for any other type, that type alone."""
    plain = _plain(annotation)
    return list(plain.__args__) if typing.get_origin(plain) in (typing.Union, types.UnionType) else [annotation]


def _limit(item: Any) -> str:
    match item:
        case annotated_types.Gt(gt):
            return f"above {gt}"
        case annotated_types.Ge(ge):
            return f"of at least {ge}"
        case annotated_types.Le(le):
            return f"at most {le}"
        case annotated_types.Lt(lt):
            return f"below {lt}"
        case annotated_types.MinLen(1):
            return "that is not empty"
        case annotated_types.MaxLen(length):
            return f"with {length} entries"
    return ""
