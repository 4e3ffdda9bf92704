"""`train_state.json`: the part of a checkpoint that is not tensors. Its content is not trusted."""

import contextlib
import json
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from torchtitan.checkpoint.manifest import TRAIN_STATE, read_file
from torchtitan.errors import CheckpointError
from torchtitan.parallel.process_group import failed_collective

NEEDED = {"identity", "weights_only", "step"}  # All other parts are missing from some checkpoints.


@dataclass(kw_only=True)
class TrainState:
    """What a run resumes from, beside tensors. The file has the fields in this order, without those that are None.

    Attributes:
        weights_only: whether the checkpoint lacks the optimizer, so that no run can resume from it.
        identity: of the model: family, flavor, sizes; None in checkpoints of torchtitan.
        tokenizer: its identity (`checkpoint.tokenizer.identity_of`); None in checkpoints of earlier versions.
        step: the last optimizer step, performed or skipped.
        first_step: the step of another run's checkpoint from which this run went on; else 0.
        tokens_seen: number of tokens trained on since step 0.
        guard: `UpdateGuard.state_dict`.
        dataloader: `Loader.merge_states`.
        stages: the last step and the title of each, if there are several.
        seq_len: tokens in the longest sequences trained on; None in checkpoints of earlier versions, whose runs had
            only one length.
        learning_rate: of the step after `step`; None after the last one.
        converters: `converter_state`.
        hooks: states of the users' hooks, by name.
        loss_scale: of the engine that saved; None in checkpoints of earlier versions.
    """

    weights_only: bool = False
    identity: dict[str, Any] | None = None
    tokenizer: dict[str, Any] | None = None
    step: int
    first_step: int = 0
    tokens_seen: int = 0
    guard: dict[str, Any] | None = None
    dataloader: dict[str, Any] | None = None
    stages: Sequence[tuple[int, str]] | None = None
    seq_len: int | None = None
    learning_rate: float | None = None
    converters: dict[str, Any] | None = None
    hooks: dict[str, Any] | None = None
    loss_scale: float | None = None

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_json(cls, values: Any) -> "TrainState":
        """Checks only types; contents are checked where they are loaded. Raises a ValueError."""
        if not (isinstance(values, dict) and values.keys() >= NEEDED):
            raise ValueError("some of its parts are missing")
        parts = {name: values[name] for name in TYPES if name in values}
        for name, value in parts.items():
            fits = not isinstance(value, int | float) or 0 <= value < 1 << 63  # NaN does not
            if type(value) is not TYPES[name] or not fits:
                raise ValueError(f"{name} is {value!r:.40}")
        return cls(**parts)

    @property
    def tokenizer_file(self) -> str | None:
        """The hash of the tokenizer's file, which is all that checkpoints of earlier versions say of it."""
        return (self.dataloader or {}).get("tokenizer")

    def without(self, excluded: Set[str]) -> "TrainState":
        """Leaves out these parts of a checkpoint, by their names in `checkpoint.exclude_from_loading`, and what depends
        on them. Steps then count from 0."""
        state = replace(self)
        if "dataloader" in excluded or self.step == 0:  # As in a seed checkpoint, which any data and layout may follow.
            state.dataloader = None
        if "model" in excluded:  # The state of the converters depends on the weights.
            state.converters = None
        if "train_state" in excluded:
            state.step, state.tokens_seen, state.guard = 0, 0, None
        return state


def _type_of(hint: Any) -> type:
    """Such as `dict` for `dict[str, Any] | None`, and `list` for a sequence, as JSON has it."""
    hint = get_args(hint)[0] if isinstance(hint, UnionType) else hint
    return list if get_origin(hint) is Sequence else get_origin(hint) or hint


TYPES = {name: _type_of(hint) for name, hint in get_type_hints(TrainState).items()}


def read_train_state(checkpoint: Path, step: int) -> TrainState:
    """The JSON part of the checkpoint of `step`. Raises a CheckpointError, with only the reason, if it is missing or
    invalid."""
    try:
        state = TrainState.from_json(json.loads(read_file(checkpoint / TRAIN_STATE)))
        if state.step != step:
            raise ValueError(f"its step is {state.step}, but the manifest's is {step}")
        return state
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{TRAIN_STATE} is invalid ({error})") from None


@contextlib.contextmanager
def refuse_wrong_values() -> Iterator[None]:
    """Wraps loading `train_state.json`: an error there means a wrong value, and becomes a CheckpointError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if failed_collective(error):
            raise
        raise CheckpointError(
            f"{TRAIN_STATE} of the checkpoint has an invalid value ({type(error).__name__}: {error}); choose another "
            "checkpoint with --checkpoint.load_step."
        ) from error


def check_kind(value: Any, like: Any, where: str) -> None:
    """Raises a ValueError if a value has another type than in `like`, where None is any type, or is an int below 0."""
    if isinstance(like, dict) and isinstance(value, dict):
        for key in like.keys() & value.keys():
            check_kind(value[key], like[key], f"{where}.{key}")
    elif isinstance(like, list) and isinstance(value, list):
        for place, (item, other) in enumerate(zip(value, like, strict=False)):
            check_kind(item, other, f"{where}[{place}]")
    elif like is not None and (type(value) is not type(like) or (type(like) is int and value < 0)):
        raise ValueError(f"{where} is {value!r:.40}")
