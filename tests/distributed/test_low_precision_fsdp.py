"""Weights gathered in low precision: the data sent, the scales used, and the number of collectives."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from workers import in_processes

from torchtitan.checkpoint.state_dict import model_tensors
from torchtitan.config.low_precision import Float8, Int8
from torchtitan.config.training import Optimizer
from torchtitan.converters import Target, apply_converters
from torchtitan.converters.converter import weight_unchanged
from torchtitan.converters.gather import GatheredTensor
from torchtitan.errors import TrainingError
from torchtitan.kernels import rounding
from torchtitan.kernels.grouped_gemm import ends_of, rows_of
from torchtitan.kernels.quantize import quantize
from torchtitan.models.loss import chunked_cross_entropy
from torchtitan.models.moe import MoE
from torchtitan.models.sparse_args import MoEArgs
from torchtitan.optim.clip import clip_grad_norm
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.parallel.fsdp import apply_fsdp, set_last_microbatch

DIM, TOKENS, STEPS = 64, 32, 3
INT8 = Int8(enable_fsdp_int8_all_gather=True)
INT8_TENSORWISE = Int8(recipe_name="tensorwise", enable_fsdp_int8_all_gather=True)
FLOAT8 = Float8(enable_fsdp_float8_all_gather=True)
PRECOMPUTED = Float8(enable_fsdp_float8_all_gather=True, precompute_float8_dynamic_scale_for_fsdp=True)

OPTIMIZER = Optimizer(lr=0.01)
TARGET = Target("cpu", tokens=TOKENS, optimizer=OPTIMIZER)
BOUND = Float8(enable_fsdp_float8_all_gather=True, weight_scale="bound", weight_scale_freq=2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class CountedAllGather:
    """FSDP2's all_gather, counting the bytes received."""

    def __init__(self) -> None:
        self.bytes = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.bytes += output_tensor.nbytes
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class CountedAllReduces(TorchDispatchMode):
    """Counts all_reduces of `torch.distributed` and functional collectives, including the backward pass's."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # a DTensor decomposes the operation first
        self.count += func._opname.replace("_", "").startswith("allreduce")
        return func(*args, **(kwargs or {}))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(name: str, section: Any, hugest: float = 0.0, told: float = OPTIMIZER.lr) -> dict[str, Any]:
    """Three steps of two sharded blocks on all ranks. Returns everything that tests may check. `told` is the learning
    rate passed to the converter."""
    gather = CountedAllGather()
    with torch.device("meta"):
        model: Any = nn.Sequential(Block(), Block())
    converters = apply_converters(model, [name] if name else [], lambda _: section, TARGET)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    apply_fsdp(model, list(model), mesh, torch.bfloat16, torch.float32, reshard_after_forward=True)
    model.to_empty(device="cpu")
    for module in (model, *model):
        module.set_custom_all_gather(gather)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            full = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.to_local().copy_(full.chunk(mesh.size())[dist.get_rank()])
    if name and hugest:
        with torch.no_grad():
            model[0].up.weight.to_local().zero_()
            model[1].up.weight.to_local().mul_(hugest)
    start = {key: whole(tensor).clone() for key, tensor in model_tensors(model).items()}
    optimizer = build_optimizer(model, OPTIMIZER)
    losses, reduces, hook_reduces = [], [], []
    generator.manual_seed(1 + dist.get_rank())
    for _ in range(STEPS):
        x = torch.randn(TOKENS, DIM, generator=generator).bfloat16()
        with CountedAllReduces() as all_reduces:
            loss = (model(x).float() ** 2).mean()
            loss.backward()
        reduces.append(all_reduces.count)
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with CommDebugMode() as collectives:
            for converter in converters:
                converter.after_step([model], told)
        hook_reduces.append(collectives.get_total_counts())
        losses.append(loss.item())
    gathered_bytes = gather.bytes
    model[0].unshard()
    weight = model[0].up.weight
    gathered = tuple(t.clone() for t in weight.by_rows()) if isinstance(weight, GatheredTensor) else None
    result = {
        "losses": losses,
        "bytes": gathered_bytes,
        "reduces_in_passes": reduces,
        "reduces": hook_reduces,
        "bounds": converters[0].state_dict([model]) if name else None,
        "start": start,
        "end": {key: whole(tensor).clone() for key, tensor in model_tensors(model).items()},
        "gathered": gathered,
    }
    return result


CASES = {
    "plain": ("", None),
    "int8 rowwise": ("int8", INT8),
    "int8 tensorwise": ("int8", INT8_TENSORWISE),
    "float8": ("float8", FLOAT8),
    "float8 precomputed": ("float8", PRECOMPUTED),
    "float8 bound": ("float8", BOUND),
}


def train_all() -> dict[str, Any]:
    """Every case, and again with zero and with huge weights."""
    results = {name: train(*case) for name, case in CASES.items()}
    extreme = {f"{name}, extreme": train(*case, 1e20) for name, case in CASES.items() if case[0]}
    try:
        train(*CASES["float8 bound"], told=OPTIMIZER.lr / 100)
        refused = ""
    except TrainingError as error:
        refused = str(error)
    return {**results, **extreme, "moved too far": refused}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """The results of `train_all` on each of two ranks."""
    return in_processes(train_all, 2)


@pytest.mark.parametrize("case", ["int8 rowwise", "int8 tensorwise", "float8", "float8 precomputed", "float8 bound"])
def test_gather_sends_half_the_bytes_and_trains_alike(case: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank[case]["losses"] == pytest.approx(rank["plain"]["losses"], rel=0.03)
        assert rank[case]["losses"] != rank["plain"]["losses"]
        assert rank[case]["bytes"] < 0.56 * rank["plain"]["bytes"]  # half, plus scales and norms


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_int8_scales_belong_to_the_whole_weight(recipe: Any, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        result = rank[f"int8 {recipe}"]
        data, scale = quantize(result["end"]["0.up.weight"], recipe)
        gathered, gathered_scale = result["gathered"][:2]
        assert torch.equal(gathered, data) and torch.equal(gathered_scale.flatten(), scale.flatten())


@pytest.mark.parametrize(
    ("case", "reductions"),
    [
        ("int8 rowwise", [0, 0, 0]),
        ("int8 tensorwise", [1, 1, 1]),
        ("float8", [0, 0, 0]),
        ("float8 precomputed", [1, 1, 1]),
        ("float8 bound", [1, 0, 1]),  # measured every second step
    ],
)
def test_scales_after_a_step_take_one_reduction_for_all_weights(
    case: str, reductions: list[int], ranks: list[dict[str, Any]]
) -> None:
    assert all(rank[case]["reduces"] == reductions for rank in ranks)


def test_scales_that_are_there_take_no_reduction_in_the_passes(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        dynamic, precomputed, bound = (
            rank[case]["reduces_in_passes"] for case in ("float8", "float8 precomputed", "float8 bound")
        )
        assert dynamic[0] == precomputed[0] == bound[0] > 0  # before the first step no bound exists yet
        assert dynamic[1:] == dynamic[:-1]
        assert precomputed[1:] == bound[1:] == rank["plain"]["reduces_in_passes"][1:]


def test_bounds_are_above_all_weights_and_near_them(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        result = rank["float8 bound"]
        assert result["bounds"] == ranks[0]["float8 bound"]["bounds"]
        for name in ("0.up", "0.down", "1.up", "1.down"):
            bound, age, *_ = result["bounds"][name]
            assert age == 0 and bound == result["end"][f"{name}.weight"].abs().max()


def test_a_weight_that_moves_further_than_its_bound_ends_the_run(ranks: list[dict[str, Any]]) -> None:
    assert all("float8.weight_scale = measured" in rank["moved too far"] for rank in ranks)


def test_precomputed_float8_scales_give_the_same_training(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        each, precomputed = rank["float8"], rank["float8 precomputed"]
        assert each["losses"] == precomputed["losses"]
        assert each["end"] and each["end"].keys() == precomputed["end"].keys()
        assert all(torch.equal(weight, precomputed["end"][name]) for name, weight in each["end"].items())


@pytest.mark.parametrize("case", [name for name in CASES if name != "plain"])
def test_weights_of_zeros_and_huge_ones_keep_finite_scales(case: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert all(torch.isfinite(weight).all() for weight in rank[f"{case}, extreme"]["end"].values())


def test_state_holds_plain_weights(ranks: list[dict[str, Any]]) -> None:
    for case in CASES:
        weight = ranks[0][case]["start"]["1.down.weight"]
        assert type(weight) is torch.Tensor and weight.dtype == torch.float32


def int8_gemms(recipe: Any, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a layer whose weight is gathered in int8 gets, and what it computes: x, weight and gradient of the output;
    output, input gradient and weight gradient, which FSDP averages over the ranks."""
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(2 * DIM, DIM, generator=generator) * torch.logspace(0, -1, DIM)  # columns of unequal size
    x, out_grad = (torch.randn(2, TOKENS, n, generator=generator).to(dtype)[dist.get_rank()] for n in (DIM, 2 * DIM))
    layer: Any = nn.Sequential(nn.Linear(DIM, 2 * DIM, bias=False))
    layer[0].weight.data.copy_(full)
    section = Int8(recipe_name=recipe, enable_fsdp_int8_all_gather=True)
    apply_converters(layer, ["int8"], lambda _: section, TARGET)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    apply_fsdp(layer, list(layer), mesh, dtype, torch.float32, reshard_after_forward=True)
    out = layer(x.requires_grad_())
    out.backward(out_grad)
    assert x.grad is not None
    return [x.detach(), full, out_grad], [out.detach(), x.grad, whole(layer[0].weight.grad)]


def rounded(x: torch.Tensor, dims: int | tuple[int, ...]) -> torch.Tensor:
    """x in int8 with one scale along these dimensions, and back; in float64, except that float32 decides ties."""
    scale = x.abs().amax(dims, keepdim=True).float() / 127
    return (x.float() * scale.reciprocal()).round().double() * scale.double()


def torchaos_gemms(
    x: torch.Tensor, weight: torch.Tensor, again: torch.Tensor, out_grad: torch.Tensor
) -> list[torch.Tensor]:
    """`again`: the weight as the input gradient sees it."""
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    results = []
    for of_layer in (weight, again):
        layer = nn.Linear(DIM, 2 * DIM, bias=False)
        layer.weight.data.copy_(of_layer)
        quantize_(layer, Int8MixedPrecisionTrainingConfig(module_swap=True))
        out = layer(x := x.detach().float().requires_grad_())
        out.backward(out_grad.float())
        results.append([out.detach(), x.grad, layer.weight.grad])
    return [results[0][0], results[1][1], results[0][2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_int8_gradients_are_torchaos_and_float64s(world_size: int, recipe: str, dtype: torch.dtype) -> None:
    """Element by element. Shards bring no scales of columns, so on two ranks the input gradient of the rowwise recipe
    rounds the weight a second time."""
    rows, columns = (1, 0) if recipe == "rowwise" else ((0, 1), (0, 1))
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    ranks = in_processes(int8_gemms, world_size, recipe, dtype)
    references: list[list[list[torch.Tensor]]] = [[], []]  # of float64 and of torchao, by rank
    for (x, weight, out_grad), _ in ranks:
        again = weight
        if world_size == 2 and recipe == "rowwise":
            again = rounded(weight, rows).to(dtype).float()
        references[0].append(
            [
                rounded(x, rows) @ rounded(weight, rows).T,
                rounded(out_grad, rows) @ rounded(again, columns),
                rounded(out_grad, columns).T @ rounded(x, columns),
            ]
        )
        references[1].append(torchaos_gemms(x, weight, again, out_grad))
    for reference in references if recipe == "rowwise" else references[:1]:  # torchao has no other
        average = sum(weight_grad.to(dtype).double() for *_, weight_grad in reference) / world_size
        for (_, actual), (out, x_grad, _) in zip(ranks, reference, strict=True):
            for result, expected in zip(actual, (out, x_grad, average), strict=True):
                torch.testing.assert_close(result.double(), expected.double(), rtol=tolerance, atol=5 * tolerance)
    for (x, weight, out_grad), actual in ranks:
        exact = x.double() @ weight.double().T, out_grad.double() @ weight.double()
        for result, gemm in zip(actual, exact, strict=False):
            assert 0.004 < (result.double() - gemm).norm() / gemm.norm() < 0.03


class OneLayer(MoE):
    """A mixture of which one layer computes, with four experts."""

    def __init__(self) -> None:
        super().__init__(DIM, MoEArgs(n_experts=4, top_k=2, ffn_dim=2 * DIM))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.experts.w1(x, ends)


COUNTS = [[8, 0, 17, 7], [0, 16, 8, 8], [1, 31, 0, 0], [8, 8, 8, 8]]  # rows of each expert on each rank


def int8_gemms_of_experts(dtype: torch.dtype, gather: bool, steps: int) -> list[Any]:
    """What `int8_gemms` returns, of experts, in the last of some equal micro-batches; and the bytes received."""
    generator = torch.Generator().manual_seed(0)
    # Experts and columns of unequal size.
    full = torch.randn(4, 2 * DIM, DIM, generator=generator) * torch.logspace(0, -1, DIM)
    full *= torch.logspace(0, -2, 4).view(4, 1, 1)
    rank, size = dist.get_rank(), dist.get_world_size()
    x, out_grad = (torch.randn(4, TOKENS, n, generator=generator).to(dtype)[rank] for n in (DIM, 2 * DIM))
    model: Any = nn.Sequential(OneLayer())
    layer = model[0].experts.w1
    layer.weight.data.copy_(full)
    section = Int8(enable_fsdp_int8_all_gather=gather)
    apply_converters(model, ["int8"], lambda _: section, Target("cpu", tokens=TOKENS, shards=size))
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",))
    apply_fsdp(model, list(model), mesh, dtype, torch.float32, reshard_after_forward=False)
    counted = CountedAllGather()
    model[0].set_custom_all_gather(counted)
    ends = ends_of(torch.tensor(COUNTS[rank]))
    for number in range(steps):
        set_last_microbatch([model], last=number == steps - 1)
        out = model[0](leaf := x.clone().requires_grad_(), ends)
        out.backward(out_grad)
    weight_grad = whole(model[0].experts.w1.weight.grad) / steps
    return [[x, full, out_grad], [out.detach(), leaf.grad, weight_grad], counted.bytes]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_gradients_of_experts_are_float64s(world_size: int, dtype: torch.dtype) -> None:
    """Element by element, in the second of two micro-batches. As of other layers, over several ranks the input gradient
    rounds the weight a second time."""
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    ranks = in_processes(int8_gemms_of_experts, world_size, dtype, True, 2)
    average = torch.zeros(4, 2 * DIM, DIM, dtype=torch.float64)
    for counts, ((x, weight, out_grad), (out, x_grad, _), _) in zip(COUNTS, ranks, strict=False):
        again = weight if world_size == 1 else rounded(weight, 2).to(dtype).float()
        for expert, rows in enumerate(rows_of(ends_of(torch.tensor(counts)))):
            if rows.start < rows.stop:
                left, grad = x[rows], out_grad[rows]
                expected = rounded(left, 1) @ rounded(weight[expert], 1).T
                torch.testing.assert_close(out[rows].double(), expected, rtol=tolerance, atol=5 * tolerance)
                expected = rounded(grad, 1) @ rounded(again[expert], 0)
                torch.testing.assert_close(x_grad[rows].double(), expected, rtol=tolerance, atol=5 * tolerance)
                average[expert] += (rounded(grad, 0).T @ rounded(left, 0)).to(dtype).double() / world_size
    for _, (_, _, weight_grad), _ in ranks:
        torch.testing.assert_close(weight_grad.double(), average, rtol=tolerance, atol=5 * tolerance)


def test_experts_are_gathered_in_half_the_bytes_once_a_step() -> None:
    (_, _, once), *_ = in_processes(int8_gemms_of_experts, 2, torch.bfloat16, True, 1)
    (_, _, thrice), *_ = in_processes(int8_gemms_of_experts, 2, torch.bfloat16, True, 3)
    (_, _, plain), *_ = in_processes(int8_gemms_of_experts, 2, torch.bfloat16, False, 1)
    assert thrice == once < 0.56 * plain


class Head(nn.Module):
    """An output layer with its loss, and what a model has beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM, bias=False)
        self.output = nn.Linear(DIM, 4 * DIM, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(self.output, self.output.weight, self.layer(x), labels)


def roundings_of_output() -> list[int]:
    """How often the output layer's weight is rounded, after each micro-batch of two steps."""
    with torch.device("meta"):
        model = Head()
    apply_converters(model, ["float8"], lambda _: Float8(filter_fqns=["layer"]), TARGET)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    apply_fsdp(model, [model.layer], mesh, torch.bfloat16, torch.float32, reshard_after_forward=True)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    counts, count, original = [], 0, rounding.round_to

    def counted(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        nonlocal count
        count += x.shape == (4 * DIM, DIM)
        return original(x, *arguments)

    rounding.round_to = counted  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    for _ in range(2):
        with weight_unchanged(model.output):
            for _ in range(3):
                x = torch.randn(1, TOKENS, DIM).bfloat16()
                model(x, torch.zeros(1, TOKENS, dtype=torch.long)).backward()
                counts.append(count)
        optimizer.step()
    return counts


def test_a_step_rounds_the_output_layers_weight_once() -> None:
    """Also where FSDP frees the gathered weight between micro-batches."""
    assert in_processes(roundings_of_output, 2) == [[1, 1, 1, 2, 2, 2]] * 2


def all_gathers(reshard_after_forward: bool) -> list[int]:
    """Of two steps with three micro-batches each, by micro-batch."""
    model = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(2)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    apply_fsdp(model, list(model), mesh, torch.bfloat16, torch.float32, reshard_after_forward)
    counts = []
    for number in range(6):
        set_last_microbatch([model], last=number % 3 == 2)
        with CommDebugMode() as collectives:
            model(torch.randn(TOKENS, DIM).bfloat16()).sum().backward()
        counts.append(collectives.get_comm_counts()[torch.ops.c10d._allgather_base_])
    return counts


def test_weights_that_stay_gathered_are_gathered_once_a_step() -> None:
    # At the end of a step FSDP2 prefetches for the micro-batch before, in vain.
    assert in_processes(all_gathers, 2, False) == [[2, 0, 1] * 2] * 2
    assert all(count >= 3 for rank in in_processes(all_gathers, 2, True) for count in rank)
