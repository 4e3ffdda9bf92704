"""A stage of longer sequences: the debug model on 128 tokens, then on 512, with YaRN, a larger theta, or neither.

python -m benchmarks long_context [--short 1000] [--long 100] [--batch 8] [--output docs/figures/long_context.png]
    [--section.key=value ...]

Loss by position in held-out text, and accuracy of the needle tasks, before and after the second stage. All runs share
the first stage: the others resume where it ends in the first. Runs in --folder are not repeated. Further flags are the
runs'.

Most documents of both stages are made to teach a model to look back: code in which a comment of some words is repeated,
after a few lines or, in the second stage, after many. It takes about 4 million tokens to learn that (docs/stages.md).
"""

import argparse
import itertools
import json
import random
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.nn.functional import cross_entropy

from benchmarks.figures import bare, label_ends, pyplot, saved
from benchmarks.loss_runs import run
from benchmarks.machine import ask
from benchmarks.runs import DEBUG_MODEL
from benchmarks.tables import markdown
from torchtitan.config.training import Evaluation, Training, Validation
from torchtitan.data.datasets import documents_of, held_out_documents
from torchtitan.data.sources import Document
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.device import find_device
from torchtitan.tools.evaluation.evaluator import Evaluator
from torchtitan.tools.evaluation.find_tasks import find_tasks
from torchtitan.tools.evaluation.scoring import scorer_of_model
from torchtitan.tools.generation.open import choose_dtype, open_model
from torchtitan.tools.interchange.convert import one_process

SHORT, LONG = 128, 512  # tokens of a sequence
TASKS = ["stdlib_needle_short", "stdlib_needle_long"]
ROPE = {
    "YaRN": f'model.rope_scaling = {{ type = "yarn", factor = {LONG / SHORT}, original = {SHORT} }}',
    "theta 50,000": "model.rope_theta = 50000.0",
    "RoPE unchanged": "",
}
STAGES = """
[[stage]]
name = "short"
until = {until}
training.dataset_mixture = {first}

[[stage]]
name = "long"
training.dataset_mixture = {second}
training.seq_len = {seq_len}
training.local_batch_size = {rows}
lr_scheduler.warmup_steps = 0
lr_scheduler.decay_ratio = 1.0
{rope}
"""
FLAGS = ["--lr_scheduler.decay_ratio=0.0", "--validation.enabled"]
FLAGS += ["--checkpoint.enable_checkpoint", "--checkpoint.interval=100000"]
CODE = {SHORT: 2, LONG: 10}  # lines between repetitions, by the length of sequences
DOCUMENTS = 8000
WINDOWS, EXAMPLES, BATCH = 64, 60, 8
BIN = 32  # positions of a point in the figure


def held_out_text() -> Iterator[Document]:
    [(_, documents)] = held_out_documents(Validation(enabled=True), Training())
    return documents


def repetitions(between: int) -> Iterator[str]:
    """Documents of a comment of some words, three times, with other lines of code in between."""
    draw, held_out = random.Random(0), {document.id for document in held_out_text()}
    texts = [document.text for document in documents_of("python_stdlib", "text") if document.id not in held_out]
    while True:
        text, count = draw.choice(texts), draw.randint(4, 16)
        lines = [line for line in text.splitlines() if line.strip()]
        names = sorted(set(re.findall(r"[A-Za-z_]\w{2,}", text)))
        if len(lines) < 2 * between or len(names) < count:
            continue
        comment = f"# {' '.join(draw.sample(names, count))}"
        start = draw.randrange(len(lines) - 2 * between + 1)
        middle = start + between
        yield "\n".join([comment, *lines[start:middle], comment, *lines[middle : middle + between], comment, ""])


def mixture(length: int, folder: Path) -> str:
    """Code, and repetitions that fit into sequences of this length; a list for TOML."""
    file = folder / f"repetitions_{length}.jsonl"
    texts = itertools.islice(repetitions(CODE[length]), DOCUMENTS)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return json.dumps(["python_stdlib:0.3", f"{file}:0.7"])


def train(short: int, long: int, batch: int, folder: Path, flags: Sequence[str]) -> dict[str, Path]:
    """The checkpoint at the end of the first stage, and at the end of each run, by name."""
    checkpoint_of: dict[str, Path] = {}
    folder.mkdir(parents=True, exist_ok=True)
    values = {"until": short, "seq_len": LONG, "first": mixture(SHORT, folder), "second": mixture(LONG, folder)}
    flags = [*FLAGS, f"--training.local_batch_size={batch}", *flags]
    for name, rope in ROPE.items():
        file = folder / f"{name.replace(' ', '_').replace(',', '')}.toml"
        file.write_text(DEBUG_MODEL.read_text() + STAGES.format(**values, rows=batch * SHORT // LONG, rope=rope))
        if checkpoint_of and not file.with_suffix("").exists():
            shutil.copytree(checkpoint_of["before"], file.with_suffix("") / "checkpoint" / checkpoint_of["before"].name)
        checkpoints = run(file.stem, [f"--job.config_file={file}", *flags], short + long, folder) / "checkpoint"
        checkpoint_of.setdefault("before", checkpoints / f"step-{short}")
        checkpoint_of[name] = checkpoints / f"step-{short + long}"
    return checkpoint_of


def windows(tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Held-out text in pieces of LONG + 1 tokens; shorter ends of documents are left out."""
    for document in held_out_text():
        tokens = tokenizer.encode(document.text)
        yield from (tokens[start : start + LONG + 1] for start in range(0, len(tokens) - LONG, LONG))


@torch.no_grad()
def measure(checkpoint: Path) -> tuple[torch.Tensor, list[float]]:
    """(LONG,) mean loss by position, and the accuracy in each of TASKS, where the model sees LONG tokens at once."""
    device = find_device(0).torch_device
    opened = open_model(checkpoint, device, choose_dtype("auto", device))
    batches = torch.tensor(list(windows(opened.tokenizer))[:WINDOWS], device=device).split(BATCH)
    of_tokens = [
        cross_entropy(opened.model(batch[:, :-1]).float().transpose(1, 2), batch[:, 1:], reduction="none")
        for batch in batches
    ]
    evaluator = Evaluator(
        find_tasks(Evaluation(tasks=TASKS, limit=EXAMPLES)),
        opened.tokenizer,
        scorer_of_model(opened.model, LONG, BATCH * LONG, str(checkpoint)),
    )
    scores = evaluator.scores()
    return torch.cat(of_tokens).mean(0).cpu(), [metrics["acc"] for metrics in evaluator.metrics(scores).values()]


def draw(losses: dict[str, torch.Tensor], output: Path) -> None:
    figure, axes = pyplot().subplots(figsize=(8, 3.6))
    figure.subplots_adjust(right=0.72, bottom=0.14)
    for name, by_position in losses.items():
        binned = by_position.view(-1, BIN).mean(1).tolist()
        places = [BIN * (index + 0.5) for index in range(len(binned))]
        axes.plot(places, binned, label=name, color="black" if name.startswith("before") else None)
    axes.axvline(SHORT, color="black", linewidth=0.5)
    axes.set(xlabel="position in the sequence, tokens", ylabel="held-out loss", xlim=(0, LONG))
    bare(axes)
    label_ends(axes)
    saved(figure, output)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", type=int, default=1000, help="steps of the first stage")
    parser.add_argument("--long", type=int, default=100, help="steps of the second")
    parser.add_argument(
        "--batch", type=int, default=8, help="sequences of the first stage, at least 4; of the second, a quarter"
    )
    parser.add_argument("--folder", type=Path, default=Path("outputs/long_context"))
    parser.add_argument("--output", type=Path, help="where to write the figure, a PNG")
    parsed, flags = parser.parse_known_args(arguments)
    print(ask())
    losses, rows = {}, []
    with one_process():
        for name, checkpoint in train(parsed.short, parsed.long, parsed.batch, parsed.folder, flags).items():
            title = f"before, {SHORT} tokens" if name == "before" else f"{LONG} tokens, {name}"
            losses[title], accuracies = measure(checkpoint)
            stages = losses[title].split([SHORT, LONG - SHORT])
            rows.append([title, *(f"{stage.mean():.3f}" for stage in stages), *(f"{acc:.0%}" for acc in accuracies)])
    if parsed.output:
        draw(losses, parsed.output)
    where = [f"loss, positions 1 to {SHORT}", f"{SHORT + 1} to {LONG}"]
    print(markdown(["after training on", *where, *TASKS], rows))


if __name__ == "__main__":
    main()
