"""Sample texts, which a model writes during training."""

from collections.abc import Sequence

from torchtitan.data.tokenizer import Tokenizer, require_characters
from torchtitan.tools.evaluation.requests import Continuation, Prompt
from torchtitan.tools.evaluation.scoring import NOT_FINITE, Scorer, ShouldStop

NEW_TOKENS = 64


class Sampler:
    """Continues prompts, starts of documents. Raises a DataError if a prompt is not text."""

    def __init__(self, prompts: Sequence[str], tokenizer: Tokenizer, scorer: Scorer) -> None:
        for prompt in prompts:
            require_characters(prompt, "validation.sample_prompts")
        self.prompts = prompts
        self._tokenizer = tokenizer
        self._scorer = scorer

    def samples(self, should_stop: ShouldStop = lambda: False) -> list[tuple[str, str | None]]:
        """Each prompt and its continuation, up to the end of the document or NEW_TOKENS tokens; None for one where the
        model's logits are not finite. Collective."""
        tokenizer = self._tokenizer
        begin = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        texts = [tokenizer.encode(prompt) for prompt in self.prompts]
        prompts = [Prompt([begin, *ids], NEW_TOKENS) for ids in texts]
        written = continuations(prompts, tokenizer, self._scorer, should_stop)
        return [
            (prompt, tokenizer.decode_after(ids, new.tokens) if new.is_finite else None)
            for prompt, ids, new in zip(self.prompts, texts, written, strict=True)
        ]


def continuations(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, scorer: Scorer, should_stop: ShouldStop = lambda: False
) -> list[Continuation]:
    """What the model writes after each prompt, greedily, under every layout: for each new token, the whole text goes
    through the forward pass that evaluation uses, so no layout needs a key-value cache. Collective."""
    last = {*tokenizer.stop_ids, NOT_FINITE}
    new: list[list[int]] = [[] for _ in prompts]

    def goes_on(row: int) -> bool:
        ids, prompt = new[row], prompts[row]
        if len(ids) == prompt.most or ids[-1] in last:
            return False
        return not prompt.stops or not any(stop in tokenizer.decode(ids) for stop in prompt.stops)

    going = list(range(len(prompts)))
    while going:
        chosen = scorer.next_tokens([[*prompts[row].tokens, *new[row]] for row in going], should_stop)
        for row, token in zip(going, chosen, strict=True):
            new[row].append(token)
        going = list(filter(goes_on, going))
    answers = []
    for ids, prompt in zip(new, prompts, strict=True):
        kept = [token for token in ids if token not in last]
        text = tokenizer.decode(kept)
        for stop in prompt.stops:
            text = text.split(stop)[0]
        answers.append(Continuation(kept, text, NOT_FINITE not in ids))
    return answers
