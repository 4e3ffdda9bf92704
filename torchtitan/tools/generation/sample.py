"""Generates tokens that follow a prompt."""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention import sdpa_kernel

from torchtitan.kernels.attention_gpu import WITHOUT_CUDNN
from torchtitan.logging import Waiting
from torchtitan.protocols import Decoder
from torchtitan.tools.generation.cache import cached

MOST = 1 << 20  # new tokens of a text, and samples of a prompt
BATCH_BYTES = 1 << 30  # bound on the keys and values of a batch, with the mask of its padding
MASK_BYTES = 5  # per pair of positions: bool, and float32 inside torch's attention


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled.

    Attributes:
        max_new_tokens: limit, unless the document ends earlier.
        temperature: divides the logits; 0 picks the most likely token.
        top_k: sample only from this many most likely tokens; 0: all.
        top_p: sample only from the most likely tokens with this total probability (nucleus sampling, arXiv 1904.09751);
            1: all.
        seed: decides, with the prompt's tokens and the number of the sample, what is drawn.
        num_samples: texts of each prompt.
    """

    max_new_tokens: int = 100
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    num_samples: int = 1

    def __post_init__(self) -> None:
        """Raises a ValueError that names the flag of a value that is out of range."""
        for flag, value, fits, range_ in (
            ("max-new-tokens", self.max_new_tokens, 1 <= self.max_new_tokens <= MOST, f"1 to {MOST:,}"),
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 or above"),
            ("top-k", self.top_k, self.top_k >= 0, "0 (all) or above"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("seed", self.seed, -(2**63) <= self.seed < 2**64, "a 64-bit integer"),
            (
                "num-samples",
                self.num_samples,
                self.num_samples == 1 or (1 < self.num_samples <= MOST and self.temperature),
                f"1, or with --temperature above 0 at most {MOST:,}",
            ),
        ):
            if not fits:
                raise ValueError(f"--{flag} must be {range_}, not {value}")

    def choose(self, logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """(batch, vocab) logits -> (batch,) int64 tokens. uniform: (batch,) float64 random numbers in [0, 1), one for
        the choice in each row."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float()
        # The largest becomes 0, so that no temperature makes it infinite.
        logits = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, torch.finfo(torch.float32).tiny)
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            ordered, places = logits.sort(descending=True)
            probabilities = ordered.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities  # total probability of the more likely tokens
            logits = logits.scatter(-1, places, ordered.masked_fill(before >= self.top_p, -torch.inf))
        cumulative = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
        cumulative = cumulative / cumulative[:, -1:]  # ends with 1, which no random number reaches
        return torch.searchsorted(cumulative, uniform[:, None], right=True)[:, 0]


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    stop_ids: Collection[int],
    use_cache: bool = True,
    emit: Callable[[int, int], None] | None = None,
) -> list[list[int] | None]:
    """New tokens for each sample of each prompt, in this order, up to and including the first of `stop_ids`. None where
    the model's logits are not finite, as with weights that are NaN: no token follows from them.

    A text depends on its prompt, the number of its sample and `sampling`; the other prompts change only how its logits
    are rounded. `BATCH_BYTES` bounds a batch.

    Args:
        model: one of `torchtitan.models`, not sharded.
        prompts: token ids, at least one each.
        stop_ids: end a text, such as the end-of-document token.
        use_cache: False recomputes all tokens for each new one: the same result, but slow.
        emit: receives a text's index and its new token as soon as it is sampled. Without it, progress is printed.
    """
    rows = [(list(prompt), sample) for prompt in prompts for sample in range(sampling.num_samples)]
    args, element = model.args, next(model.parameters()).element_size()
    token_bytes = 2 * args.n_layers * args.n_kv_heads * args.head_dim * element
    batches = split_batches([len(prompt) + sampling.max_new_tokens for prompt, _ in rows], token_bytes)
    texts: dict[int, list[int] | None] = {}
    for batch in Waiting.over(batches, "generating", "batches") if emit is None else batches:
        texts.update(_generate_batch(model, {row: rows[row] for row in batch}, sampling, stop_ids, use_cache, emit))
    return [texts[row] for row in range(len(rows))]


def split_batches(lengths: Sequence[int], token_bytes: int) -> list[list[int]]:
    """Indices of rows, in batches of similar lengths (the longest at most twice the shortest), which `BATCH_BYTES`
    bounds unless a row alone needs more. lengths: tokens of rows. token_bytes: of a token's keys and values."""
    batches: list[list[int]] = []
    most = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not batches or len(batches[-1]) >= most or 2 * lengths[row] < lengths[batches[-1][0]]:
            batches.append([])
            most = BATCH_BYTES // (lengths[row] * (token_bytes + MASK_BYTES * lengths[row]))
        batches[-1].append(row)
    return batches


def _generate_batch(
    model: Decoder,
    rows: dict[int, tuple[list[int], int]],
    sampling: Sampling,
    stop_ids: Collection[int],
    use_cache: bool,
    emit: Callable[[int, int], None] | None,
) -> dict[int, list[int] | None]:
    """As `generate`, for rows (prompt, number of the sample) by the index of their text."""
    device = next(model.parameters()).device
    prompts = [prompt for prompt, _ in rows.values()]
    # Each row has its own random numbers, which the text of the seed, sample and prompt decides.
    streams = [random.Random(f"{sampling.seed} {sample} {prompt}") for prompt, sample in rows.values()]
    longest = max(map(len, prompts))
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    # Rows are right-aligned. Left padding is harmless: rotary attention depends only on distances.
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    stops = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    failed = torch.zeros_like(ended)
    new: dict[int, list[int]] = {row: [] for row in rows}
    with sdpa_kernel(WITHOUT_CUDNN), cached(model, longest + sampling.max_new_tokens, padding) as cache:
        given = tokens
        for _ in range(sampling.max_new_tokens):
            if not use_cache:
                cache.filled, given = 0, tokens
            model.positions = torch.arange(cache.filled, cache.filled + given.shape[1], device=device)
            logits = model(given)[:, -1]
            cache.filled += given.shape[1]
            failed |= ~ended & ~logits.amax(-1).isfinite()  # NaN if any is
            ended |= failed
            uniform = torch.tensor([stream.random() for stream in streams], dtype=torch.float64, device=device)
            chosen = sampling.choose(logits.masked_fill(failed[:, None], 0), uniform)
            tokens = torch.cat([tokens, chosen[:, None]], dim=1)
            given = chosen[:, None]
            for row, id, end in zip(rows, chosen.tolist(), ended.tolist(), strict=True):
                if not end:
                    new[row].append(id)
                    if emit is not None:
                        emit(row, id)
            ended |= torch.isin(chosen, stops)
            if ended.all():
                break
    return {row: None if fails else new[row] for row, fails in zip(rows, failed.tolist(), strict=True)}
