"""Evaluates a model without training it.

python -m torchtitan.tools.evaluate CHECKPOINT --tasks stdlib_brackets hellaswag_val.jsonl text:FOLDER [--limit 500]

CHECKPOINT is a checkpoint (step-N), a run's dump folder (its newest checkpoint is used), or a folder in Hugging Face's
or Meta's format. Tasks: see docs/evaluation.md. Prints a table; --out FILE receives JSON lines with each example's
result, and --dump-folder FOLDER adds to metrics.jsonl and TensorBoard's files. A number that is not finite is null.
"""

from torchtitan.config.extension import add_model_flags
from torchtitan.errors import command_parser, run_command
from torchtitan.files import any_path, local_path
from torchtitan.registry import deferred

_one_process = deferred("torchtitan.tools.interchange.convert:one_process")
_evaluate = deferred("torchtitan.tools.evaluation.command:evaluate_checkpoint")


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
    with _one_process(arguments.custom_import):
        _evaluate(arguments)


if __name__ == "__main__":
    run_command(main)
