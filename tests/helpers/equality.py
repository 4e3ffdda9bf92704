"""The same training under every layout: the table of layouts, and the deviation of each from one process.

`python tests/helpers/equality.py [WORD]` runs all layouts, or those with this word in their names, and prints the table
of docs/measurements/parallelism.md.
"""

import dataclasses
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from runs import ROOT, TINY, grad_norms, into, losses, tensors_of, train

STEPS = 10  # of the table
ENOUGH = 3  # of the tests: gradients that differ do so in step 1, states of an optimizer from step 2 on
BATCH = 8
BASE = (
    *TINY,
    f"--training.global_batch_size={BATCH}",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.enable_first_step_checkpoint",
    "--comm.train_timeout_seconds=250",  # a machine that stands still for a while is no fault of the layout
)
MOMENT = re.compile(r"optimizer\.state\.(.+)\.(exp_avg|momentum_buffer)")
TOLERANCE = 1e-5  # relative; a row that needs more says so


@dataclasses.dataclass(frozen=True)
class Layout:
    """A row of the table.

    Attributes:
        name: as in the docs.
        processes: number of processes.
        local_batch_size: sequences in a forward pass of a rank.
        flags: that select the layout.
        core: whether the short form of the test includes it.
        model: `model.name`; compared with one process that trains the same model.
        flavor: `model.flavor`.
        common: flags that the one process has, too.
        steps: of training.
    """

    name: str
    processes: int
    local_batch_size: int
    flags: tuple[str, ...] = ()
    core: bool = False
    model: str = "tiny"
    flavor: str = "deep"
    common: tuple[str, ...] = ()
    steps: int = STEPS


def degrees(replicate: int = 1, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1) -> tuple[str, ...]:
    axes = {
        "data_parallel_replicate": replicate,
        "tensor_parallel": tp,
        "context_parallel": cp,
        "pipeline_parallel": pp,
        "expert_parallel": ep,
    }
    return tuple(f"--parallelism.{axis}_degree={degree}" for axis, degree in axes.items() if degree > 1)


def of(title: str, model: str, *common: str) -> Callable[..., Layout]:
    """Makes rows that train another model, with these flags."""

    def row(name: str, *values: Any, **options: Any) -> Layout:
        options |= {"model": model, "common": (*common, *options.get("common", ()))}
        return Layout(f"{title}, {name}", *values, **options)

    return row


qwen3, experts = of("Qwen3", "tiny_qwen3"), of("experts", "sparse")
olmo3, glm, trinity = of("OLMo 3", "tiny_olmo3"), of("GLM-4.5", "tiny_glm4_moe"), of("Trinity", "tiny_afmoe")
deepseek = of("DeepSeek-V3", "tiny_deepseek_v3")
# Biases, and norms with an offset, start at 0. AdamW would divide the smallest entries of their first gradients, which
# round most, by themselves.
EPS = "--optimizer.eps=1e-4"
gpt_oss, gemma = of("gpt-oss", "tiny_gpt_oss", EPS), of("Gemma 3", "tiny_gemma3", EPS)

FULL = "--activation_checkpoint.mode=full"
EVERY_SECOND = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2")
BY_OPERATION = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op")
COMPILE = "--training.compile"
LOSS = "--moe.balance=loss"
MTP = ("--training.mtp_layers=2", "--training.mtp_loss_coefficient=1")
Z_LOSS, ROUTER_Z_LOSS = ("--training.z_loss_coefficient=0.1",), "--moe.z_loss_coefficient=0.1"
SCHEDULE = "--parallelism.pipeline_parallel_schedule="
SPLIT = "--parallelism.pipeline_parallel_split_points="
ALL_TO_ALL = "--parallelism.context_parallel_rotate_method=alltoall"
CSV = ROOT / "docs" / "examples" / "pipeline_schedule.csv"
GATHERED_LOSS = "--parallelism.disable_loss_parallel"

MUON = "--optimizer.name=Muon"
MUP = ("--model.parametrization=mup", "--model.mup_base_flavor=slim")
NORMUON = (MUON, "--optimizer.muon_row_normalization", "--optimizer.muon_polar_express")


def muon(name: str, processes: int, local_batch_size: int, flags: tuple[str, ...] = (), core: bool = False) -> Layout:
    """A row with Muon, over 20 steps."""
    return Layout(f"Muon, {name}", processes, local_batch_size, flags, core, common=(MUON,), steps=20)


def normuon(name: str, processes: int, local_batch_size: int, flags: tuple[str, ...] = ()) -> Layout:
    return Layout(f"NorMuon, {name}", processes, local_batch_size, flags, common=NORMUON, steps=20)


LAYOUTS = [
    Layout("DP 2", 2, 4, degrees(replicate=2), core=True),
    Layout("FSDP 2", 2, 4, core=True),
    Layout("FSDP 4", 4, 2),
    Layout("HSDP 2 x 2", 4, 2, degrees(replicate=2)),
    Layout("TP 2", 2, 8, degrees(tp=2), core=True),
    Layout("TP 2, logits gathered", 2, 8, (*degrees(tp=2), GATHERED_LOSS)),
    Layout("FSDP 2 x TP 2", 4, 4, degrees(tp=2), core=True),
    Layout("CP 2", 2, 8, degrees(cp=2), core=True),
    Layout("CP 2, all-to-all", 2, 8, (*degrees(cp=2), ALL_TO_ALL), core=True),
    Layout("CP 4", 4, 8, degrees(cp=4)),
    Layout("FSDP 2 x CP 2", 4, 4, degrees(cp=2)),
    Layout("TP 2 x CP 2", 4, 8, degrees(tp=2, cp=2)),
    Layout("PP 2", 2, 8, degrees(pp=2), core=True),
    Layout("PP 4, GPipe", 4, 8, (*degrees(pp=4), f"{SCHEDULE}GPipe")),
    Layout("PP 2, Interleaved1F1B", 2, 8, (*degrees(pp=2), f"{SCHEDULE}Interleaved1F1B")),
    Layout(
        "PP 2, Interleaved1F1B, embedding and output layer alone",
        2,
        8,
        (*degrees(pp=2), f"{SCHEDULE}Interleaved1F1B", f"{SPLIT}layers.0,layers.3,norm"),
        core=True,
    ),
    Layout("PP 2, InterleavedZeroBubble", 2, 8, (*degrees(pp=2), f"{SCHEDULE}InterleavedZeroBubble")),
    Layout("PP 2, ZBVZeroBubble", 2, 8, (*degrees(pp=2), f"{SCHEDULE}ZBVZeroBubble"), core=True),
    Layout("PP 2, DualPipeV", 2, 8, (*degrees(pp=2), f"{SCHEDULE}DualPipeV")),
    Layout(
        "PP 2, a schedule from a file",
        2,
        4,
        (
            *degrees(pp=2),
            f"{SCHEDULE}PipelineScheduleMulti",
            f"--parallelism.pipeline_parallel_schedule_csv={CSV}",
        ),
    ),
    Layout("PP 2, LoopedBFS", 2, 8, (*degrees(pp=2), f"{SCHEDULE}LoopedBFS")),
    Layout("PP 2 x FSDP 2", 4, 4, degrees(pp=2)),
    Layout("PP 2 x FSDP 2, ZBVZeroBubble", 4, 4, (*degrees(pp=2), f"{SCHEDULE}ZBVZeroBubble")),
    Layout("PP 2 x DP 2", 4, 4, degrees(replicate=2, pp=2)),
    Layout("TP 2 x PP 2", 4, 8, degrees(tp=2, pp=2)),
    Layout("CP 2 x PP 2", 4, 8, degrees(cp=2, pp=2)),
    Layout("FSDP 2 x TP 2 x PP 2", 8, 4, degrees(tp=2, pp=2)),
    Layout("HSDP 2 x 2 x TP 2", 8, 2, degrees(replicate=2, tp=2)),
    Layout("CP 2 x TP 2 x PP 2", 8, 8, degrees(cp=2, tp=2, pp=2)),
    Layout("one process, accumulation", 1, 2),
    Layout("FSDP 2, accumulation", 2, 1),
    Layout("DP 2, accumulation", 2, 1, degrees(replicate=2)),
    Layout("PP 2 x FSDP 2, accumulation", 4, 2, degrees(pp=2)),
    Layout("FSDP 2 x TP 2, accumulation", 4, 1, degrees(tp=2)),
    Layout("one process, recomputation full", 1, 8, (FULL,)),
    Layout("FSDP 2, recomputation full", 2, 4, (FULL,)),
    Layout("FSDP 2, recomputation of every second layer", 2, 4, EVERY_SECOND),
    Layout("FSDP 2, recomputation by operation", 2, 4, BY_OPERATION),
    Layout("TP 2, recomputation full", 2, 8, (*degrees(tp=2), FULL)),
    Layout("TP 2, recomputation by operation", 2, 8, (*degrees(tp=2), *BY_OPERATION)),
    Layout("CP 2, recomputation full", 2, 8, (*degrees(cp=2), FULL)),
    Layout("PP 2, recomputation full", 2, 8, (*degrees(pp=2), FULL)),
    Layout("FSDP 2, compile", 2, 4, (COMPILE,)),
    Layout("CP 2, compile", 2, 8, (*degrees(cp=2), COMPILE)),
    Layout("PP 2, compile", 2, 8, (*degrees(pp=2), COMPILE)),
    Layout("FSDP 2 x TP 2, compile, recomputation by operation", 4, 4, (*degrees(tp=2), COMPILE, *BY_OPERATION)),
    qwen3("FSDP 2", 2, 4),
    qwen3("FSDP 2 x TP 2", 4, 4, degrees(tp=2)),
    qwen3("HSDP 2 x 2 x TP 2", 8, 2, degrees(replicate=2, tp=2)),
    qwen3("FSDP 2 x CP 2, all-to-all", 4, 4, (*degrees(cp=2), ALL_TO_ALL)),
    qwen3("CP 2 x TP 2 x PP 2", 8, 8, degrees(cp=2, tp=2, pp=2)),
    qwen3("PP 2 x FSDP 2, ZBVZeroBubble, accumulation", 4, 2, (*degrees(pp=2), f"{SCHEDULE}ZBVZeroBubble")),
    qwen3("tied, FSDP 2 x TP 2, accumulation", 4, 1, degrees(tp=2), flavor="tied"),
    olmo3("FSDP 2", 2, 4),
    olmo3("FSDP 2 x TP 2", 4, 4, degrees(tp=2)),
    olmo3("TP 2, compile", 2, 8, (*degrees(tp=2), COMPILE)),
    olmo3("CP 2", 2, 8, degrees(cp=2)),
    olmo3("CP 2, all-to-all", 2, 8, (*degrees(cp=2), ALL_TO_ALL)),
    olmo3("CP 4, documents", 4, 8, degrees(cp=4), common=("--training.document_mask",)),
    olmo3("TP 2 x PP 2", 4, 8, degrees(tp=2, pp=2)),
    gemma("FSDP 2 x TP 2", 4, 4, degrees(tp=2)),
    gemma("TP 2, compile", 2, 8, (*degrees(tp=2), COMPILE)),
    gemma("untied, CP 2 x PP 2", 4, 8, degrees(cp=2, pp=2), flavor="untied"),
    gemma("CP 2, all-to-all", 2, 8, (*degrees(cp=2), ALL_TO_ALL)),
    *(
        row(name, *values)
        for row in (glm, trinity, deepseek, gpt_oss)
        for name, *values in (
            ("FSDP 2 x TP 2, EP 2", 4, 4, degrees(tp=2, ep=2)),
            ("TP 2, EP 2, compile", 2, 8, (*degrees(tp=2, ep=2), COMPILE)),
            ("CP 2 x PP 2", 4, 8, degrees(cp=2, pp=2)),
            ("FSDP 2 x CP 2, all-to-all", 4, 4, (*degrees(cp=2), ALL_TO_ALL)),
        )
    ),
    deepseek(
        "no latent of queries, TP 2 x CP 2, all-to-all",
        4,
        8,
        (*degrees(tp=2, cp=2), ALL_TO_ALL),
        flavor="whole_queries",
    ),
    experts("FSDP 2", 2, 4),
    experts("FSDP 2, EP 2", 2, 4, degrees(ep=2), core=True),
    experts("FSDP 4, EP 2", 4, 2, degrees(ep=2)),
    experts("FSDP 4, EP 4", 4, 2, degrees(ep=4)),
    experts("HSDP 2 x 2, EP 2", 4, 2, degrees(replicate=2, ep=2)),
    experts("TP 2", 2, 8, degrees(tp=2)),
    experts("TP 2, EP 2", 2, 8, degrees(tp=2, ep=2), core=True),
    experts("FSDP 2 x TP 2, EP 2", 4, 4, degrees(tp=2, ep=2)),
    experts("FSDP 2 x TP 2, EP 4", 4, 4, degrees(tp=2, ep=4)),
    experts("CP 2, EP 2", 2, 8, degrees(cp=2, ep=2)),
    experts("TP 2 x CP 2, EP 4", 4, 8, degrees(tp=2, cp=2, ep=4)),
    experts("PP 2", 2, 8, degrees(pp=2)),
    experts("PP 2 x FSDP 2, EP 2", 4, 4, degrees(pp=2, ep=2)),
    experts("PP 2 x FSDP 2, EP 2, ZBVZeroBubble", 4, 4, (*degrees(pp=2, ep=2), f"{SCHEDULE}ZBVZeroBubble")),
    experts("FSDP 2 x TP 2 x PP 2, EP 4", 8, 4, degrees(tp=2, pp=2, ep=4)),
    experts("FSDP 2, EP 2, accumulation", 2, 1, degrees(ep=2)),
    experts("FSDP 2, EP 2, recomputation full", 2, 4, (*degrees(ep=2), FULL)),
    experts("FSDP 2, EP 2, recomputation by operation", 2, 4, (*degrees(ep=2), *BY_OPERATION)),
    experts("TP 2, EP 2, compile", 2, 8, (*degrees(tp=2, ep=2), COMPILE)),
    experts("FSDP 2, EP 2, compile, recomputation by operation", 2, 4, (*degrees(ep=2), COMPILE, *BY_OPERATION)),
    experts("TP 2 x CP 2, EP 2, loss for an even load", 4, 8, degrees(tp=2, cp=2, ep=2), common=(LOSS,)),
    experts("FSDP 2 x TP 2, EP 2, Muon", 4, 4, degrees(tp=2, ep=2), common=(MUON,)),
    experts("PP 2 x FSDP 2, EP 2, loss for an even load, accumulation", 4, 2, degrees(pp=2, ep=2), common=(LOSS,)),
    *(
        experts(
            f"PP 2 x FSDP 2, EP 2, loss for an even load, {schedule}",
            4,
            4,
            (*degrees(pp=2, ep=2), f"{SCHEDULE}{schedule}"),
            common=(LOSS,),
        )
        for schedule in ("Interleaved1F1B", "ZBVZeroBubble")
    ),
    of("softcap", "tiny_capped")("TP 2 x PP 2, z-loss", 4, 8, degrees(tp=2, pp=2), common=Z_LOSS),
    experts("TP 2 x CP 2, EP 2, z-losses", 4, 8, degrees(tp=2, cp=2, ep=2), common=(*Z_LOSS, ROUTER_Z_LOSS)),
    Layout("FSDP 2 x TP 2, MTP", 4, 4, degrees(tp=2), common=MTP),
    Layout("CP 2 x PP 2, MTP, documents", 4, 8, degrees(cp=2, pp=2), common=(*MTP, "--training.document_mask")),
    experts("TP 2 x PP 2, EP 2, MTP", 4, 8, degrees(tp=2, pp=2, ep=2), common=MTP),
    muon("DP 2", 2, 4, degrees(replicate=2)),
    muon("FSDP 2", 2, 4),
    muon("FSDP 4", 4, 2),
    muon("HSDP 2 x 2", 4, 2, degrees(replicate=2)),
    muon("TP 2", 2, 8, degrees(tp=2)),
    muon("FSDP 2 x TP 2", 4, 4, degrees(tp=2)),
    muon("CP 2", 2, 8, degrees(cp=2)),
    muon("PP 2", 2, 8, degrees(pp=2), core=True),
    muon("PP 2, ZBVZeroBubble", 2, 8, (*degrees(pp=2), f"{SCHEDULE}ZBVZeroBubble")),
    muon("TP 2 x PP 2", 4, 8, degrees(tp=2, pp=2)),
    muon("FSDP 2 x TP 2 x PP 2", 8, 4, degrees(tp=2, pp=2)),
    muon("HSDP 2 x 2 x TP 2", 8, 2, degrees(replicate=2, tp=2)),
    muon("FSDP 2, accumulation", 2, 1),
    normuon("HSDP 2 x 2", 4, 2, degrees(replicate=2)),
    normuon("FSDP 2 x TP 2", 4, 4, degrees(tp=2)),
    Layout("muP, FSDP 2 x TP 2", 4, 4, degrees(tp=2), common=MUP),
    Layout("muP, PP 2, Muon", 2, 8, degrees(pp=2), common=(*MUP, MUON), steps=20),
]


class Training(NamedTuple):
    """The results of a run.

    Attributes:
        gradients: of step 1, by parameter, times one factor that all have in common.
        weights: after the last step, and the optimizer's state.
    """

    losses: torch.Tensor
    grad_norms: torch.Tensor
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def run(layout: Layout, folder: Path, steps: int | None = None) -> Training:
    """Trains under this layout, for its number of steps or another."""
    steps = steps or layout.steps
    size = f"--training.local_batch_size={layout.local_batch_size}"
    model = (f"--model.name={layout.model}", f"--model.flavor={layout.flavor}")
    until = (f"--training.steps={steps}", f"--checkpoint.interval={steps}")
    train(*BASE, *model, *until, into(folder), size, *layout.flags, *layout.common, processes=layout.processes)
    first = tensors_of(folder, 1)
    # The first moment after one step is the gradient times a constant.
    moments = {match[1]: tensor for name, tensor in first.items() if (match := MOMENT.fullmatch(name))}
    buffers = ("optimizer.", "expert_bias")
    assert moments.keys() == {name for name in first if not name.startswith(buffers) and not name.endswith(buffers)}
    return Training(
        torch.tensor(list(losses(folder).values()), dtype=torch.float64),
        torch.tensor(grad_norms(folder), dtype=torch.float64),
        moments,
        tensors_of(folder, steps),
    )


def deviations(expected: Training, actual: Training) -> dict[str, float]:
    """The largest relative deviation of losses, of gradient norms, of a parameter's gradient, and of a final weight
    (2-norm of a tensor's difference divided by the tensor's 2-norm). Any NaN makes the result NaN, unlike Python's
    `max`."""
    assert expected.losses.shape == actual.losses.shape and len(actual.losses) >= ENOUGH
    return {
        "loss": float(((actual.losses - expected.losses) / expected.losses).abs().max()),
        "gradient norm": float(((actual.grad_norms - expected.grad_norms) / expected.grad_norms).abs().max()),
        "gradients": float(torch.stack([*by_name(expected.gradients, actual.gradients).values()]).max()),
        "weights": float(torch.stack([*by_name(expected.weights, actual.weights).values()]).max()),
    }


def by_name(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The relative deviation of each tensor."""
    assert expected.keys() == actual.keys()
    tiny = 1e-30  # of tensors that are zero
    return {name: (actual[name] - tensor).norm() / tensor.norm().clamp(min=tiny) for name, tensor in expected.items()}


def within_tolerance(deviations: dict[str, float]) -> bool:
    """Whether all are below TOLERANCE; false for a NaN."""
    return all(value < TOLERANCE for value in deviations.values())


def one_process(layout: Layout) -> Layout:
    """What this layout is compared with."""
    alike = {key: getattr(layout, key) for key in ("model", "flavor", "common", "steps")}
    return Layout("one process", 1, BATCH, **alike)


def main(word: str = "") -> None:
    """Prints the table in Markdown."""
    print(
        f"torch {torch.__version__}, CPU, gloo, float32, {STEPS} steps (Muon: 20); largest relative deviation from one "
        "process\n"
    )
    print("| layout | processes | loss | gradient norm | worst gradient | final weights |\n|---|---|---|---|---|---|")
    references: dict[Layout, Training] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, layout in enumerate(row for row in LAYOUTS if word in row.name):
            base = one_process(layout)
            if base not in references:
                references[base] = run(base, Path(folder) / f"one-{len(references)}")
            largest = deviations(references[base], run(layout, Path(folder) / str(number)))
            cells = " | ".join(f"{value:.0e}" if value else "0" for value in largest.values())
            print(f"| {layout.name} | {layout.processes} | {cells} |", flush=True)
            if not within_tolerance(largest):
                print(f"{layout.name} is further off than {TOLERANCE}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
