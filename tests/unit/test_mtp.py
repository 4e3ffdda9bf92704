"""Multi-token prediction: by hand in float64, what it reads and predicts, and what has no place for it."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from runs import TINY as TINY_RUN
from runs import into, lines_of, losses, python, tensors_of, train_here
from safetensors.torch import load_file
from tiny import CAPPED, TINY, nontrivial
from torch import nn

from torchtitan.config.training import Training
from torchtitan.errors import ConfigError
from torchtitan.models import MODELS, ModelSpec
from torchtitan.models.llama.model import Llama
from torchtitan.models.mtp import MTPTransformer, add_mtp, mtp_flops, mtp_inputs
from torchtitan.models.parallelize import parallelize
from torchtitan.models.parametrization import mup
from torchtitan.protocols import IGNORE_INDEX


class Own(nn.Module):
    """A user's model, which computes its own loss."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        self.args, self.tok_embeddings, self.layers = args, nn.Embedding(args.vocab_size, args.dim), nn.ModuleDict()


MODELS.register("own", ModelSpec({"narrow": TINY}, build=cast(Any, Own)))
ARGS = replace(TINY, dim=32, ffn_dim=48, vocab_size=53)
COEFFICIENT = 0.3
# Documents in the 21 tokens of each row, of which the last one is only a label.
LENGTHS = [(5, 1, 2, 13), (18, 3)]
TOKENS = torch.randint(53, (2, 21), generator=torch.Generator().manual_seed(2))
DOCUMENTS = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS])
LABELS = TOKENS[:, 1:].clone()


def with_mtp(depths: int, args: Any = ARGS) -> MTPTransformer:
    model: Any = Llama(args)
    add_mtp(model, Training(mtp_layers=depths, mtp_loss_coefficient=COEFFICIENT), parallelize)
    assert isinstance(model, MTPTransformer)
    return nontrivial(model)


def by_hand(weights: dict[str, torch.Tensor], depths: int) -> list[torch.Tensor]:
    """The summed cross-entropy of the next token, and that of each depth, from the formulas of the paper, for one
    document after the other."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + ARGS.norm_eps).rsqrt() * weights[f"{name}.weight"]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        half = ARGS.head_dim // 2
        angles = torch.arange(len(x))[:, None] * ARGS.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
        turned = (
            torch.view_as_complex(x.unflatten(-1, (half, 2))) * torch.polar(torch.ones_like(angles), angles)[:, None]
        )
        return torch.view_as_real(turned).flatten(-2)

    def block(x: torch.Tensor, name: str) -> torch.Tensor:
        of = {end: weights[f"{name}.{end}.weight"].T for end in (
            "attention.wq", "attention.wk", "attention.wv", "attention.wo",
            "feed_forward.w1", "feed_forward.w2", "feed_forward.w3",
        )}  # fmt: skip
        normal = norm(x, f"{name}.attention_norm")
        q, k, v = ((normal @ of[f"attention.{w}"]).unflatten(-1, (-1, ARGS.head_dim)) for w in ("wq", "wk", "wv"))
        q, k = rotated(q), rotated(k)
        k, v = (each.repeat_interleave(ARGS.n_heads // ARGS.n_kv_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / ARGS.head_dim**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        x = x + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ of["attention.wo"]
        normal = norm(x, f"{name}.ffn_norm")
        gate = normal @ of["feed_forward.w1"]
        return x + (gate * gate.sigmoid() * (normal @ of["feed_forward.w3"])) @ of["feed_forward.w2"]

    def loss(h: torch.Tensor, name: str, targets: torch.Tensor) -> torch.Tensor:
        log_probabilities = (norm(h[: len(targets)], name) @ weights["output.weight"].T).log_softmax(-1)
        return -log_probabilities[torch.arange(len(targets)), targets].sum()

    losses = [torch.zeros((), dtype=torch.float64) for _ in range(1 + depths)]
    for row, lengths in zip(TOKENS, LENGTHS, strict=True):
        start = 0
        for length in lengths:
            document, after = row[start : start + length], row[start + length : start + length + 1]
            start += length
            inputs = document if len(after) else document[:-1]  # the last token of a row is only a label
            h = weights["tok_embeddings.weight"][inputs]
            for layer in range(ARGS.n_layers):
                h = block(h, f"layers.{layer}")
            losses[0] = losses[0] + loss(h, "norm", torch.cat([document, after])[1:])
            for depth in range(1, 1 + depths):
                name, targets = f"mtp.{depth - 1}", document[depth + 1 :]
                if not len(targets):
                    break
                h = h[: len(targets)]
                embedded = weights["tok_embeddings.weight"][document[depth : depth + len(targets)]]
                both = torch.cat([norm(embedded, f"{name}.enorm"), norm(h, f"{name}.hnorm")], -1)
                h = block(both @ weights[f"{name}.eh_proj.weight"].T, f"{name}.block")
                losses[depth] = losses[depth] + loss(h, f"{name}.norm", targets)
    return losses


@pytest.mark.parametrize("depths", [1, 2])
def test_losses_and_gradients_are_those_of_the_formulas(depths: int) -> None:
    """With documents: in float64, every parameter's."""
    model = with_mtp(depths)
    inputs = mtp_inputs(TOKENS, LABELS, DOCUMENTS, depths)
    loss = model(TOKENS[:, :-1], LABELS, document_ids=DOCUMENTS[:, :-1], **inputs)
    (loss / 7).backward()
    weights = {name: weight.detach().double().requires_grad_() for name, weight in model.named_parameters()}
    next_token, *further = by_hand(weights, depths)
    torch.testing.assert_close(loss.double(), next_token, rtol=1e-5, atol=0)
    targets = sum(max(0, length - 1 - depth) for row in LENGTHS for length in row for depth in range(1, depths + 1))
    total = torch.stack(further).sum()
    torch.testing.assert_close(
        model.mtp_losses[0].double(), torch.stack([total, torch.tensor(targets)]), rtol=1e-5, atol=0
    )
    ((next_token + COEFFICIENT * torch.stack(further).mean()) / 7).backward()
    for name, parameter in model.named_parameters():
        expected, actual = weights[name].grad, parameter.grad
        assert expected is not None and actual is not None, name
        assert expected.norm() > 0 and (actual - expected).norm() < 1e-5 * expected.norm(), name


def test_tokens_and_targets_are_ahead_and_in_the_same_document() -> None:
    """Padding and targets that do not count end a document as well. A position that has no loss at one depth has none
    at greater ones."""
    tokens = torch.tensor([[10, 11, 12, 20, 21, 22, 23, 24, 25]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    labels = tokens[:, 1:].clone()
    labels[0, 4] = IGNORE_INDEX  # 22 is not predicted
    inputs = mtp_inputs(tokens, labels, documents, 3)
    no = IGNORE_INDEX
    assert inputs["mtp_tokens"][0].tolist() == [
        [11, 12, 20, 21, 22, 23, 24, 0],
        [12, 20, 21, 22, 23, 24, 0, 0],
        [20, 21, 22, 23, 24, 0, 0, 0],
    ]
    assert inputs["mtp_labels"][0].tolist() == [
        [12, no, no, no, no, 24, 25, no],
        [no, no, no, no, no, 25, no, no],
        [no, no, no, no, no, no, no, no],
    ]


def test_without_further_inputs_a_model_is_what_it_is_without_these_layers() -> None:
    """As in evaluation and generation; its logits are capped as before, too."""
    args = replace(CAPPED, vocab_size=53)
    model = with_mtp(2, args)
    alone = Llama(args)
    alone.load_state_dict({name: weight for name, weight in model.state_dict().items() if name[:3] != "mtp"})
    tokens = TOKENS[:, :-1]
    assert torch.equal(model(tokens), alone(tokens)) and torch.equal(model(tokens, LABELS), alone(tokens, LABELS))
    assert model.mtp_losses == []


def test_parameters_and_flops_are_counted() -> None:
    """A layer has a block like those of the model, three norms and a projection; the output layer runs once more."""
    model, alone = with_mtp(2), Llama(ARGS)
    more = sum(weight.numel() for weight in model.parameters()) - sum(weight.numel() for weight in alone.parameters())
    block = sum(weight.numel() for weight in alone.layers["0"].parameters())
    assert more == 2 * (block + 3 * 32 + 2 * 32 * 32)
    assert mtp_flops(model, 20) == 2 * (6 * 53 * 32 + 12 * 32 * 20)
    assert model.passes(20) == {"output": 3}
    for name, weight in model.named_parameters():
        assert isinstance(model.init_std(name), float) == (weight.ndim == 2), name


def test_mup_scales_the_blocks_like_others_and_the_projection_by_width_alone() -> None:
    """Twice as wide, and twice as deep, as the base model."""
    factors = mup(with_mtp(1, replace(ARGS, dim=64, ffn_dim=96, n_heads=8, n_layers=4)), with_mtp(1))
    for name in ("attention.wq", "attention.wo", "feed_forward.w2", "ffn_norm"):
        of_block, of_layer = factors[f"mtp.0.block.{name}.weight"], factors[f"layers.3.{name}.weight"]
        assert (
            (of_block.adamw, of_block.muon, of_block.eps) == (of_layer.adamw, of_layer.muon, of_layer.eps) != (1, 1, 1)
        )
    projection = factors["mtp.0.eh_proj.weight"]
    assert (projection.adamw, projection.muon, projection.eps) == pytest.approx((0.5, 0.5**0.5, 0.5))
    assert {factors[f"mtp.0.{name}.weight"] for name in ("enorm", "hnorm", "norm")} == {factors["norm.weight"]}


def test_a_model_with_a_forward_pass_of_its_own_is_refused() -> None:
    class Special(Llama):
        def forward(self, *inputs: Any) -> torch.Tensor:
            return super().forward(*inputs)

    with pytest.raises(
        ConfigError, match=r"training\.mtp_layers: Special has a forward pass or a `parallelize` of its own"
    ):
        add_mtp(Special(ARGS), Training(mtp_layers=1), parallelize)
    with pytest.raises(ConfigError, match=r"training\.mtp_layers: Llama has a forward pass or a `parallelize`"):
        add_mtp(Llama(ARGS), Training(mtp_layers=1), lambda model: None)


def test_what_cannot_work_ends_a_run_before_it_begins() -> None:
    for flags, message in (
        (["--training.mtp_layers=64"], r"training\.mtp_layers = 64 is not less than training\.seq_len; lower it\."),
        (
            ["--model.name=own", "--training.z_loss_coefficient=1"],
            r"z_loss_coefficient: own computes a loss of its own",
        ),
        (["--model.name=own", "--training.mtp_layers=1"], r"training\.mtp_layers: Own has a forward pass or"),
    ):
        with pytest.raises(ConfigError, match=message):
            train_here(*TINY_RUN, *flags)


def test_a_run_reports_the_loss_and_its_weights_serve_runs_with_and_without_the_layers(tmp_path: Path) -> None:
    """Its export and its checkpoint hold the model alone, for whoever wants no more."""
    run = tmp_path / "run"
    flags = (*TINY_RUN, "--training.steps=2", "--training.document_mask")
    mtp = ("--training.mtp_layers=1", "--training.mtp_loss_coefficient=0.5")
    saved = ("--checkpoint.enable_checkpoint", "--checkpoint.last_save_in_hf", "--validation.enabled")
    low_precision = ("--model.converters=int8", "--training.mixed_precision_param=bfloat16")
    train_here(*flags, *mtp, *saved, *low_precision, "--validation.steps=1", "--validation.freq=2", into(run))
    reports = [line for line in lines_of(run / "metrics.jsonl") if "mtp_loss" in line]
    assert [math.log(4096) == pytest.approx(line["mtp_loss"], abs=0.3) for line in reports] == [True, True]
    checkpoint = run / "checkpoint" / "step-2"
    assert {name[:3] for name in tensors_of(run, 2) if "optimizer" not in name} == {"tok", "lay", "nor", "out", "mtp"}

    exported = python("-m", "torchtitan.tools.convert", "to-hf", checkpoint, tmp_path / "hf", "--custom-import=tiny")
    assert "without its layers of multi-token prediction" in exported.stdout, exported.stderr
    weights, of_run = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", run / "checkpoint/step-2-hf")
    )
    assert weights.keys() == of_run.keys() and not any("mtp" in name or "layers.2" in name for name in weights)

    load = "--checkpoint.initial_load_path="
    without = (*flags, "--training.mtp_layers=0", "--checkpoint.enable_checkpoint", load + str(checkpoint))
    train_here(*without, into(tmp_path / "without"))
    begins = (*flags, *mtp, "--checkpoint.enable_checkpoint", load + str(tmp_path / "hf"))
    train_here(*begins, into(tmp_path / "begins"))
    first = [losses(tmp_path / name)[1] for name in ("without", "begins")]
    assert first[0] == pytest.approx(first[1], rel=1e-2)
    projection = tensors_of(tmp_path / "begins", 2)["mtp.0.eh_proj.weight"]
    assert float(projection.std()) == pytest.approx(128**-0.5, rel=0.1)  # initialized, although weights were loaded
    begun = lines_of(tmp_path / "begins" / "metrics.jsonl")[0]
    assert begun["mtp_loss"] == pytest.approx(math.log(4096), abs=0.3)
