"""Order on real GPUs: streams, the allocator and threads, with the host far ahead (`late.py`), and what needs two GPUs.
The same tests rehearse on the CPU, where only their logic is tested."""

import pytest
import torch
import torch.nn.functional as F
from place import BFLOAT16, WIDE, Place
from runs import assert_equal_bit_for_bit, tensors_of
from test_one_gpu import FLOAT8, INT8, LOW_PRECISION, ROUNDED, SAME, assert_counted, assert_follows

from torchtitan.models.loss import chunk_tokens, chunked_cross_entropy

LATE = "--experimental.custom_import=late_drawn_on_cpu"
GATHERED = {
    "bf16": [],
    "float8 tensorwise": [
        *(FLOAT8, "--float8.enable_fsdp_float8_all_gather", "--float8.precompute_float8_dynamic_scale_for_fsdp"),
    ],
    "int8 tensorwise": [INT8, "--int8.recipe_name=tensorwise", "--int8.enable_fsdp_int8_all_gather"],
}


@pytest.fixture
def two(place: Place) -> Place:
    if place.device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices are visible")
    return place


@pytest.mark.parametrize("recipe", GATHERED)
def test_two_ranks_follow_one_on_the_cpu(two: Place, recipe: str) -> None:
    flags = (BFLOAT16, LATE, *two.rows(2), *GATHERED[recipe], *two.compile)
    actual, output = two.losses(f"two, {recipe}", *flags, processes=2)
    assert_follows(actual, two, LOW_PRECISION if GATHERED[recipe] else ROUNDED)
    if GATHERED[recipe]:
        assert_counted(output)


def test_experts_over_two_ranks_follow_one_on_the_cpu(two: Place) -> None:
    experts = two.of("experts")
    flags = (BFLOAT16, LATE, *two.rows(2), "--parallelism.expert_parallel_degree=2", *two.compile)
    assert_follows(experts.losses("two", *flags, processes=2)[0], experts, LOW_PRECISION)


@pytest.mark.parametrize(
    ("shares", "dtype"), [(4, "float32"), (1, "bfloat16")], ids=["accumulation", "bfloat16 weights"]
)
def test_gradients_that_are_reduced_late_are_the_same(place: Place, shares: int, dtype: str) -> None:
    """On one GPU, where what is reduced and the sum are the same memory."""
    flags = (BFLOAT16, f"--training.weight_dtype={dtype}", *place.rows(shares))
    actual, expected = (place.losses(f"late {bool(late)} {shares}", *flags, *late)[0] for late in ([LATE], []))
    assert actual == pytest.approx(expected, rel=SAME) and actual[-1] < actual[0]


def test_the_second_gpu_alone_saves_what_it_holds(two: Place) -> None:
    """Two GiB in eight threads, of which none has that GPU as its current one."""
    start, saved = two.folder / "wide", two.folder / "wide_of_the_second"
    checkpoints = ("--checkpoint.enable_checkpoint", "--optimizer.lr=1e-30", "--training.steps=1")
    two.train(WIDE[two.device], *checkpoints, f"--job.dump_folder={start}", "--checkpoint.create_seed_checkpoint")
    load = f"--checkpoint.initial_load_path={start / 'checkpoint' / 'step-0'}"
    two.train(WIDE[two.device], *checkpoints, f"--job.dump_folder={saved}", load, LOCAL_RANK="1")
    weights = [
        {name: tensor for name, tensor in tensors_of(folder, step).items() if not name.startswith("optimizer")}
        for folder, step in ((start, 0), (saved, 1))
    ]
    assert_equal_bit_for_bit(*weights)


def test_the_loss_of_two_chunks_of_a_large_vocabulary(place: Place) -> None:
    vocabulary, dim = {"cpu": 2**15, "cuda": 2**18}[place.device], 64
    tokens = 2 * chunk_tokens(vocabulary, place.device == "cuda")
    torch.manual_seed(0)
    hidden = torch.randn(1, tokens, dim, device=place.device, dtype=torch.bfloat16, requires_grad=True)
    output = torch.nn.Linear(dim, vocabulary, bias=False, device=place.device, dtype=torch.bfloat16)
    labels = torch.randint(vocabulary, (1, tokens), device=place.device)
    loss = chunked_cross_entropy(output, output.weight, hidden, labels, linear=output.weight)
    logits = F.linear(hidden.float(), output.weight.float())
    expected = F.cross_entropy(logits[0], labels[0], reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
    for mine, true in zip(
        torch.autograd.grad(loss / tokens, [hidden, output.weight]),
        torch.autograd.grad(expected / tokens, [hidden, output.weight]),
        strict=True,
    ):
        assert (mine.float() - true.float()).norm() < 1e-2 * true.float().norm()
