"""`train_state.json`: the part of a checkpoint that is not tensors. Its content is not trusted."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.manifest import TRAIN_STATE, read_file
from torchtitan.errors import CheckpointError
from torchtitan.parallel.process_group import failed_collective

# Types of the parts; those only in PARTS are optional.
NEEDED = {"identity": dict, "weights_only": bool, "step": int}
PARTS = {
    **NEEDED,
    "first_step": int,
    "tokens_seen": int,
    "seq_len": int,
    "guard": dict,
    "dataloader": dict,
    "converters": dict,
    "hooks": dict,
    "loss_scale": float,
    "stages": list,
    "tokenizer": dict,
}


def read_train_state(checkpoint: Path, step: int) -> dict[str, Any]:
    """The JSON part of the checkpoint of `step`. Only types are checked here; contents are checked where they are
    loaded. Raises a CheckpointError, with only the reason, if it is missing or invalid."""
    try:
        state = json.loads(read_file(checkpoint / TRAIN_STATE))
        if not (isinstance(state, dict) and NEEDED.keys() <= state.keys()):
            raise ValueError("some of its parts are missing")
        for name, expected in PARTS.items():
            if name in state and type(state[name]) is not expected:
                raise ValueError(f"{name} is {state[name]!r:.40}")
        if state["step"] != step:
            raise ValueError(f"its step is {state['step']}, but the manifest's is {step}")
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
