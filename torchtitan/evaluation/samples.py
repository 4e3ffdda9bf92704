"""What a model writes during training."""

from collections.abc import Sequence

from torchtitan.data.tokenizer import Tokenizer, require_characters
from torchtitan.evaluation.scoring import NOT_FINITE, Scorer, ShouldStop

NEW_TOKENS = 64


class Sampler:
    """Continues prompts, starts of documents, greedily, under every layout: for each new token, the whole text goes
    through the forward pass that evaluation uses, so no layout needs a key-value cache. Raises a DataError if a prompt
    is not text."""

    def __init__(self, prompts: Sequence[str], tokenizer: Tokenizer, scorer: Scorer) -> None:
        for prompt in prompts:
            require_characters(prompt, "validation.sample_prompts")
        self.prompts = prompts
        self._tokenizer = tokenizer
        self._scorer = scorer

    def samples(self, should_stop: ShouldStop = lambda: False) -> list[tuple[str, str | None]] | None:
        """Each prompt and its continuation, up to the end of the document or NEW_TOKENS tokens; None for one where the
        model's logits are not finite. None if the run is to stop before. Collective."""
        tokenizer = self._tokenizer
        begin = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        prompts = [tokenizer.encode(prompt) for prompt in self.prompts]
        new: list[list[int]] = [[] for _ in prompts]
        for _ in range(NEW_TOKENS):
            going = [row for row, ids in enumerate(new) if {*tokenizer.stop_ids, NOT_FINITE}.isdisjoint(ids)]
            if not going:
                break
            chosen = self._scorer.next_tokens([[begin, *prompts[row], *new[row]] for row in going], should_stop)
            if chosen is None:
                return None
            for row, token in zip(going, chosen, strict=True):
                new[row].append(token)
        return [
            (
                text,
                None
                if NOT_FINITE in ids
                else tokenizer.decode_after(prompt, [token for token in ids if token not in tokenizer.stop_ids]),
            )
            for text, prompt, ids in zip(self.prompts, prompts, new, strict=True)
        ]
