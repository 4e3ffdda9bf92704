"""Order on a GPU without one: streams, the allocator and threads of real training steps on the simulated GPU
(`streams.py`), in every layout and recipe, and what is planted into them."""

from pathlib import Path
from typing import Any

import pytest
from simulated import needs_triton, on_gpu

pytestmark = needs_triton

REPLICATES = "--parallelism.data_parallel_replicate_degree="
SHARDS = "--parallelism.data_parallel_shard_degree="
GATHER_FLOAT8, GATHER_INT8 = "--float8.enable_fsdp_float8_all_gather", "--int8.enable_fsdp_int8_all_gather"
OFFLOAD = "--training.enable_cpu_offload"
SUMS_IN_BFLOAT16 = "--training.mixed_precision_reduce=bfloat16"
EXPERTS = ("qwen3_moe", "30B-A3B")
NO_SKIP = ("--training.skip_nonfinite=false", "--training.max_norm=inf")


def case(*flags: str, **options: Any) -> dict[str, Any]:
    """One layer is enough to watch an update, which is compiled for all layers."""
    return {"flags": flags, "world_size": 8, **options}


def short(*flags: str, **options: Any) -> dict[str, Any]:
    """Two layers are the fewest of which one is gathered while the other computes. Three take compilers twice as long;
    that a layer has one on each side is watched where nothing is compiled and nothing rounded."""
    return case(*flags, layers=2, **options)


def float8(recipe: str, *flags: str, **options: Any) -> dict[str, Any]:
    return short("--model.converters=float8", f"--float8.recipe_name={recipe}", *flags, **options)


def int8(recipe: str, *flags: str, **options: Any) -> dict[str, Any]:
    return short("--model.converters=int8", f"--int8.recipe_name={recipe}", *flags, **options)


CASES = {
    "FSDP 8, three micro-batches": case(microbatches=3),
    "saved in the background": case(world_size=2, save="async_with_pinned_mem"),
}
LONG_CASES = {
    "FSDP 2": case(world_size=2),
    "HSDP 2 x 4": case(f"{REPLICATES}2", f"{SHARDS}4"),
    "HSDP 2 x 4, three micro-batches": case(f"{REPLICATES}2", f"{SHARDS}4", microbatches=3),
    "DDP": case(f"{REPLICATES}8", f"{SHARDS}1"),
    "DDP, three micro-batches": case(f"{REPLICATES}8", f"{SHARDS}1", microbatches=3),
    "FSDP 8, sums in bfloat16, three micro-batches": case(SUMS_IN_BFLOAT16, microbatches=3),
    "HSDP 2 x 4, sums in bfloat16": case(SUMS_IN_BFLOAT16, f"{REPLICATES}2", f"{SHARDS}4"),
    "DDP, sums in bfloat16": case(SUMS_IN_BFLOAT16, f"{REPLICATES}8", f"{SHARDS}1"),
    "one GPU, three micro-batches": case(world_size=1, microbatches=3),
    "bfloat16 weights": case("--training.weight_dtype=bfloat16", layers=1),
    "one GPU, bfloat16 weights": case("--training.weight_dtype=bfloat16", world_size=1, microbatches=2, layers=1),
    "updates in the backward pass": case("--optimizer.early_step_in_backward", *NO_SKIP),
    "one GPU, updates in the backward pass": case("--optimizer.early_step_in_backward", *NO_SKIP, world_size=1),
    "CPU offload": case(OFFLOAD),
    "never resharded": case("--parallelism.fsdp_reshard_after_forward=never", microbatches=2),
    "experts over 2 ranks, int8 gathered": int8(
        "rowwise", GATHER_INT8, "--parallelism.expert_parallel_degree=2", model=EXPERTS, microbatches=2
    ),
    "experts, int8 gathered, one GPU": int8("rowwise", GATHER_INT8, world_size=1, model=EXPERTS, microbatches=2),
    "full recomputation": case("--activation_checkpoint.mode=full"),
    "compiled": short("--training.compile"),
    "FSDP 2 x TP 4": case("--parallelism.tensor_parallel_degree=4"),
    "FSDP 2 x CP 4": case("--parallelism.context_parallel_degree=4"),
    "FSDP 2 x CP 4, by heads": case(
        "--parallelism.context_parallel_degree=4", "--parallelism.context_parallel_rotate_method=alltoall"
    ),
    "FSDP 2 x TP 4, asynchronous": short(
        "--parallelism.tensor_parallel_degree=4", "--parallelism.enable_async_tensor_parallel", "--training.compile"
    ),
    "documents": case("--training.document_mask"),
    "selective recomputation": case(
        "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"
    ),
    "experts": case(model=EXPERTS),
    "experts over 4 ranks": case("--parallelism.expert_parallel_degree=4", model=EXPERTS),
    "Muon": case("--optimizer.name=Muon"),
    "AdamW8bit": case("--optimizer.name=AdamW8bit", layers=1),
    "saved": case(world_size=2, save="disabled"),
    "saved in the background, not pinned": case(world_size=2, save="async"),
    "float8 tensorwise, gathered": float8("tensorwise", GATHER_FLOAT8),
    "float8 tensorwise, gathered, CPU offload": float8("tensorwise", GATHER_FLOAT8, OFFLOAD),
    "float8 tensorwise, gathered, scales together": float8(
        "tensorwise", GATHER_FLOAT8, "--float8.precompute_float8_dynamic_scale_for_fsdp"
    ),
    "float8 tensorwise, gathered, bounds": float8("tensorwise", GATHER_FLOAT8, "--float8.weight_scale=bound"),
    "float8 rowwise": float8("rowwise"),
    "float8 rowwise, compiled": float8("rowwise", "--training.compile"),
    "float8 rowwise_with_gw_hp": float8("rowwise_with_gw_hp"),
    "float8 blockwise": float8("blockwise"),
    "float8 delayed": float8("delayed"),
    "float8 of experts over 4 ranks": float8("rowwise", "--parallelism.expert_parallel_degree=4", model=EXPERTS),
    "int8 rowwise, gathered": int8("rowwise", GATHER_INT8),
    "int8 rowwise, one GPU": int8("rowwise", GATHER_INT8, world_size=1, microbatches=2),
    "int8 tensorwise, gathered": int8("tensorwise", GATHER_INT8),
    "int8 tensorwise, gathered, HSDP 2 x 4": int8("tensorwise", GATHER_INT8, f"{REPLICATES}2", f"{SHARDS}4"),
    "int8 tensorwise, gathered, CPU offload": int8("tensorwise", GATHER_INT8, OFFLOAD),
    "int8 rowwise, SwiGLU in int8": int8("rowwise", "--activation_checkpoint.swiglu_dtype=int8"),
    "mx": case("--model.converters=mx", gpu="sm_100"),
    "nvfp4": short("--model.converters=mx", "--mx.recipe_name=nvfp4", "--mx.keep_last_blocks_fraction=0", gpu="sm_100"),
}


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in LONG_CASES)], ids=str
)
def test_streams_of_a_step_are_ordered(name: str) -> None:
    options = {**CASES, **LONG_CASES}[name]
    reports, operations = on_gpu(options.pop("gpu", "sm_90"), "streams.train", **options)
    assert reports == []
    assert sum(operations.values()) > 1000
    # Only a single shard has nothing to gather.
    assert len(operations) > (3 if options["world_size"] > 1 and f"{SHARDS}1" not in options["flags"] else 0)


def here(place: str) -> str:
    """'file.py:line' of 'module: text of its only line'."""
    module, text = place.split(": ", 1)
    path = Path("torchtitan", *module.split(".")).with_suffix(".py")
    lines = Path(__file__).parents[2].joinpath(path).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if text in line]
    return f"{path}:{number}"


# By name: changes of lines, a step that meets them, words of the report, and the line that it names.
FAULTS: dict[str, tuple[list[tuple[str, str, str]], dict[str, Any], str, str]] = {
    "copies ahead in threads": (
        [
            (
                "checkpoint.files:CheckpointWriter.__init__",
                ", per_thread_copy_ahead=0)",
                ")",
            )
        ],
        case(world_size=2, save="disabled"),
        "torch.save (reading from it on the host",
        "checkpoint.files: return super().write_data(plan, planner).value()",
    ),
    "scale of a gather freed to the copy-in stream": (
        [
            (
                "converters.gather:ShardedWeight.fsdp_pre_all_gather",
                "self.scale_inverse),), (self.scale_inverse,)",
                "self.scale_inverse),), (self.scale_inverse.clone(),)",
            ),
            ("converters.gather:ShardedWeight.fsdp_post_all_gather", "keep_for_current_stream(new)", "pass"),
        ],
        int8("tensorwise", GATHER_INT8),
        "may be handed on to",
        "converters.gather: return (quantize_with(self.tensor, self.scale_inverse),)",
    ),
    "gradient freed to the compute stream": (
        [("parallel.fsdp:_NoReduceScatter.allocate", "keep_for_current_stream(output)", "pass")],
        case(world_size=1, microbatches=2),
        "may be handed on to",
        "parallel.fsdp: self._input = super().allocate(size, dtype=dtype, device=device)",
    ),
    "batch copied on a stream that nothing waits for": (
        [
            (
                "engine.engine:on_device",
                'along = {"tokens"',
                'with torch.cuda.stream(torch.cuda.Stream()): along = {"tokens"',
            )
        ],
        case(world_size=2),
        "nothing orders",
        'engine.engine: along = {"tokens": move(batch.tokens)',
    ),
    "batch overwritten while it is copied": (
        [
            (
                "engine.engine:forward_backward",
                "tokens, labels, inputs = on_device(engine, batch)",
                "tokens, labels, inputs = on_device(engine, batch); batch.tokens.zero_()",
            )
        ],
        case(world_size=2),
        "aten.zero_.default (writing to it on the host",
        'engine.engine: along = {"tokens": move(batch.tokens)',
    ),
    "loss read before it has arrived": (
        [
            (
                "engine.engine:train_step",
                "return loss, grad_norm",
                "loss.to('cpu', non_blocking=True).item(); return loss, grad_norm",
            )
        ],
        case(world_size=2),
        "(reading from it on the host",
        "engine.engine: return loss, grad_norm",
    ),
    "thread without a device": (
        [
            (
                "engine.engine:train_step",
                "return loss, grad_norm",
                "import threading; thread = threading.Thread(target=lambda: torch.cuda.synchronize()); "
                "thread.start(); thread.join(); return loss, grad_norm",
            )
        ],
        case(world_size=2),
        "a thread whose device was not set",
        "engine.engine: return loss, grad_norm",
    ),
    "collective that nothing waits for": (
        [
            (
                "converters.gather:tensorwise_scale",
                "group=mesh.get_group())",
                "group=mesh.get_group(), async_op=True)",
            )
        ],
        int8("tensorwise", GATHER_INT8),
        "nothing orders",
        "converters.gather: return (amax / LARGEST).clamp_min(SMALLEST_SCALE)",
    ),
    "weights gathered before their update": (
        [
            (
                "engine.engine:train_step",
                "skip = optimizer_step(",
                "engine.model.set_post_optim_event(torch.cuda.current_stream().record_event()); skip = optimizer_step(",
            )
        ],
        case(world_size=2),
        "nothing orders",
        "compat.optimizers: optimizer.step()",
    ),
}

CHEAPEST_FAULTS = ("copies ahead in threads", "gradient freed to the compute stream")


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in CHEAPEST_FAULTS else [pytest.mark.full]) for name in FAULTS],
)
def test_streams_with_a_planted_fault_are_reported(name: str) -> None:
    faults, options, words, line = FAULTS[name]
    reports, _ = on_gpu("sm_90", "streams.train", **options, faults=faults)
    assert any(words in sentence and here(line) in sentence for sentence in reports), reports
