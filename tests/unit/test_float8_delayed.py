"""Delayed scaling: the source of the scales, that they accompany the data, and that nothing else changes them."""

import copy
import dataclasses
import json
from typing import Any

import pytest
import torch
from runs import all_equal
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

from torchtitan.config.low_precision import MX, Float8, Int8
from torchtitan.config.training import Optimizer
from torchtitan.converters import Target, apply_converters
from torchtitan.converters.gather import ShardedWeight
from torchtitan.converters.linear import AmaxHistory, LowPrecisionLinear
from torchtitan.converters.linear_converter import LinearConverter, relative_errors
from torchtitan.converters.recipes import FLOAT8_SECTION
from torchtitan.errors import ConfigError

CPU = Target("cpu")


def delayed(**keys: Any) -> Float8:
    return Float8(recipe_name="delayed", **keys)


def history_of(layer: nn.Module) -> AmaxHistory:
    assert isinstance(layer, LowPrecisionLinear) and layer.history is not None
    return layer.history


class Trained:
    """Two layers in delayed float8, with data of a given magnitude."""

    def __init__(self, **keys: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32)).bfloat16()
        (converter,) = apply_converters(self.model, ["float8"], lambda _: delayed(**keys), CPU)
        assert isinstance(converter, LinearConverter)
        self.converter = converter
        self.forward: Any = self.model
        self.x = torch.randn(64, 32).bfloat16()

    @property
    def first(self) -> AmaxHistory:
        return history_of(self.model[0])

    def step(self, *sizes: float, skipped: bool = False) -> None:
        """A micro-batch of each size; no weight is updated."""
        for size in sizes:
            self.forward(self.x * size).sum().backward()
        self.model.zero_grad()
        self.converter.after_step([self.model], None if skipped else 1e-3)

    def scale(self) -> float:
        """The scale of the first layer's input, as a multiple of the scale of x itself."""
        return float(self.first.scales[0] / (448 / self.x.abs().max().float()))


def gradients(model: Any, x: torch.Tensor, between: Any = lambda: None) -> list[torch.Tensor]:
    """[output, input gradient, weight gradients], calling `between` between forward and backward."""
    leaf = x.clone().requires_grad_()
    out = model(leaf)
    between()
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [leaf, *model.parameters()])]


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert all_equal(left, right)


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("keys", [{}, {"delayed_format": "e4m3"}, {"cast_input": "dynamic"}, {"delayed_margin": 1}])
def test_products_have_the_errors_of_float8(keys: dict[str, Any], emulate: bool) -> None:
    converter = LinearConverter(FLOAT8_SECTION, delayed(emulate=emulate, **keys), CPU)
    gradient = 0.037 if keys.get("delayed_format") == "e4m3" else 0.059
    expected = {"output": 0.037, "grad_input": gradient, "grad_weight": gradient}

    def after_a_step(linear: nn.Linear) -> nn.Linear:
        low = swap(linear)
        x, out_grad = torch.randn(256, 256).bfloat16(), torch.randn(256, 512).bfloat16()
        low(x.requires_grad_()).backward(out_grad)
        converter.after_step([low], 1e-3)
        assert history_of(low).has_scales
        return low

    assert relative_errors(converter, "cpu") == pytest.approx(expected, rel=0.1)
    swap, converter.swap = converter.swap, after_a_step  # type: ignore[method-assign]
    assert relative_errors(converter, "cpu") == pytest.approx(expected, rel=0.1)


def test_before_there_is_a_history_it_is_torchaos_dynamic_recipe() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 96, bias=False).bfloat16(), torch.randn(32, 64).bfloat16()
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    torchaos = Float8Linear.from_float(copy.deepcopy(linear), config=config)
    ours = LinearConverter(FLOAT8_SECTION, delayed(), CPU).swap(linear)
    for actual, expected in zip(gradients(ours, x), gradients(torchaos, x), strict=True):
        largest = float(expected.abs().max())
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-9 * largest)  # of bfloat16


def test_scale_fits_the_largest_amax_of_the_history() -> None:
    trained = Trained(delayed_history_len=3)
    for sizes, expected in [((1.0,), 1), ((4.0, 2.0), 1 / 4), ((1.0,), 1 / 4), ((1.0,), 1 / 4), ((2.0,), 1 / 2)]:
        trained.step(*sizes)
        assert trained.scale() == pytest.approx(expected)


def test_most_recent_amax_and_margin() -> None:
    trained = Trained(delayed_amax="most_recent", delayed_margin=2)
    for size in (1.0, 4.0, 2.0):
        trained.step(size)
        assert trained.scale() == pytest.approx(1 / size / 4)


def test_skipped_updates_validation_and_numbers_that_are_none_leave_no_trace() -> None:
    trained = Trained(delayed_amax="most_recent")
    trained.step(1.0)
    trained.step(64.0, skipped=True)
    with torch.no_grad():
        trained.model(trained.x * 64)
    trained.step(2.0)
    assert trained.scale() == pytest.approx(1 / 2)
    for size in (float("inf"), float("nan"), 0.0):
        trained.step(size)
        assert trained.scale() == pytest.approx(1 / 2)
        layers = [history_of(trained.model[i]) for i in (0, 2)]
        assert all(layer.scales.isfinite().all() for layer in layers)


SECTIONS = [Float8(), Float8(recipe_name="rowwise"), delayed(), Int8(), MX(emulate=True)]


@pytest.mark.parametrize("section", SECTIONS, ids=["float8", "float8 rowwise", "float8 delayed", "int8", "mx"])
@pytest.mark.parametrize("where", ["input", "output gradient"])
def test_no_recipe_hides_what_is_not_finite(section: Any, where: str) -> None:
    """It shows in the gradients, or the converter reports it."""
    torch.manual_seed(0)
    name = type(section).__name__.lower()
    model: Any = nn.Sequential(nn.Linear(64, 96, bias=False)).bfloat16()
    section = dataclasses.replace(section, filter_fqns=[])
    (converter,) = apply_converters(model, [name], lambda _: section, CPU)
    assert isinstance(converter, LinearConverter)
    x, out_grad = torch.randn(64, 64).bfloat16(), torch.randn(64, 96).bfloat16()
    for spoiled in (False, True):
        if spoiled:
            (x if where == "input" else out_grad)[3, 4] = float("inf")
        leaf = x.clone().requires_grad_()
        grads = torch.autograd.grad(model(leaf), [leaf, model[0].weight], out_grad)
        told = converter.hidden_nonfinite([model])
        shown = not all(grad.isfinite().all() for grad in grads)
        assert (shown or bool(told)) == spoiled
        converter.after_step([model], 1e-3)


@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
def test_each_tensor_may_be_dynamic(role: str) -> None:
    """A delayed tensor saturates when it grows after the history was recorded; a dynamic one does not."""
    others = {f"cast_{other}": "dynamic" for other in ("input", "weight", "grad_output") if other != role}
    alone, rest = Trained(**others), Trained(**{f"cast_{role}": "dynamic"})
    for trained in (alone, rest):
        trained.step(1.0)
        before = gradients(trained.model, trained.x)
        with torch.no_grad():
            trained.first.history[["input", "weight", "grad_output"].index(role)] /= 8
        trained.converter.scaling.set_scales([trained.first])  # type: ignore[attr-defined]
        changed = [not torch.equal(a, b) for a, b in zip(before, gradients(trained.model, trained.x), strict=True)]
        assert any(changed) == (trained is alone)


@pytest.mark.parametrize("when", ["first step", "later"])
def test_scales_changed_between_forward_and_backward_change_no_gradient(when: str) -> None:
    trained = Trained()
    if when == "later":
        trained.step(1.0)
    expected = gradients(trained.model, trained.x)

    def change() -> None:
        for layer in map(history_of, (trained.model[0], trained.model[2])):
            layer.scales.mul_(7)
            layer.history.mul_(7)

    assert_same(gradients(trained.model, trained.x, change), expected)


class Shards(DeviceMesh):
    """A mesh of this process without a process group."""

    def __init__(self, shards: int) -> None:
        self.shards = shards

    def size(self, mesh_dim: int | None = None) -> int:
        return self.shards


UNREAD: Any = (None, None, None, None)


@pytest.mark.parametrize(("recipe", "shards"), [("rowwise", 1), ("tensorwise", 1), ("tensorwise", 2)])
def test_int8_scales_changed_between_gather_and_use_change_nothing(recipe: Any, shards: int) -> None:
    weight = ShardedWeight(torch.randn(32, 64), recipe)

    def gather(tensor: torch.Tensor, out: Any = None) -> Any:
        weight.tensor = tensor
        weight.scale_inverse = (tensor.abs().amax() / 127).view(1, 1) if shards > 1 else None
        sent, metadata = weight.fsdp_pre_all_gather(Shards(shards), *UNREAD)
        if weight.scale_inverse is not None:
            weight.scale_inverse = 7 * weight.scale_inverse  # the next step's
        if out is not None:  # FSDP2 reuses its memory
            out.row_data.copy_(sent[0])
        made = weight.fsdp_post_all_gather(sent, metadata, torch.bfloat16, out=out)
        return out if made is None else made[0]

    first, second = torch.randn(32, 64), 5 * torch.randn(32, 64)
    gathered = gather(first)
    assert (gathered.dequantize_all() - first).abs().max() < 0.03
    kept = gathered.detach()  # as saved for the backward pass, before which it is gathered again
    gather(second, out=gathered)
    for whole in (gathered, kept):
        assert (whole.dequantize_all() - second).abs().max() < 0.15
        assert (whole.by_columns().dequantize() - second).abs().max() < 0.15


def test_compiled_it_is_one_graph_and_compiles_again_only_when_scales_are_known() -> None:
    eager, compiled = Trained(), Trained()
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled.forward = torch.compile(compiled.model, fullgraph=True, backend=count)
    for step in range(4):
        for trained in (eager, compiled):
            trained.step(1.0 + step, 2.0)
        assert len(graphs) == min(1 + step, 2)
        assert torch.equal(eager.first.history, compiled.first.history)


@pytest.mark.full
def test_inductor_records_in_forward_and_backward() -> None:
    eager, compiled = Trained(), Trained()
    compiled.forward = torch.compile(compiled.model, fullgraph=True)
    for _ in range(2):
        for trained in (eager, compiled):
            trained.step(1.0, 3.0)
    torch.testing.assert_close(compiled.first.history, eager.first.history, rtol=0.02, atol=0)
    assert (compiled.first.history[:, :2] > 0).all()


def test_recomputed_activations_have_the_same_scales_and_amaxes() -> None:
    plain, recomputed = Trained(), Trained()
    recomputed.forward = lambda x: checkpoint(recomputed.model, x, use_reentrant=False)
    results = []
    for trained in (plain, recomputed):
        trained.step(1.0)
        trained.step(2.0)
        trained.forward(trained.x).sum().backward()
        results.append([trained.first.history, *(p.grad for p in trained.model.parameters() if p.grad is not None)])
    assert_same(*results)


def test_state_goes_through_json_exactly_and_into_another_length() -> None:
    whole, resumed, longer, shorter = (Trained(delayed_history_len=n) for n in (4, 4, 6, 2))
    for size in (3.0, 1.0, 2.0):
        whole.step(size)
    state = json.loads(json.dumps(whole.converter.state_dict([whole.model])))
    for trained in (resumed, longer, shorter):
        trained.converter.load_state_dict([trained.model], state)
        assert trained.first.has_scales
    assert_same(gradients(resumed.model, resumed.x), gradients(whole.model, whole.x))
    assert longer.scale() == pytest.approx(1 / 3, rel=0.01) and shorter.scale() == pytest.approx(1 / 2)
    assert whole.model.state_dict().keys() == {"0.weight", "2.weight", "2.bias"}


def test_amaxes_of_gradients_follow_the_loss_scale() -> None:
    saved, loaded = Trained(), Trained()
    saved.step(3.0)
    state = saved.converter.state_dict([saved.model])
    assert state is not None
    loaded.converter.load_state_dict([loaded.model], state, 4.0)
    assert torch.equal(loaded.first.history, saved.first.history * torch.tensor([[1.0], [1.0], [4.0]]))


def test_layers_without_a_history_begin_with_dynamic_scales() -> None:
    whole, resumed = Trained(), Trained()
    whole.step(1.0)
    state = whole.converter.state_dict([whole.model])
    assert state is not None
    del state["2"]
    resumed.converter.load_state_dict([resumed.model], state)
    assert resumed.first.has_scales and not history_of(resumed.model[2]).has_scales
    resumed.step(1.0)
    assert history_of(resumed.model[2]).has_scales


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"recipe_name": "delayed", "enable_fsdp_float8_all_gather": True}, "enable_fsdp_float8_all_gather"),
        (
            {"recipe_name": "delayed", **{f"cast_{name}": "dynamic" for name in ("input", "weight", "grad_output")}},
            "has no delayed scales",
        ),
        ({"delayed_history_len": 4}, "float8.delayed_history_len applies only to"),
        ({"cast_weight": "delayed"}, "float8.cast_weight applies only to"),
        ({"weight_scale_freq": 4}, "float8.weight_scale_freq applies only to"),
        ({"weight_scale": "bound"}, "set float8.enable_fsdp_float8_all_gather too"),
        (
            {
                "weight_scale": "bound",
                "enable_fsdp_float8_all_gather": True,
                "precompute_float8_dynamic_scale_for_fsdp": True,
            },
            "weight_scale = bound avoids",
        ),
    ],
)
def test_keys_that_contradict_or_would_do_nothing_are_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LinearConverter(FLOAT8_SECTION, Float8(**keys), CPU)


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [(Optimizer(name="Lion"), "not Lion"), (Optimizer(beta1=0.9, beta2=0.8), r"beta1 = 0\.9 and .*beta2 = 0\.8")],
)
def test_a_bound_needs_an_optimizer_that_has_one(optimizer: Optimizer, named: str) -> None:
    config = Float8(weight_scale="bound", enable_fsdp_float8_all_gather=True)
    with pytest.raises(ConfigError, match=named):
        LinearConverter(FLOAT8_SECTION, config, Target("cpu", optimizer=optimizer))
    LinearConverter(FLOAT8_SECTION, config, Target("cpu", optimizer=Optimizer(name="Adam")))
