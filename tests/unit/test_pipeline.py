"""How layers are divided into stages, and stages among ranks."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan.config.system import Parallelism
from torchtitan.models import MODELS
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.parallel.pipeline import (
    OF_CSV,
    find_first_layers,
    first_layers,
    layer_costs,
    pipeline_stage_numbers,
    split_pipeline_stages,
)

ARGS = LlamaArgs(dim=32, n_layers=6, n_heads=4, n_kv_heads=4, ffn_dim=64, vocab_size=64)


@pytest.mark.parametrize(
    ("costs", "stages", "expected"),
    [
        ([1, 1, 1, 1], 2, [0, 2]),
        ([1, 1, 1, 3], 2, [0, 3]),  # the output layer counts as two layers
        ([1, 1, 1, 1, 1, 1, 1, 2], 4, [0, 2, 4, 6]),
        ([5, 1, 1, 1], 3, [0, 1, 2]),
        ([1, 1, 1], 3, [0, 1, 2]),
        ([1, 1], 1, [0]),
    ],
)
def test_the_dearest_stage_is_as_cheap_as_can_be(costs: list[float], stages: int, expected: list[int]) -> None:
    firsts = first_layers(costs, stages)
    ends = [*firsts[1:], len(costs)]
    dearest = max(sum(costs[first:end]) for first, end in zip(firsts, ends, strict=True))
    ends = [*expected[1:], len(costs)]
    assert dearest == max(sum(costs[first:end]) for first, end in zip(expected, ends, strict=True))
    assert len(firsts) == stages and firsts == sorted(set(firsts)) and firsts[0] == 0


def test_many_layers_are_divided_in_no_time() -> None:
    assert len(first_layers([1.0] * 126, 64)) == 64


def test_stages_by_key() -> None:
    def firsts(**keys: Any) -> list[int]:
        return find_first_layers(Parallelism(pipeline_parallel_degree=2, **keys), [1.0] * 6)

    assert firsts() == [0, 3]
    assert len(firsts(pipeline_parallel_schedule="Interleaved1F1B")) == 4
    assert firsts(pipeline_parallel_split_points=["layers.1"]) == [0, 1]
    assert firsts(pipeline_parallel_layers_per_stage=4) == [0, 4]
    assert firsts(pipeline_parallel_split_points=["layers.0", "layers.3", "norm"]) == [0, 0, 3, 6]


def test_the_ends_of_the_model_may_be_stages_of_their_own() -> None:
    def firsts(layers: int, **keys: Any) -> list[int]:
        four = Parallelism(pipeline_parallel_degree=4, pipeline_parallel_schedule="Interleaved1F1B", **keys)
        return find_first_layers(four, [1.0] * layers)

    assert firsts(8) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert firsts(7) == [0, 1, 2, 3, 4, 5, 6, 7]  # only the output layer in the last of the 8 stages
    assert firsts(6) == [0, 0, 1, 2, 3, 4, 5, 6]  # and only the embedding in the first
    assert firsts(6, pipeline_parallel_layers_per_stage=1) == firsts(6)


def test_a_csv_file_says_how_many_stages_there_are(tmp_path: Path) -> None:
    (tmp_path / "schedule.csv").write_text("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n")
    for name in OF_CSV:
        parallelism = Parallelism(
            pipeline_parallel_degree=2,
            pipeline_parallel_schedule=name,
            pipeline_parallel_schedule_csv=str(tmp_path / "schedule.csv"),
        )
        assert find_first_layers(parallelism, [1.0] * 4) == [0, 1, 2, 3]


def test_stages_over_ranks() -> None:
    assert [pipeline_stage_numbers(rank, 2, 4, "Interleaved1F1B") for rank in range(2)] == [[0, 2], [1, 3]]
    assert [pipeline_stage_numbers(rank, 2, 4, "ZBVZeroBubble") for rank in range(2)] == [[0, 3], [1, 2]]
    assert pipeline_stage_numbers(3, 4, 4, "1F1B") == [3]


def test_the_output_layer_counts() -> None:
    with torch.device("meta"):
        costs = layer_costs(Llama(ARGS), seq_len=128)
    assert costs[:5] == [costs[0]] * 5
    assert costs[5] - costs[0] == ARGS.dim * 64
    assert costs[0] == 4 * 32 * 32 + 3 * 32 * 64 + 32 * 128


def test_only_the_experts_that_a_token_uses_count() -> None:
    args = MODELS.get("qwen3_moe").flavor("debugmodel")
    with torch.device("meta"):
        costs = layer_costs(MODELS.get("qwen3_moe").build(dataclasses.replace(args, vocab_size=64)), seq_len=128)
    attention = 256 * (8 + 4 + 4 + 8) * 64 + 8 * 64 * 128
    assert costs[0] == attention + 256 * 8 + 2 * 3 * 256 * 384  # of 8 experts 2


def test_values_narrower_than_keys_cost_less() -> None:
    args = MODELS.get("deepseek_v3").flavor("debugmodel")
    with torch.device("meta"):
        costs = layer_costs(MODELS.get("deepseek_v3").build(dataclasses.replace(args, vocab_size=64)), seq_len=128)
    latents = 256 * 128 + 128 * 4 * 96 + 256 * (64 + 32) + 64 * 4 * (64 + 64) + 4 * 64 * 256
    attention = latents + 4 * (96 + 64) // 2 * 128
    assert costs[0] == attention + 3 * 256 * 768
    assert costs[1] == attention + 256 * 8 + 3 * 3 * 256 * 256  # of 8 experts 2, and a shared one


def test_a_stage_shares_its_modules_with_the_model_under_their_names() -> None:
    model = Llama(ARGS)
    whole = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    stages = split_pipeline_stages(model, [0, 2, 4, 5], [0, 3])
    of_stages = [dict(stage.named_parameters()) for stage in stages.values()]
    assert of_stages[0].keys().isdisjoint(of_stages[1])
    assert {**of_stages[0], **of_stages[1]}.keys() == dict(model.named_parameters()).keys()
    assert all(whole[name] == p.data_ptr() for stage in of_stages for name, p in stage.items())
    assert {name.split(".")[1] for name in of_stages[0] if name.startswith("layers")} == {"0", "1"}
    assert "output.weight" in of_stages[1] and "tok_embeddings.weight" in of_stages[0]


def test_stages_one_after_the_other_are_the_model() -> None:
    tokens, labels = torch.randint(64, (2, 16)), torch.randint(64, (2, 16))
    model = Llama(ARGS)
    expected = model(tokens, labels)
    stages = split_pipeline_stages(model, [0, 2, 4], [0, 1, 2])
    h = tokens
    for number, stage in stages.items():
        h = stage(h, labels if number == 2 else None)
    torch.testing.assert_close(h, expected)
