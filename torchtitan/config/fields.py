"""Keys of the configuration: the types that declare them in section dataclasses, as `Annotated[type, Doc(one line of
help)]`, and `Key`, which is what a dataclass says of one."""

import dataclasses
import functools
import json
import re
import types
import typing
from pathlib import Path
from typing import Annotated as Annotated
from typing import Any, ClassVar, Literal, Protocol

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen, Predicate
from pydantic import AfterValidator, AllowInfNan, FiniteFloat, StringConstraints
from typing_extensions import Doc as Doc

from torchtitan.files import expand, expand_any, expand_data


class Expected(str):
    """What a value must be, for messages and help, where the type and its limits do not say it well."""


def not_former(names: str) -> Predicate:
    """Fails on names of other versions, given as a pattern: what fails is looked up in `legacy_keys.LEGACY_VALUES`."""
    former = re.compile(names).fullmatch
    return Predicate(lambda value: not any(former(name) for name in ([value] if isinstance(value, str) else value)))


def step_ranges(entries: list[str]) -> list[range]:
    """Ranges of steps, from texts such as `1200-1250` and `1300`; raises ValueError if one makes no sense."""
    words = (entry.partition("-") for entry in entries)
    ends = [(int(first), int(last if dash else first)) for first, dash, last in words]
    if any(not 0 < first <= last for first, last in ends):
        raise ValueError("a step below 1, or a range that ends before it begins")
    return [range(first, last + 1) for first, last in ends]


def tokens_in(text: str) -> int:
    """A number of tokens, from a text such as `400B` or `1.5T`; raises ValueError for another text, or 0."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([KMBT])", text, re.IGNORECASE)
    if match is None or not (tokens := round(float(match[1]) * 1000.0 ** ("KMBT".index(match[2].upper()) + 1))):
        raise ValueError("not a number of tokens")
    return tokens


@functools.cache
def batch_schedule(text: str) -> tuple[tuple[int, int | str], ...]:
    """Sizes of batches and where they begin, as a step (0: with the run) or a number of tokens, from a text such as
    `64@0, 128@2B`; raises ValueError for another text."""
    entries = [entry.strip().partition("@") for entry in text.split(",")]
    schedule = tuple((int(size), int(at) if at.isdigit() else at) for size, _, at in entries)
    if schedule[0][1] != 0 or any(size < 1 for size, _ in schedule):
        raise ValueError("it begins with a size above 0 from step 0 on")
    for unit in (int, str):
        begins = [tokens_in(at) if isinstance(at, str) else at for _, at in schedule if isinstance(at, unit)]
        if begins != sorted({*begins}):
            raise ValueError("sizes must begin one after the other")
    return schedule


PositiveInt = Annotated[int, Gt(0)]
TokenCount = Annotated[
    str, Predicate(lambda text: tokens_in(text) > 0), Expected("a number of tokens with K, M, B or T, such as 10B")
]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveOrAll = Annotated[int, Ge(-1), Predicate(bool), Expected("-1 or an integer above 0")]
BatchSize = Annotated[
    PositiveOrAll | Annotated[str, Predicate(lambda text: bool(batch_schedule(text)))],
    Expected('-1, an integer above 0, or sizes and where they begin, such as "64@0, 128@2B"'),
]
TokenOrNothing = Annotated[int, Ge(-1), Expected("-1 or the id of a token")]
StepOrNewest = Annotated[int, Ge(-1), Expected("-1 or a step")]
PositiveFloat = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
LearningRate = Annotated[float, Gt(0), Le(100)]  # roughly how far AdamW moves a weight per step
Decay = Annotated[float, Ge(0), Le(100)]
RopeTheta = Annotated[float, Gt(1), AllowInfNan(False)]
RopeScalingTable = Annotated[dict[str, Any], Expected('a table such as {type = "yarn", factor = 8, original = 4096}')]
PositiveFraction = Annotated[float, Gt(0), Le(1)]
Seed = Annotated[int, Ge(0), Lt(2**63)]  # a signed 64-bit integer, as torch and TOML need
Gigabytes = Annotated[float, Ge(0), Le(10**6)]
Entries = Annotated[int, Ge(0), Le(10**7)]
Seconds = Annotated[int, Gt(0), Le(365 * 24 * 3600)]
SecondsOrNone = Annotated[int, Ge(0), Le(365 * 24 * 3600)]
NotEmpty = Annotated[str, MinLen(1)]  # an unset shell variable would mean the working directory
ExpertLoad = Annotated[float, Ge(1)]
TimesMore = Annotated[float, Gt(1)]
StageName = Annotated[
    str, StringConstraints(pattern=r"^[\w-]+$"), Expected("a name of letters, digits, hyphens and underscores")
]
StageEnd = Annotated[
    Annotated[int, Gt(0)] | Annotated[float, Gt(0), Le(1)] | TokenCount,
    Expected('a step, a fraction of training.steps, or a number of tokens such as "400B"'),
]
Steps = Annotated[
    list[str],
    Predicate(lambda entries: step_ranges(entries) is not None),
    Expected("a list of steps above 0 and ranges of them, such as 1200-1250"),
]
Coefficients = Annotated[list[FiniteFloat], MinLen(3), MaxLen(3), Expected("a list of 3 finite numbers")]
EveryLayers = Annotated[
    str, StringConstraints(pattern="^(op|0*[1-9][0-9]*)$"), Expected("'op' or a number of layers above 0")
]
PathOrEmpty = Annotated[str, AfterValidator(expand), Expected("a path on this machine")]
LocalPath = Annotated[PathOrEmpty, MinLen(1)]
NOT_ABOVE = Predicate(lambda path: ".." not in Path(path).parts)
DumpFolder = Annotated[
    LocalPath, Expected("a path on this machine (checkpoint.folder takes a URI, to keep checkpoints elsewhere)")
]
InnerFolder = Annotated[LocalPath, NOT_ABOVE, Expected("a path on this machine, in job.dump_folder or absolute")]
AnyPath = Annotated[str, AfterValidator(expand_any), MinLen(1), Expected("a path, or a URI such as s3://bucket/name")]
AnyFolder = Annotated[
    AnyPath,
    NOT_ABOVE,
    Predicate(lambda path: not path.lower().startswith(("hf:", "http:", "https:"))),  # where no run can write
    Expected("a path in job.dump_folder, an absolute one, or a URI such as s3://bucket/run"),
]
DataPath = Annotated[NotEmpty, AfterValidator(expand_data)]  # a user's own data set may give the path another meaning
WorldSize = Annotated[int, Gt(0), Le(1 << 16)]  # planning for more would take many minutes

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


def spelled(value: Any) -> str:
    """As in a message: without quotation marks, unless it would be empty."""
    return value if isinstance(value, str) and value else json.dumps(value)


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
