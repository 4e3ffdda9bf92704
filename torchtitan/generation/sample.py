"""Generates tokens that follow a prompt."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention import sdpa_kernel

from torchtitan.generation.cache import cached
from torchtitan.kernels.attention_gpu import ANY_LENGTH
from torchtitan.protocols import Decoder

MOST_TOKENS = 1 << 20


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled.

    Attributes:
        max_new_tokens: limit, unless the document ends earlier.
        temperature: divides the logits; 0 picks the most likely token.
        top_k: sample only from this many most likely tokens; 0: all.
        top_p: sample only from the most likely tokens with this total probability (nucleus sampling, arXiv 1904.09751);
            1: all.
    """

    max_new_tokens: int = 100
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises a ValueError that names the flag of a value that is out of range."""
        for flag, value, fits, range_ in (
            ("max-new-tokens", self.max_new_tokens, 1 <= self.max_new_tokens <= MOST_TOKENS, f"1 to {MOST_TOKENS:,}"),
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 or above"),
            ("top-k", self.top_k, self.top_k >= 0, "0 (all) or above"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("seed", self.seed, -(2**63) <= self.seed < 2**64, "a 64-bit integer"),
        ):
            if not fits:
                raise ValueError(f"--{flag} must be {range_}, not {value}")

    def choose(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """(batch, vocab) logits -> (batch,) int64 tokens."""
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
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    stop_ids: Collection[int],
    use_cache: bool = True,
    emit: Callable[[list[int | None]], None] | None = None,
) -> list[list[int] | None]:
    """New tokens for each prompt, up to and including the first of `stop_ids`. None where the model's logits are not
    finite, as with weights that are NaN: no token follows from them.

    Args:
        model: one of `torchtitan.models`, not sharded.
        prompts: token ids, at least one each.
        stop_ids: end a row, such as the end-of-document token.
        use_cache: False recomputes all tokens for each new one: the same result, but slow.
        emit: receives each row's new token as soon as it is sampled; None for finished rows.
    """
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    # Rows are right-aligned. Left padding is harmless: rotary attention depends only on distances.
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    stops = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)
    generator = torch.Generator(device).manual_seed(sampling.seed)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    failed = torch.zeros_like(ended)
    new: list[list[int]] = [[] for _ in prompts]
    with sdpa_kernel(ANY_LENGTH), cached(model, longest + sampling.max_new_tokens, padding) as cache:
        given = tokens
        for _ in range(sampling.max_new_tokens):
            if not use_cache:
                cache.filled, given = 0, tokens
            model.positions = torch.arange(cache.filled, cache.filled + given.shape[1], device=device)
            logits = model(given)[:, -1]
            cache.filled += given.shape[1]
            failed |= ~ended & ~logits.amax(-1).isfinite()  # NaN if any is
            ended |= failed
            chosen = sampling.choose(logits.masked_fill(failed[:, None], 0), generator)
            tokens = torch.cat([tokens, chosen[:, None]], dim=1)
            given = chosen[:, None]
            row = [None if end else id for id, end in zip(chosen.tolist(), ended.tolist(), strict=True)]
            for ids, id in zip(new, row, strict=True):
                ids += [] if id is None else [id]
            if emit is not None:
                emit(row)
            ended |= torch.isin(chosen, stops)
            if ended.all():
                break
    return [None if fails else ids for ids, fails in zip(new, failed.tolist(), strict=True)]
