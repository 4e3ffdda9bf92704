"""FSDP of a single shard: what one process runs."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.compat import distributed
from torchtitan.config.low_precision import Int8
from torchtitan.config.system import ActivationCheckpoint, Parallelism
from torchtitan.config.training import Training
from torchtitan.converters import apply_converters
from torchtitan.converters.converter import Target
from torchtitan.converters.gather import GatheredTensor, ShardedWeight
from torchtitan.logging import logger
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.models.moe import MoE
from torchtitan.models.parallelize import parallelize
from torchtitan.models.sparse_args import MoEArgs
from torchtitan.parallel import fsdp
from torchtitan.parallel.dims import ParallelDims

WIDTH = 48
PLAIN = (torch.Tensor, nn.Parameter)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Copies(TorchDispatchMode):
    """Counts copies between float32 tensors of more than a few numbers, and into new ones."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.copy_.default and args[0].dtype == args[1].dtype == torch.float32:
            self.count += args[0].numel() >= WIDTH**2 and args[0] is not args[1]  # or it would do nothing
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.float32:
            self.count += args[0].numel() >= WIDTH**2
        return func(*args, **(kwargs or {}))


def gradients(
    own_reduction: bool, monkeypatch: pytest.MonkeyPatch, reduce_dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], int]:
    """Of two micro-batches, summed, and the copies that they took."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    with monkeypatch.context() as patch:
        if not own_reduction:
            patch.setattr(fsdp, "reduce_scatter_of_one_rank_copies", lambda: False)
        fsdp.apply_fsdp(model, list(model), mesh, torch.bfloat16, reduce_dtype, reshard_after_forward=False)
    with Copies() as copies:
        for batch in torch.randn(2, 8, WIDTH, dtype=torch.bfloat16):
            model(batch).float().square().sum().backward()
    return [parameter.grad.to_local() for parameter in model.parameters()], copies.count


def test_gradients_of_a_single_shard_are_not_copied(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    actual, copies = gradients(True, monkeypatch)
    expected, copies_of_torch = gradients(False, monkeypatch)
    assert copies == 0 and copies_of_torch == 2 * 3  # a copy a layer and micro-batch
    assert all(torch.equal(gradient, other) for gradient, other in zip(actual, expected, strict=True))
    assert all(gradient.abs().sum() > 0 for gradient in actual)


class Counted(TorchDispatchMode):
    """Counts operations by the name that `name_of` gives one, from its operands and its result; "" is not counted."""

    def __init__(self, name_of: Callable[[Any, Sequence[Any], Any], str]) -> None:
        super().__init__()
        self.name_of, self.counts = name_of, Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if name := self.name_of(func, args, out):
            self.counts[name] += 1
        return out


def cast(function: Any, operands: Sequence[Any], out: Any) -> str:
    """New tensors, and copies, of a weight's size in bfloat16."""
    large = isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16 and out.numel() == WIDTH**2
    return function._opname if large and function._opname in ("_to_copy", "copy_") else ""


def of_a_weight(function: Any, operands: Sequence[Any], out: Any) -> str:
    """Operations that read a complete weight."""
    x = operands[0]
    return str(function) if isinstance(x, torch.Tensor) and x.shape == (WIDTH, WIDTH) and type(x) in PLAIN else ""


def weights(monkeypatch: pytest.MonkeyPatch, known: bool) -> tuple[list[torch.Tensor], Counter[str]]:
    """As the second of two forward passes sees them, between which they change, and what casts them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    with monkeypatch.context() as patch:
        if not known:
            patch.setattr(fsdp, "all_gather_of_one_rank_copies_twice", lambda: False)
        fsdp.apply_fsdp(model, list(model), mesh, torch.bfloat16, torch.float32, reshard_after_forward=True)
    seen: list[torch.Tensor] = []
    for layer in model:
        layer.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.detach().clone()))
    batch = torch.randn(8, WIDTH, dtype=torch.bfloat16)
    model(batch).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    seen.clear()
    with torch.no_grad(), Counted(cast) as casts:
        model(batch)
    return seen, casts.counts


def test_weights_of_a_single_shard_are_cast_into_place(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert distributed.all_gather_of_one_rank_copies_twice()
    actual, casts = weights(monkeypatch, True)
    expected, casts_of_torch = weights(monkeypatch, False)
    assert len(actual) == 3 and all(weight.dtype == torch.bfloat16 for weight in actual)
    assert all(torch.equal(weight, other) for weight, other in zip(actual, expected, strict=True))
    assert casts == Counter(copy_=3) and casts_of_torch == Counter(_to_copy=3, copy_=3)


def test_another_fsdp_is_said_to_copy(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """When torch changes, nobody should have to find by a trace that copies are back."""
    monkeypatch.setattr("inspect.getsource", lambda function: "")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level("DEBUG", logger.name):
        for looks_as_known in (
            distributed.reduce_scatter_of_one_rank_copies,
            distributed.all_gather_of_one_rank_copies_twice,
        ):
            assert not looks_as_known.__wrapped__()
    assert [record.message.split(" of this torch ")[1].split()[0] for record in caplog.records] == [
        "reduces",
        "gathers",
    ]


def test_one_rank_has_nothing_to_sum_in_bfloat16(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are copied once, into float32, as without that key."""
    actual, copies = gradients(True, monkeypatch, torch.bfloat16)
    expected, _ = gradients(True, monkeypatch)
    assert copies == 0 and all(torch.equal(gradient, other) for gradient, other in zip(actual, expected, strict=True))


def step(gather: bool, recipe: Any) -> tuple[list[torch.Tensor], list[Counter[str]]]:
    """The gradients of a step with three micro-batches, and the operations on weights in each."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    section = Int8(recipe_name=recipe, enable_fsdp_int8_all_gather=gather, filter_fqns=[])
    apply_converters(model, ["int8"], lambda _: section, Target("cpu"))
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    fsdp.apply_fsdp(model, list(model), mesh, torch.float32, torch.float32, reshard_after_forward=False)
    counts = []
    for number, batch in enumerate(torch.randn(3, 8, WIDTH, requires_grad=True)):
        fsdp.set_last_microbatch([model], last=number == 2)
        with Counted(of_a_weight) as calls:
            model(batch).square().sum().backward()
        counts.append(calls.counts)
        assert isinstance(model[0].weight, nn.Parameter) and isinstance(model[0].weight.data, GatheredTensor) == (
            gather and number < 2
        )
    return [parameter.grad.to_local() for parameter in model.parameters()], counts


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_a_single_shard_is_quantized_once_a_step(group: None, recipe: str) -> None:
    """For both GEMMs that use it, to the same numbers as when each micro-batch quantizes again."""
    actual, counts = step(True, recipe)
    expected, others = step(False, recipe)
    assert all(torch.equal(gradient, other) for gradient, other in zip(actual, expected, strict=True))
    amax = "torchtitan.amax_both.default" if recipe == "rowwise" else "torchtitan.amax.default"
    assert [count[amax] for count in counts] == [3, 0, 0] and [other[amax] for other in others] == [3, 3, 3]


def step_of_experts(gather: bool, grad_weight: bool) -> tuple[list[torch.Tensor], list[int]]:
    """The results and gradients of a step with three micro-batches, and how often each rounds experts' columns."""
    torch.manual_seed(0)
    model = nn.Sequential(*(MoE(WIDTH, MoEArgs(n_experts=4, top_k=2, ffn_dim=WIDTH)) for _ in range(2)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    section = Int8(enable_fsdp_int8_all_gather=gather, filter_fqns=[], grad_weight=grad_weight)
    apply_converters(model, ["int8"], lambda _: section, Target("cpu"))
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    fsdp.apply_fsdp(model, list(model), mesh, torch.float32, torch.float32, reshard_after_forward=False)
    outs, roundings = [], []
    for number, batch in enumerate(torch.randn(3, 1, 20, WIDTH, requires_grad=True)):
        fsdp.set_last_microbatch([model], last=number == 2)
        with Counted(of_experts) as calls:
            outs.append(model(batch))
            outs[-1].square().sum().backward()
        roundings.append(calls.counts["torchtitan.round_columns_of_rows.default"])
    return [*outs, *(parameter.grad.to_local() for parameter in model.parameters())], roundings


def of_experts(function: Any, operands: Sequence[Any], out: Any) -> str:
    """Operations on the weights of all experts, (4, N, K) or as one matrix."""
    x = operands[0]
    return str(function) if isinstance(x, torch.Tensor) and x.shape[:-1].numel() == 4 * WIDTH else ""


@pytest.mark.parametrize("grad_weight", [True, False])
def test_experts_of_a_single_shard_are_quantized_once_a_step(group: None, grad_weight: bool) -> None:
    """To the same numbers as when each micro-batch quantizes them again, forward and backward."""
    actual, roundings = step_of_experts(True, grad_weight)
    expected, others = step_of_experts(False, grad_weight)
    assert all(torch.equal(result, other) for result, other in zip(actual, expected, strict=True))
    assert roundings == [6, 0, 0] and others == [6, 6, 6]


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gathers and reductions of groups, as they come."""
    events: list[str] = []
    gather, reduce = FSDPParamGroup.unshard, _fsdp_param_group.foreach_reduce

    def unshard(group: FSDPParamGroup, *arguments: Any) -> None:
        gathered = group.is_unsharded or group._all_gather_result is not None
        gather(group, *arguments)
        if not gathered and group._all_gather_result is not None:
            events.append(f"gather {group._module_fqn}")

    def foreach_reduce(parameters: list[Any], *arguments: Any) -> Any:
        events.append(f"reduce {parameters[0]._param_fqn}")
        return reduce(parameters, *arguments)

    monkeypatch.setattr(FSDPParamGroup, "unshard", unshard)
    monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", foreach_reduce)
    return events


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.experts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(self.dense(x))


def test_the_next_block_and_its_experts_are_gathered_while_a_block_computes(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    blocks = [Sparse() for _ in range(4)]
    model = nn.Sequential(*blocks)
    experts = [block.experts for block in blocks]
    fsdp.apply_fsdp(model, list(blocks), mesh, torch.float32, torch.float32, True, experts=experts, expert_mesh=mesh)
    events = recorded(monkeypatch)
    for number, block in enumerate(blocks):
        block.dense.register_forward_pre_hook(lambda *_, n=number: events.append(f"forward {n}"))
        block.experts.register_full_backward_pre_hook(lambda *_, n=number: events.append(f"backward {n}"))
    model(torch.randn(8, WIDTH, requires_grad=True)).sum().backward()
    for number in range(3):
        assert events.index(f"gather {number + 1}.experts") < events.index(f"forward {number}")
        again = events.index("backward 3")
        assert events.index(f"gather {number}.experts", again - 4) < events.index(f"backward {number + 1}")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_head_and_tail_of_a_step_are_gathered_only_if_needed_and_reduced_early(
    group: None, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    """The output layer's gradient while the blocks compute; the last block stays gathered between its forward and its
    backward pass, and the backward pass of an embedding needs no weight."""
    args = LlamaArgs(dim=16, n_layers=3, n_heads=2, n_kv_heads=2, ffn_dim=32, vocab_size=32, tied_embeddings=tied)
    model = Llama(args)
    names, parallelism = list(model.state_dict()), Parallelism(fsdp_reshard_after_forward="always")
    sections = parallelism, ActivationCheckpoint(mode="none"), Training(mixed_precision_param="float32")
    mesh = ParallelDims().build_mesh("cpu")
    parallelize(model, {}, mesh, None, None, *sections)
    events = recorded(monkeypatch)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    first, head = ("", []) if tied else ("tok_embeddings", ["head_group"])
    for last in (False, True):
        events.clear()
        fsdp.set_last_microbatch([model], last)
        model(tokens, tokens).backward()
        gathered = [event.removeprefix("gather ") for event in events if event.startswith("gather")]
        # What the backward pass needs first stays gathered until the last micro-batch.
        kept = [] if last else ["layers.2", *head]
        forward = [*([first] if not (tied and last) else []), "layers.0", "layers.1", *kept]
        assert gathered == [*forward, "layers.1", "layers.0"]
        reduced = [event.removeprefix("reduce ") for event in events if event.startswith("reduce")]
        assert reduced[0] == ("layers.2.attention.wq.weight" if tied else "norm.weight")
        assert reduced[-1] == "tok_embeddings.weight" and len(reduced) == (4 if tied else 5)
    assert list(model.state_dict()) == names
    with torch.no_grad():
        model(tokens, tokens)
    fsdp.reshard([model])
    assert all(group.is_sharded for group in groups_of(model))


def groups_of(model: nn.Module) -> list[FSDPParamGroup]:
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    if hasattr(states[0], "_fsdp_param_groups"):
        return [group for state in states for group in state._fsdp_param_groups]
    return [state._fsdp_param_group for state in states if state._fsdp_param_group]  # torch 2.11


def test_a_tensor_that_is_gathered_in_8_bits_is_not_changed_in_place() -> None:
    """The change would be lost. Another view of it has that view's shape."""
    gathered = GatheredTensor([torch.ones(4, 8, dtype=torch.int8), torch.ones(1, 1)], "tensorwise", torch.float32)
    with pytest.raises(TypeError, match="gathered in 8 bits"):
        gathered.mul_(0)
    with pytest.raises(TypeError, match="gathered in 8 bits"):
        gathered.detach().copy_(torch.zeros(4, 8))
    with pytest.raises(TypeError, match="gathered in 8 bits"):
        torch.add(torch.ones(4, 8), 1, out=gathered)
    with pytest.raises(TypeError, match="gathered in 8 bits"):
        torch._foreach_mul_([torch.ones(2), gathered], 0)
    assert torch.equal(torch.zeros(4, 8).copy_(gathered), torch.ones(4, 8))  # is read
    assert torch.equal(gathered * 1, torch.ones(4, 8))
    assert gathered.as_strided((2, 2), (8, 1)).shape == (2, 2)
    assert isinstance(gathered.as_strided((4, 8), (8, 1)), GatheredTensor)


def test_a_view_of_a_weight_is_gathered_in_8_bits_too() -> None:
    weight, aten = ShardedWeight(torch.randn(4, 8), "rowwise"), torch.ops.aten
    views = [
        aten.alias(weight), weight.t(), weight.unsqueeze(0), weight[:2], weight.view(8, 4),
        aten._unsafe_view(weight, [8, 4]),
        weight.new_empty_strided((4, 8), (8, 1)), *weight.split([1, 3]), *weight.split(2), *weight.chunk(2),
    ]  # fmt: skip
    assert all(isinstance(view, ShardedWeight) for view in views)
    results = [weight * 2, weight.view(torch.uint8), weight.sum()]  # numbers
    assert not any(isinstance(result, ShardedWeight) for result in results)
