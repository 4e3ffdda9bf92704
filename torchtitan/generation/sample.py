"""Tokens that follow a prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from torchtitan.generation.cache import cached


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        max_new_tokens: the end, where none comes before.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: only the likeliest so many; 0: all.
        top_p: only the likeliest that together have this probability (nucleus sampling, arXiv 1904.09751); 1: all.
        seed: of the random choice.
    """

    max_new_tokens: int = 100
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a value is out of range; with the name of its flag.
        """
        for flag, value, fits, range_ in (
            ("max-new-tokens", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 or above"),
            ("top-k", self.top_k, self.top_k >= 0, "0 (all) or above"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not fits:
                raise ValueError(f"--{flag} must be {range_}, not {value}")

    def choose(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """(batch,) int64, of (batch, vocab) logits."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            ordered, places = logits.sort(descending=True)
            probabilities = ordered.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities  # of the likelier ones
            logits = logits.scatter(-1, places, ordered.masked_fill(before >= self.top_p, -torch.inf))
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


@torch.inference_mode()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    eos_id: int,
    use_cache: bool = True,
    emit: Callable[[list[int | None]], None] | None = None,
) -> list[list[int]]:
    """New tokens for each prompt, up to and with the one that ends a document.

    Args:
        model: one of `torchtitan.models`, not divided over processes.
        prompts: token ids, at least one each.
        use_cache: False computes all tokens anew for each new one: the same, and slow.
        emit: gets each row's new token as soon as it is there; None for rows that have ended.
    """
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    # Rows end together. Padding at their left is harmless: rotary attention depends on distances alone.
    tokens = torch.tensor([[eos_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    generator = torch.Generator(device).manual_seed(sampling.seed)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    new: list[list[int]] = [[] for _ in prompts]
    with cached(model, longest + sampling.max_new_tokens, padding) as cache:
        given = tokens
        for _ in range(sampling.max_new_tokens):
            if not use_cache:
                cache.filled, given = 0, tokens
            model.positions = torch.arange(cache.filled, cache.filled + given.shape[1], device=device)  # type: ignore[assignment]
            logits = model(given)[:, -1]
            cache.filled += given.shape[1]
            chosen = sampling.choose(logits, generator)
            tokens = torch.cat([tokens, chosen[:, None]], dim=1)
            given = chosen[:, None]
            row = [None if end else id for id, end in zip(chosen.tolist(), ended.tolist(), strict=True)]
            for ids, id in zip(new, row, strict=True):
                ids += [] if id is None else [id]
            if emit is not None:
                emit(row)
            ended |= chosen == eos_id
            if ended.all():
                break
    return new
