"""Evaluates a model without training it.

python -m torchtitan.evaluate CHECKPOINT --tasks stdlib_brackets hellaswag_val.jsonl text:FOLDER [--limit 500]

CHECKPOINT is a checkpoint (step-N), a run's dump folder (its newest checkpoint is used), or a folder in Hugging Face's
or Meta's format. Tasks: see docs/evaluation.md. Prints a table; --out FILE receives JSON lines with each example's
result, and --dump-folder FOLDER adds to metrics.jsonl and TensorBoard's files. A number that is not finite is null.
"""

import argparse
import json
import time

from torchtitan.config.extension import add_model_flags
from torchtitan.config.output import Metrics
from torchtitan.config.training import Evaluation
from torchtitan.errors import ConfigError, command_parser, run_command
from torchtitan.files import any_path, local_path
from torchtitan.strict_json import finite

BATCH_TOKENS = 8192
USUAL_LENGTH = 2048  # where the folder does not say what its model was trained on


def main() -> None:
    parser = command_parser("evaluate", __doc__)
    parser.add_argument("checkpoint", type=any_path, metavar="CHECKPOINT")
    parser.add_argument(
        "--tasks", nargs="+", required=True, metavar="TASK", help="task names, JSONL files, text:PATH or lm_eval:TASK"
    )
    parser.add_argument(
        "--num-fewshot",
        type=int,
        help="solved examples in front of each example (default: 0, or as lm_eval's task says)",
        metavar="N",
    )
    parser.add_argument("--limit", type=int, help="use only the first N examples of each task", metavar="N")
    parser.add_argument(
        "--seq-len",
        type=int,
        help="tokens that the model sees at once; longer texts are read in windows (default: as in training)",
        metavar="N",
    )
    add_model_flags(parser)
    parser.add_argument(
        "--out", type=local_path, help="JSONL file to write: the result of each example", metavar="FILE"
    )
    parser.add_argument(
        "--dump-folder", type=local_path, help="folder to add metrics.jsonl and tb/ to", metavar="FOLDER"
    )
    arguments = parser.parse_args()
    from torchtitan.interchange.convert import one_process

    with one_process(arguments.custom_import):
        _run(arguments)


def _run(arguments: argparse.Namespace) -> None:
    from torchtitan.device import find_device
    from torchtitan.evaluation.evaluator import Evaluator, results_table
    from torchtitan.evaluation.find_tasks import find_tasks
    from torchtitan.evaluation.scoring import scorer_of_model
    from torchtitan.generation.open import choose_dtype, open_model
    from torchtitan.metrics.reporter import make_writers

    for name, least, range_ in (("num_fewshot", 0, "0 or above"), ("limit", 1, "above 0"), ("seq_len", 1, "above 0")):
        given = getattr(arguments, name)
        if given is not None and given < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be {range_}, not {given}.")
    evaluation = Evaluation(tasks=arguments.tasks, num_fewshot=arguments.num_fewshot, limit=arguments.limit)
    tasks = find_tasks(evaluation, name_of=lambda key: f"--{key.replace('_', '-')}")
    device = find_device(0).torch_device
    dtype = choose_dtype(arguments.dtype, device)
    opened = open_model(arguments.checkpoint, device, dtype, arguments.tokenizer_path, arguments.ema)
    longest = arguments.seq_len or opened.seq_len or USUAL_LENGTH
    scorer = scorer_of_model(opened.model, longest, BATCH_TOKENS, str(opened.folder))
    evaluator = Evaluator(tasks, opened.tokenizer, scorer)
    started = time.perf_counter()
    scores = evaluator.scores()
    metrics = evaluator.metrics(scores)
    seconds = time.perf_counter() - started
    print(f"{opened.folder}, {opened.weights}, {str(dtype)[6:]}, {seconds:.1f} s\n{results_table(metrics)}")
    if arguments.out:
        lines = (json.dumps(finite(detail)) + "\n" for detail in evaluator.details(scores))
        arguments.out.write_text("".join(lines), encoding="utf-8")
    if arguments.dump_folder:
        where = "ema/" if arguments.ema else ""
        values = {f"{where}{task}/{name}": value for task, own in metrics.items() for name, value in own.items()}
        for writer in make_writers(Metrics(enable_tensorboard=True), arguments.dump_folder, 0, None):
            writer.write(opened.step, finite(values))
            writer.close()


if __name__ == "__main__":
    run_command(main)
