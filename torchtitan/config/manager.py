"""`JobConfig`, every section of the TOML file, and the manager that fills it from a file and the command line.

pydantic checks types and ranges; argparse splits the command line. Keys and values of other versions are looked at only
when something is not known here (`legacy_checks.py`).
"""

import argparse
import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pydantic

from torchtitan.config.fields import Key, fields_by_key, heading, keys_of_entry, section_class, spelled
from torchtitan.config.low_precision import MX, Float8, Int8, Precision
from torchtitan.config.output import Checkpoint, Job, Metrics, Profiling
from torchtitan.config.system import ActivationCheckpoint, Comm, Experimental, Parallelism
from torchtitan.config.training import Evaluation, LRScheduler, Model, MoEKeys, Optimizer, Stages, Training, Validation
from torchtitan.errors import HIDDEN, ConfigError, nearest, parsing, was_hidden
from torchtitan.files import PathError, UriError, local_path, regular_file
from torchtitan.registry import load

if sys.version_info >= (3, 11):
    import tomllib as tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
Values = dict[str, Any]
"""section.key -> value."""

SHIPPED_CONFIGS = Path(__file__).parents[1] / "train_configs"
MOST_STAGES = 1000
MOST_BITS = 1000  # of an integer; Python prints 14,000
MOST_PARTS = 100  # limit for a dotted key
KEY_PART = r"""(?:[\w-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')[ \t]*"""
LONG_KEY = re.compile(rf"(?:^|[{{,])[ \t\[]*(?:{KEY_PART}\.[ \t]*){{{MOST_PARTS}}}", re.MULTILINE)
CUSTOM_ARGS_MODULE = ("experimental.custom_args_module", "job.custom_config_module")  # now and formerly
# Known values that files of other versions mean in another way; `legacy_keys.RULES` says how.
WITH_RULES: Sequence[Mapping[str, Collection[Any]]] = (
    {"model.name": ["qwen3"], "model.flavor": ["debugmodel_moe", "30B-A3B", "235B-A22B"]},
    {"optimizer.early_step_in_backward": [True]},
)


@dataclasses.dataclass(frozen=True)
class JobConfig:
    """One resolved run. Each part of the code gets the section it needs and never changes it."""

    job: Job = dataclasses.field(default_factory=Job)
    model: Model = dataclasses.field(default_factory=Model)
    moe: MoEKeys = dataclasses.field(default_factory=MoEKeys)
    training: Training = dataclasses.field(default_factory=Training)
    validation: Validation = dataclasses.field(default_factory=Validation)
    evaluation: Evaluation = dataclasses.field(default_factory=Evaluation)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = dataclasses.field(default_factory=LRScheduler)
    parallelism: Parallelism = dataclasses.field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = dataclasses.field(default_factory=ActivationCheckpoint)
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    profiling: Profiling = dataclasses.field(default_factory=Profiling)
    float8: Float8 = dataclasses.field(default_factory=Float8)
    int8: Int8 = dataclasses.field(default_factory=Int8)
    mx: MX = dataclasses.field(default_factory=MX)
    precision: Precision = dataclasses.field(default_factory=Precision)
    stage: Stages = dataclasses.field(default_factory=Stages)
    comm: Comm = dataclasses.field(default_factory=Comm)
    experimental: Experimental = dataclasses.field(default_factory=Experimental)

    def changed(self, **sections: Mapping[str, Any]) -> "JobConfig":
        """This configuration with other values for some keys, by section."""
        return dataclasses.replace(
            self, **{name: dataclasses.replace(getattr(self, name), **keys) for name, keys in sections.items()}
        )


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
        config_class = self.config_class
        if module and isinstance(module, str):
            config_class = load("torchtitan.config.extension:extend")(config_class, module)
        if {"--help", "-h"} & set(argv):
            print_help(config_class)
            raise SystemExit(0)

        if isinstance(table.get("stage"), list):  # [[stage]]
            if len(table["stage"]) > MOST_STAGES:
                raise ConfigError(f"{path}: it has {len(table['stage']):,} [[stage]], and a run {MOST_STAGES} at most.")
            table["stage"] = {"entries": table["stage"]}
        elif isinstance(table.get("stage"), dict) and "entries" not in table["stage"]:
            raise ConfigError("[stage] is one table, but stages are a list of them; write [[stage]].")
        checks = ValueChecks(fields_by_key(config_class))
        values = merged(path, table, argv, checks)
        if checks.problems or any(
            all(checks.lookup(values, key) in meant for key, meant in rule.items()) for rule in WITH_RULES
        ):
            checks = load("torchtitan.config.legacy_checks:LegacyChecks")(checks.keys)
            values = merged(path, table, argv, checks)
        self.notices += checks.notices
        if checks.problems:
            raise ConfigError(*checks.problems)
        return build(config_class, values)


def build(config_class: type[JobConfig], values: Values) -> JobConfig:
    """The configuration with `values`, which are already checked, in place of defaults."""
    return config_class(**{name: section_class(config_class, name)(**own) for name, own in by_section(values).items()})


@dataclasses.dataclass
class ValueChecks:
    """The keys that values are checked against; collects problems and notices."""

    keys: dict[str, Key]
    problems: list[str] = dataclasses.field(default_factory=list)
    notices: list[str] = dataclasses.field(default_factory=list)

    @property
    def flags(self) -> dict[str, bool]:
        """The flags that are known, and whether their value may be left out."""
        return {key: spec.takes(bool) for key, spec in self.keys.items()}

    def for_table(self, keys: dict[str, Key]) -> "ValueChecks":
        """The same for an entry in a list of tables, which has keys of its own."""
        return ValueChecks(keys, self.problems, self.notices)

    def lookup(self, values: Values, key: str) -> Any:
        return values.get(key, self.keys[key].default)

    def values_of(self, given: Values, of_flags: bool, prefix: str) -> Values:
        """The checked values of a file, of the flags or of a table. Messages put `prefix` in front of keys."""
        values: Values = {}
        for key, value in given.items():
            if key in self.keys:
                self._take(values, key, value, of_flags, prefix + key)
            else:
                self.problems.append(f"{prefix}unknown key {key}{nearest(key, list(self.keys))}.")
        return values

    def finish(self, values: Values) -> None:
        """Looks at all values, once those of the file and the flags are known."""
        self.problems += [
            f"{key} = {spelled(value)} has lost its password or token ({HIDDEN}): set it again."
            for key, value in values.items()
            if was_hidden(value)
        ]

    def _take(self, values: Values, key: str, value: Any, of_flag: bool, where: str) -> None:
        """Adds the checked value of a key, or a problem."""
        spec, is_text = self.keys[key], of_flag and isinstance(value, str)
        if spec.entry and of_flag:
            title = heading(key)
            self.problems.append(f"{where} is a list of tables and cannot be set by a flag; write {title} in a file.")
            return
        if spec.entry:
            return self._take_tables(values, key, spec.entry, value, where)
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
        self._check(values, key, value, not is_text or spec.takes(bool), where)

    def _take_tables(self, values: Values, key: str, entry: type[Any], tables: Any, where: str) -> None:
        """Adds a list of tables as entries of a dataclass. If that has a field `sections`, tables may hold sections."""
        if not (isinstance(tables, list) and all(isinstance(table, dict) for table in tables)):
            self.problems.append(f"{where} must be a list of tables, each headed {heading(key)}, not {tables!r}.")
            return
        has_sections = any(field.name == "sections" for field in dataclasses.fields(entry))
        checks = self.for_table({**keys_of_entry(entry), **(self.keys if has_sections else {})})
        values[key] = []
        for number, table in enumerate(tables, 1):
            title = f"{where.removesuffix(key)}{heading(key)} {number}: "
            checked = checks.values_of(leaves(table, checks.keys), False, title)
            own = {name: checked.pop(name) for name in list(checked) if "." not in name}
            values[key].append(entry(**own, **({"sections": by_section(checked)} if has_sections else {})))

    def _check(self, values: Values, key: str, value: Any, strict: bool, where: str) -> None:
        """Adds a checked value, or a problem. `strict` refuses a string for a number. "none" is None if optional."""
        spec = self.keys[key]
        if spec.optional and isinstance(value, str) and value.lower() == "none":
            values[key] = None
            return
        try:
            values[key] = pydantic.TypeAdapter(spec.annotation).validate_python(value, strict=strict)
        except pydantic.ValidationError as error:
            faults = (fault.get("ctx", {}).get("error") for fault in error.errors())
            of_uri = next((fault for fault in faults if isinstance(fault, UriError)), None)
            self.problems.append(f"{where}: {of_uri}" if of_uri else f"{where} must be {spec.expected}, not {value!r}.")


def merged(path: str, table: Values, argv: list[str], checks: ValueChecks) -> Values:
    """The values of a file, and of the flags, which win."""
    with parsing(lambda reason: ConfigError(f"{path}: {reason}.")):
        values = values_of_file(path, table, checks)
    argv = take_flags_of_stages(argv, values, checks)
    values |= values_of_flags(argv, checks)
    checks.finish(values)
    return values


def values_of_file(path: str, table: Values, checks: ValueChecks) -> Values:
    current, known = (dict.fromkeys(key.split(".", 1)[0] for key in keys) for keys in (checks.keys, checks.flags))
    given: Values = {}
    for section, content in table.items():
        if section not in known:
            checks.problems.append(f"{path}: unknown section [{section}]{nearest(section, list(current))}.")
        elif not isinstance(content, dict):
            checks.problems.append(f"{path}: [{section}] must be a table of keys, not {content!r}.")
        else:
            given |= leaves(content, checks.keys, f"{section}.")
    for key in [key for key, value in given.items() if not fits(value)]:
        checks.problems.append(f"{path}: {key} has an integer of over {MOST_BITS:,} bits; in TOML they have 64.")
        del given[key]
    return checks.values_of(given, False, f"{path}: ")


def fits(value: Any) -> bool:
    """Whether no integer in a value is too large for Python to print it."""
    if isinstance(value, dict | list):
        return all(map(fits, value.values() if isinstance(value, dict) else value))
    return type(value) is not int or value.bit_length() <= MOST_BITS


def take_flags_of_stages(argv: list[str], values: Values, checks: ValueChecks) -> list[str]:
    """Applies flags such as --stage.anneal.training.seq_len=16384 to a file's stages. Returns the other arguments."""
    entries = values.get("stage.entries", [])
    own = checks.for_table({**keys_of_entry(type(entries[0])), **checks.keys} if entries else {})
    flags = {f"stage.{entry.name}.{key}": spec.takes(bool) for entry in entries for key, spec in own.keys.items()}
    given, left_over = FlagParser(flags).parse_known_args(argv)
    for number, entry in enumerate(entries):
        prefix = f"stage.{entry.name}."
        texts = {flag.removeprefix(prefix): text for flag, text in vars(given).items() if flag.startswith(prefix)}
        taken = own.values_of(texts, True, f"--{prefix}")
        sections = by_section({key: value for key, value in taken.items() if "." in key})
        both = {name: {**entry.sections.get(name, {}), **sections.get(name, {})} for name in entry.sections | sections}
        plain = {key: value for key, value in taken.items() if "." not in key}
        entries[number] = dataclasses.replace(entry, sections=both, **plain)
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
    try:
        flags, left_over = _parser_of(tuple(checks.flags.items())).parse_known_args(argv)
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
        return json.loads(text) if text.lstrip().startswith("[") else items_of(text)
    if spec.takes(dict) and text.lstrip().startswith("{"):
        return tomllib.loads(f"value = {text}")["value"]
    # A boolean is only one of these words; pydantic would also accept "yes" and "1".
    return {"true": True, "false": False}.get(text.lower(), text) if spec.takes(bool) else text


def items_of(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


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
