"""A run's tokenizer: its identity is in `train_state.json`, and its files are copied by `tokenizer_copy.py`."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.tokenizer_copy import COPY
from torchtitan.checkpoint.train_state import TrainState
from torchtitan.data.tokenizer import Tokenizer, find_file, load_tokenizer
from torchtitan.errors import CheckpointError, DataError
from torchtitan.files import is_uri
from torchtitan.logging import logger

Identity = Mapping[str, Any]
FAR_SMALLER = 2  # embeddings per token; vocabularies are padded by less
BOUNDARIES = ("bos_id", "eos_id", "add_eos")
# A step-N folder lies in `checkpoint.folder` in the dump folder.
LEVELS = 4


def identity_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """JSON."""
    keys = ("fingerprint", "ids_fingerprint", "vocab_size", *BOUNDARIES)
    return {key: getattr(tokenizer, key) for key in keys}


def same_ids(tokenizer: Identity, other: Identity) -> bool:
    """Whether two tokenizers are the same file, or give the same ids from different files."""
    return any(tokenizer[key] == other.get(key) for key in ("fingerprint", "ids_fingerprint"))


def find_tokenizer(checkpoint: Path, identity: Identity, configuration: Any) -> str | None:
    """Where the tokenizer of a checkpoint is: the copy near it, or in the run's dump folder, or the path that the run
    had; as `model.tokenizer_path`. Its identity is in the train state, the configuration in the manifest. Raises a
    CheckpointError if none of these is that tokenizer."""
    places: list[str | None] = [str(parent / COPY) for parent in [*checkpoint.resolve().parents][:LEVELS]]
    with contextlib.suppress(KeyError, TypeError):
        places.append(str(Path(configuration["job"]["dump_folder"]) / COPY))
    with contextlib.suppress(KeyError, TypeError):
        places.append(configuration["model"]["tokenizer_path"])
    for place in places:
        with contextlib.suppress(DataError):
            if (place is None or is_uri(place) or Path(place).expanduser().exists()) and same_ids(
                identity_of(load_tokenizer(place)), identity
            ):
                return place
    last = "shipped here" if places[-1] is None else f"at {places[-1]}"
    raise CheckpointError(
        f"the tokenizer of {checkpoint} (fingerprint {identity.get('fingerprint')!s:.20}) is neither in a folder "
        f"{COPY} near it nor {last}; name it with --tokenizer-path, or put its files into {places[1]}."
    )


def check_tokenizer(checkpoint: Path, state: TrainState, configuration: Any, this_run: Identity, goes_on: bool) -> None:
    """Raises a CheckpointError unless a checkpoint was made with the tokenizer of `this_run`; warns if an old one does
    not say. If the data are continued (`goes_on`), BOS and EOS must be the same, too."""
    saved = state.tokenizer
    if saved is None:
        if (file := state.tokenizer_file) not in (None, this_run["fingerprint"]):
            logger.warning(f"{checkpoint} was perhaps made with another tokenizer: its file had the hash {file}")
        return
    if not same_ids(this_run, saved):
        try:
            remedy = f"set --model.tokenizer_path={find_tokenizer(checkpoint, saved, configuration)}"
        except CheckpointError:
            remedy = "set model.tokenizer_path to its tokenizer"
        raise CheckpointError(
            f"model.tokenizer_path: {checkpoint} was made with another tokenizer, of "
            f"{saved.get('vocab_size')!s:.20} tokens; this run's has {this_run['vocab_size']}. {remedy}; or, to train "
            "these weights on other ids, set --checkpoint.exclude_from_loading=tokenizer."
        )
    if goes_on and (changed := [key for key in BOUNDARIES if saved.get(key) != this_run[key]]):
        was, now = ([f"{key} {values.get(key)}" for key in changed] for values in (saved, this_run))
        raise CheckpointError(
            f"training.add_bos, training.add_eos or the files beside the tokenizer have changed: {checkpoint} has "
            f"{', '.join(was)}, this run {', '.join(now)}. Change it back, or set "
            "--checkpoint.exclude_from_loading=tokenizer."
        )


def check_published_tokenizer(
    folder: Path, tokenizer: Tokenizer, vocab_size: int | None, key: str, remedy: str
) -> None:
    """Raises a CheckpointError, with the `key` of the tokenizer and a `remedy`, unless weights in a published folder
    were made with it: by the tokenizer in the folder, or, if there is none, by the number of embeddings."""
    own = None
    with contextlib.suppress(DataError):
        find_file(folder)
        try:
            own = load_tokenizer(str(folder))
        except DataError as error:
            logger.warning(f"the tokenizer in {folder} cannot be compared with this one: {error}")
    if own is not None and not same_ids(identity_of(own), identity_of(tokenizer)):
        raise CheckpointError(
            f"{key}: the weights in {folder} were made with another tokenizer, which is there and has "
            f"{own.vocab_size} tokens; this one has {tokenizer.vocab_size}. Set it to {folder}{remedy}."
        )
    if own is None and vocab_size is not None and tokenizer.vocab_size * FAR_SMALLER < vocab_size:
        raise CheckpointError(
            f"{key}: the weights in {folder} have embeddings for {vocab_size} tokens, but the tokenizer has only "
            f"{tokenizer.vocab_size}, so it is not theirs. Set it to their tokenizer{remedy}."
        )
