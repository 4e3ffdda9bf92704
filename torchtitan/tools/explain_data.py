"""What a run trains on: `python -m torchtitan.tools.explain --data` prints a batch, with the tokens that count."""

import itertools

from torchtitan.config import JobConfig
from torchtitan.data import Batch, Tokenizer, build_loader, load_tokenizer
from torchtitan.engine.model_args import register_models
from torchtitan.engine.stages import parse_stages
from torchtitan.errors import printable
from torchtitan.protocols import IGNORE_INDEX

OPEN, CLOSE = "\u27e6", "\u27e7"


def explain_data(config: JobConfig) -> None:
    """Prints the first global batch of each stage as one process reads it, row by row."""
    register_models(config)
    for stage in parse_stages(config):
        training = stage.config.training
        with stage.named_in_errors():
            tokenizer = load_tokenizer(stage.config.model.tokenizer_path, training.add_bos, training.add_eos)
            loader = build_loader(
                training,
                tokenizer,
                dp_rank=0,
                dp_size=1,
                global_batch_size=training.sequences_per_step(1),
                hold_out=stage.config.validation.enabled and stage.config.validation.dataset_path is None,
                prefetch=1,
            )
            batches = loader.next()
            loader.close()
        print(f"{stage.title}, from step {stage.first_step}" if stage.title else loader.description)
        counted = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)
        for number, row in enumerate(row for batch in batches for row in _rows(batch, tokenizer)):
            print(f"--- row {number + 1}\n{row}")
        print(f"--- {counted:,} of {sum(batch.labels.numel() for batch in batches):,} tokens count")


def _rows(batch: Batch, tokenizer: Tokenizer) -> list[str]:
    """The text of each row, with brackets around what no label predicts, or has no place in the loss."""
    rows = []
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        counts = [False, *(label != IGNORE_INDEX for label in labels)]  # the last token is a label alone
        marked = zip([*tokens, *(label for label in labels[-1:] if label >= 0)], counts, strict=False)
        runs = [
            (counts, [id for id, _ in run]) for counts, run in itertools.groupby(marked, key=lambda token: token[1])
        ]
        texts = [(counts, printable(tokenizer.decode(ids))) for counts, ids in runs]
        rows.append("".join(text if counts else f"{OPEN}{text}{CLOSE}" for counts, text in texts))
    return rows
