"""The work of a step against counts by hand, for three layouts: FSDP (8B), TP (70B), experts over ranks (30B-A3B). Both
the plan's formula and what the compiler generates must agree with them.

An H100: generated kernels, copies and updates at 2.7e12 bytes/s; GEMMs at 800e12 FLOP/s, and half of the time of their
bytes at 3e12; attention at 600e12 forward and 460e12 backward; links of 450e9 bytes/s within a machine and 50e9 between
machines, of which collectives reach 82%.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
from simulated import needs_triton, on_gpu

from torchtitan.checks.config_checks import check
from torchtitan.config import ConfigManager
from torchtitan.engine.model_args import find_model_args
from torchtitan.tools.plan import planner
from torchtitan.tools.plan.devices import named_device
from torchtitan.tools.plan.planner import rank_plans
from torchtitan.tools.plan.result import Traffic
from torchtitan.tools.plan.step_model import Work, work_of_step

FILES = Path(__file__).parents[2] / "train_configs"


@dataclass(frozen=True)
class Layout:
    """A layout and its step on one rank, counted by hand.

    Attributes:
        flags: of the file.
        gemms, attention: FLOPs.
        gemm_bytes: of operands and results of GEMMs.
        sent: by dimension and kind of collective, bytes of the full tensors.
        seconds: by dimension, of its links.
        kernels: bytes that generated kernels read and write.
    """

    file: str
    world_size: int
    flags: list[str]
    gemms: float
    gemm_bytes: float
    attention: tuple[float, float]
    sent: dict[tuple[str, str], float]
    seconds: dict[str, float]
    kernels: float


def fsdp_8b() -> Layout:
    """One sequence a pass, 64 passes; every GEMM forward, and twice backward; "op" repeats no GEMM."""
    dim, wide, layers, vocabulary, tokens, passes = 4096, 14336, 32, 128256, 8192, 64
    block = dim * (4096 + 1024 + 1024 + 4096) + 3 * dim * wide  # wq, wk, wv, wo; w1, w2, w3
    gemms = passes * 3 * 2 * tokens * (layers * block + vocabulary * dim)
    # A GEMM of (T, K) x (K, N) and its two gradients' read and write each of the three matrices three times, in bf16.
    sizes = [(dim, dim)] * 2 + [(dim, 1024)] * 2 + [(dim, wide)] * 3
    gemm_bytes = (
        passes
        * 6
        * sum(
            number * (tokens * (a + b) + a * b)
            for number, a, b in [*((layers, *size) for size in sizes), (1, dim, vocabulary)]
        )
    )
    # Two GEMMs forward and five backward, of 32 heads of 128; half of each by the causal mask.
    product = passes * layers * 32 * tokens * tokens * 128
    weights = layers * (block + 2 * dim) + 2 * vocabulary * dim + dim
    # In bf16, a pass gathers the embedding once and all blocks but the last twice. The last one and the head stay.
    each_pass, once = vocabulary * dim + 2 * (layers - 1) * (block + 2 * dim), block + 2 * dim + vocabulary * dim + dim
    gathered, reduced = 2 * (passes * each_pass + once), passes * 4 * weights  # gradients in float32
    # Numbers of 2 bytes of a token in a layer. Forward: two norms 2 x 2, two residuals 2 x 3 less what is fused, rotary
    # embedding 2 x 1.25, SwiGLU 3; backward the same, sums of gradients, and what "op" repeats.
    kernels = 2 * passes * tokens * layers * ((11.5 + 18.5 + 8) * dim + 9 * wide)
    return Layout(
        "llama3_8b", 8, ["--parallelism.fsdp_reshard_after_forward=default"], gemms, gemm_bytes,
        (2 * product, 5 * product),
        {("fsdp", "all-gather"): gathered, ("fsdp", "reduce-scatter"): reduced},
        {"fsdp": (gathered + reduced) * 7 / 8 / 450e9}, kernels,
    )  # fmt: skip


def tp_70b() -> Layout:
    """Two sequences a pass in a group of 8, 8 passes; "full" repeats a layer's forward pass, but not its last GEMM."""
    dim, wide, layers, vocabulary, tokens, passes = 8192, 28672, 80, 128256, 2 * 8192, 8
    block = dim * (8192 + 1024 + 1024 + 8192) + 3 * dim * wide
    gemms = passes * 2 * tokens * (layers * (4 * block - dim * wide) + 3 * vocabulary * dim) / 8
    # Each of the three matrices three times, and once more in a repeated forward pass; a rank has an eighth of a width.
    sizes = [(dim, 1024)] * 2 + [(dim, 128)] * 2 + [(dim, wide // 8)] * 2
    last = 6 * (tokens * (dim + wide // 8) + dim * wide // 8)
    gemm_bytes = passes * layers * (8 * sum(tokens * (a + b) + a * b for a, b in sizes) + last)
    gemm_bytes += passes * 6 * (tokens * (dim + vocabulary // 8) + dim * vocabulary // 8)
    product = passes * layers * 2 * 8 * 8192 * 8192 * 128  # of 8 of 64 heads, two sequences
    # A layer sends its tokens forward twice to all and twice back in sums, the same backward; repeated: 2 and 1.
    once = 2 * tokens * dim
    # The embedding and the output layer send them once each way.
    gathers, scatters = (6 * layers + 2) * passes * once, (5 * layers + 2) * passes * once
    # Of shards; but gradients that are to be sent are summed for all tokens.
    kernels = 2 * passes * (tokens / 8) * layers * ((11.5 + 11.5 + 12.5 + 8 * 6) * dim + 12 * wide)
    return Layout(
        "llama3_70b", 256, ["--parallelism.tensor_parallel_degree=8", "--training.local_batch_size=2"],
        gemms, gemm_bytes, (4 * product, 5 * product),
        {("tp", "all-gather"): gathers, ("tp", "reduce-scatter"): scatters},
        {"tp": (gathers + scatters) * 7 / 8 / 450e9}, kernels,
    )  # fmt: skip


def experts_30b() -> Layout:
    """16 sequences in one pass, 8 of 128 experts for a token; "full" repeats all GEMMs, for the router's gradient needs
    the last one's result."""
    dim, wide, layers, vocabulary, tokens, top = 2048, 768, 48, 151936, 16 * 4096, 8
    attention = dim * (4096 + 512 + 512 + 4096)  # 32 heads of 128, 4 of keys and values
    experts = 3 * dim * wide
    router = 128 * dim  # of bf16 inputs; its gradients are in float32, split into two GEMMs in bf16 each
    gemms = 2 * tokens * (layers * (4 * (attention + top * experts) + (2 + 4) * router) + 3 * vocabulary * dim)
    # A rank's 16 experts get 8 ranks' tokens' rows.
    per_expert = tokens * top * 8 // 128
    gemm_bytes = 8 * layers * (
        sum(tokens * (dim + b) + dim * b for b in (4096, 4096, 512, 512))
        + 16 * 3 * (per_expert * (dim + wide) + dim * wide)
    ) + 6 * (tokens * (dim + vocabulary) + dim * vocabulary)
    product = layers * 32 * 16 * 4096 * 4096 * 128
    rows = 2 * tokens * top * dim
    exchanged = 6 * layers * rows  # to experts and back, twice forward and once backward
    shared = layers * 128 * experts / 8  # of 8 ranks
    gathered, reduced = 2 * (2 - 1 / layers) * shared, 4 * shared  # the last layer's stay gathered
    kernels = 2 * tokens * layers * ((11.5 + 11.5 + 18.5 + (6 + 6 + 9.5) * top) * dim + 12 * top * wide)
    return Layout(
        "qwen3_30b_a3b", 64, ["--parallelism.expert_parallel_degree=8"], gemms, gemm_bytes, (4 * product, 5 * product),
        {("ep", "all-to-all"): exchanged, ("expert_fsdp", "all-gather"): gathered,
         ("expert_fsdp", "reduce-scatter"): reduced},
        # Groups of 8 neighbours; of the ranks 8 apart, each in a machine of its own.
        {"ep": exchanged * 7 / 8 / 450e9, "expert_fsdp": (gathered + reduced) * 7 / 8 / 50e9}, kernels,
    )  # fmt: skip


def compare(layout: Layout, traffic: list[Traffic], lowered: Work) -> None:
    """What the compiler generates, and the collectives of the plan."""
    assert sum(lowered.gemms.values()) == pytest.approx(layout.gemms, rel=1e-3)
    assert lowered.attention == pytest.approx(layout.attention, rel=1e-6)
    assert lowered.fused_bytes == pytest.approx(layout.kernels, rel=0.08)
    for (dimension, collective), size in layout.sent.items():
        sent = sum(line.bytes for line in traffic if (line.dimension, line.kind) == (dimension, collective))
        assert sent == pytest.approx(size, rel=2e-3), (dimension, collective)
    for dimension, seconds in layout.seconds.items():
        assert sum(line.seconds or 0 for line in traffic if line.dimension == dimension) == pytest.approx(
            seconds, rel=2e-3
        )


@pytest.fixture
def one_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans simulate only the configuration's own mode of activation checkpointing, not those compared with it."""
    monkeypatch.setattr(planner, "rank_plans", lambda job, modes: rank_plans(job, modes[:1]))


@pytest.mark.full
@needs_triton
@pytest.mark.usefixtures("one_mode")
@pytest.mark.parametrize("layout", [fsdp_8b(), tp_70b(), experts_30b()], ids=lambda layout: layout.file)
def test_the_parts_of_a_step_are_those_counted_by_hand(layout: Layout, tmp_path: Path) -> None:
    flags = [
        f"--job.config_file={FILES / layout.file}.toml", "--job.plan", "--training.mixed_precision_param=bfloat16",
        f"--job.dump_folder={tmp_path}", "--training.compile", *layout.flags,
    ]  # fmt: skip
    lowered = on_gpu("sm_90", "lowered_step.work_of", flags, layout.world_size)
    config = ConfigManager().parse_args(flags)
    dims = check(config, layout.world_size, "cuda")
    plan = planner.make_plan(config, dims, named_device("H100"))
    compare(layout, plan.ranks[0].traffic, lowered)

    assert plan.expected is not None
    seconds_by_part = plan.expected.parts
    ahead, back = layout.attention
    gemms = layout.gemms / 800e12 + 0.5 * layout.gemm_bytes / 3e12
    assert seconds_by_part["bf16 GEMMs"] == pytest.approx(gemms, rel=0.02)
    attention = ahead / 600e12 + back / 460e12
    assert seconds_by_part["attention"] == pytest.approx(attention, rel=1e-6)
    # Tokens' collectives are waited for; weights' run beside computation, and take 16 of 132 multiprocessors.
    waited = sum(seconds for dimension, seconds in layout.seconds.items() if "fsdp" not in dimension) / 0.82
    beside = sum(line.seconds or 0 for line in plan.ranks[0].traffic if "fsdp" in line.dimension) / 0.82
    # The formula gathers all weights twice a pass, also those that stay gathered or are needed once.
    assert seconds_by_part["collectives"] == pytest.approx(waited + beside * 16 / 132, rel=0.08)
    others = lowered.fused_bytes / 2.7e12 + (lowered.other_bytes + lowered.update_bytes) / 2.7e12
    total = gemms + attention + others + waited + beside * 16 / 132
    assert plan.expected.seconds == pytest.approx(total, rel=0.05)


@pytest.mark.full
@needs_triton
@pytest.mark.usefixtures("one_mode")
@pytest.mark.parametrize(("recipe", "sums"), [("float8 rowwise", "float32"), ("int8", "float32"), ("int8", "bfloat16")])
def test_the_formula_counts_8_bits_as_the_compiler_does(recipe: str, sums: str, tmp_path: Path) -> None:
    converter, _, name = recipe.partition(" ")
    flags = [
        "--model.flavor=8B", f"--model.converters={converter}", *[f"--{converter}.recipe_name={name}"][: len(name)],
        "--training.seq_len=8192", "--training.local_batch_size=1", "--activation_checkpoint.mode=none",
        "--parallelism.fsdp_reshard_after_forward=never", "--training.mixed_precision_param=bfloat16",
        "--training.compile", "--job.plan", f"--job.dump_folder={tmp_path}",
        f"--training.mixed_precision_reduce={sums}",
    ]  # fmt: skip
    lowered = on_gpu("sm_90", "lowered_step.work_of", flags, 8)
    config = ConfigManager().parse_args(flags)
    dims = check(config, 8, "cuda")
    plan = planner.make_plan(config, dims, named_device("H100"))
    work = work_of_step(plan, find_model_args(config.model), config, dims, 8)
    assert work.flops_8bit == pytest.approx(lowered.gemms[converter], rel=1e-3)
    assert work.gemms["bf16"] == pytest.approx(lowered.gemms["bf16"], rel=2e-3)
    assert work.fused_bytes + work.rounded_bytes == pytest.approx(lowered.fused_bytes, rel=0.05)
    assert work.other_bytes == pytest.approx(lowered.other_bytes, rel=0.12)
    assert work.update_bytes == pytest.approx(lowered.update_bytes, rel=0.02)
