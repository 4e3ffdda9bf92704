"""Checkpoints of other programs: torchtitan's are loaded; the rest are recognized, to say how to export them."""

import contextlib
import re
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from torchtitan.checkpoint.dcp_metadata import read_metadata
from torchtitan.checkpoint.files import first_line
from torchtitan.checkpoint.manifest import MANIFEST, METADATA, TRAIN_STATE, FileRecord
from torchtitan.checkpoint.state_dict import OPTIMIZER
from torchtitan.checkpoint.train_state import TrainState
from torchtitan.errors import CheckpointError


@dataclass(frozen=True)
class Program:
    """Another program that writes checkpoints."""

    name: str
    files: tuple[str, ...]  # patterns of what only its folders hold; one of them suffices
    remedy: str  # what to do with such a folder


GIVE_RESULT = "and give the folder that it writes"
TORCHTITAN = Program(
    "torchtitan",
    (METADATA,),
    "it does not record its model, so start a run from it (model.flavor and model.tokenizer_path of its run, "
    "checkpoint.initial_load_path), which saves checkpoints that do",
)
PROGRAMS = (
    Program(
        "NeMo",
        ("weights/common.pt", "context/io.json", "model_weights/common.pt", "*.nemo"),
        f"export it in Hugging Face's format (NeMo: llm.export_ckpt with target='hf'), {GIVE_RESULT}",
    ),
    Program(
        "Megatron-LM",
        ("common.pt", "latest_checkpointed_iteration.txt", "mp_rank_*/model_optim_rng.pt", "iter_*/common.pt"),
        "export it in Hugging Face's format (Megatron-Bridge: AutoBridge.export_ckpt; legacy mp_rank_* folders: "
        f"Megatron-LM's tools/checkpoint/convert.py first), {GIVE_RESULT}",
    ),
    Program(
        "DeepSpeed",
        ("zero_to_fp32.py", "*mp_rank_*_model_states.pt", "global_step*/*mp_rank_*_model_states.pt"),
        "merge it with zero_to_fp32.py, save the model with Hugging Face's save_pretrained, and give that folder",
    ),
    Program(
        "nanotron",
        ("checkpoint_metadata.json",),
        f"export it with nanotron's examples/llama/convert_nanotron_to_hf.py, {GIVE_RESULT}",
    ),
    Program(
        "OLMo-core",
        ("model_and_optim/.metadata",),
        f"export it with OLMo-core's src/examples/huggingface/convert_checkpoint_to_hf.py, {GIVE_RESULT}",
    ),
    Program("LitGPT", ("lit_model.pth",), f"export it with `litgpt convert_from_litgpt`, {GIVE_RESULT}"),
    TORCHTITAN,  # the last: others have DCP's file among their own
)
OWN_FILES = (MANIFEST, TRAIN_STATE)


def program_of(folder: Path) -> Program | None:
    """The other program that wrote a checkpoint; None: this one, or none that is known."""
    with contextlib.suppress(OSError):  # reported when the folder is read
        if not any((folder / name).exists() for name in OWN_FILES):
            return next((of for of in PROGRAMS if any(any(folder.glob(file)) for file in of.files)), None)
    return None


def refuse_other_programs(folder: Path, but: Program | None = None) -> None:
    """Raises a CheckpointError if another program, except for `but`, wrote this folder."""
    program = program_of(folder)
    if program not in (None, but):
        raise CheckpointError(f"{folder} is a checkpoint of {program.name}: {program.remedy}.")


# What `optimizer.param_groups.NAME` has for each parameter, and the key of [optimizer] that it comes from.
SETTINGS = {"initial_lr": "lr", "eps": "eps", "weight_decay": "weight_decay"}
EXPERTS = re.compile(r"(\.experts\.w[123])(?=$|\.step$|\.exp_avg(_sq)?$)")  # torchtitan has no module around them
NOT_LOADED = re.compile(r"(lr_scheduler|dataloader|train_state)\..*|freqs_cis|rope_cache|.*\.tokens_per_expert")
MOST_BYTES = 1 << 16  # limit for an entry that is a number


def read_torchtitan(folder: Path) -> tuple[TrainState, Metadata, dict[str, Any]]:
    """Opens a step-N folder of torchtitan. Raises a CheckpointError, with only the reason, if it is damaged.

    Returns:
        The state of the run, as far as it is there; metadata of the tensors, under the names that they have here; and
        the part of the configuration that is there.
    """
    files = {path.name: FileRecord(path.stat().st_size, "") for path in folder.glob("*.distcp") if path.is_file()}
    metadata = read_metadata(folder, files, of_others=True)
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    values = {index.fqn: place for index, place in places.items() if not index.offset or not any(index.offset)}

    def value(name: str) -> Any:
        return _read_value(folder, name, values[name]) if name in values and name in entries else None

    step = value("train_state.step")
    named = re.fullmatch(r"step-(\d+)", folder.name)
    if step is None and named:
        step = int(named[1])
    if step is not None and (type(step) is not int or step < 0):
        raise CheckpointError(f"train_state.step is {step!r:.40}")
    if named and step != int(named[1]):
        raise CheckpointError(f"train_state.step is {step}: the folder is a renamed copy")
    tensors, renamed = {}, {}
    for name, entry in entries.items():
        ours = EXPERTS.sub(r"\1.weight", name.removeprefix("model."))
        if type(entry) is not BytesStorageMetadata and not NOT_LOADED.fullmatch(ours):
            if ours in tensors:
                raise CheckpointError(f"{METADATA} is refused: it has two tensors {ours}")
            tensors[ours], renamed[name] = entry, ours
    embedding, output = (f"{OPTIMIZER}state.{name}.weight.exp_avg" for name in ("tok_embeddings", "output"))
    if embedding in tensors and output not in tensors:  # tied: one parameter, whose weight is there under both names
        tensors.pop("output.weight", None)
    tokens = value("train_state.ntokens_seen")
    state = TrainState(
        step=step or 0,
        weights_only=step is None or not any(name.startswith(OPTIMIZER) for name in tensors),
        tokens_seen=tokens if type(tokens) is int and tokens >= 0 else 0,
    )
    groups = f"{OPTIMIZER}param_groups."
    optimizer: dict[str, Any] = {}
    if first := next((name for name in values if name.startswith(groups) and name.endswith(".initial_lr")), None):
        group = first.removesuffix("initial_lr")
        if type(rate := value(f"{group}lr")) not in (int, float):
            raise CheckpointError(f"{group}lr is {rate!r:.40}")
        state.learning_rate = rate
        optimizer = {key: value(group + name) for name, key in SETTINGS.items()}
        if isinstance(betas := value(f"{group}betas"), tuple) and len(betas) == 2:
            optimizer |= {"beta1": betas[0], "beta2": betas[1]}
    settings = {key: number for key, number in optimizer.items() if type(number) in (int, float)}
    moved = {replace(at, fqn=renamed[at.fqn]): place for at, place in places.items() if at.fqn in renamed}
    return state, Metadata(tensors, None, moved), {"optimizer": settings}


def _read_value(folder: Path, name: str, place: Any) -> Any:
    """An entry that torch.save wrote, read weights-only; the number itself if it is in a tensor. Raises a
    CheckpointError, with only the reason, if it cannot be read."""
    try:
        if place.length > MOST_BYTES:
            raise ValueError(f"it has {place.length:,} bytes")
        with (folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            read = torch.load(BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
        return read.item() if isinstance(read, torch.Tensor) else read
    except Exception as error:  # a malicious pickle can fail in any way
        raise CheckpointError(f"{name} cannot be read ({first_line(error)})") from None
