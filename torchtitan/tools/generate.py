"""Continues prompts with a trained model.

python -m torchtitan.tools.generate --checkpoint FOLDER --prompt "def main(" [--temperature 0.8 --top-p 0.95]

FOLDER is a checkpoint (step-N), a run's dump folder (its newest checkpoint is used), or a folder in Hugging Face's or
Meta's format. Several prompts are continued in batches of limited size; the text of one depends on no other. A prompt
is the start of a document. A single text is printed as it is generated.

With --chat, each --prompt, or else each line that you type, is a turn of one conversation, which the model answers.
"""

from torchtitan.config.extension import add_model_flags
from torchtitan.errors import command_parser, run_command
from torchtitan.files import any_path, local_path
from torchtitan.registry import deferred

_one_process = deferred("torchtitan.tools.interchange.convert:one_process")
_continue_prompts = deferred("torchtitan.tools.generation.command:continue_prompts")
_chat = deferred("torchtitan.tools.generation.chat:chat")


def main() -> None:
    parser = command_parser("generate", __doc__)
    parser.add_argument("--checkpoint", type=any_path, required=True, metavar="FOLDER")
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; repeatable")
    parser.add_argument(
        "--prompts-file",
        type=local_path,
        help="text file with one prompt per line, which may be a JSON string",
        metavar="FILE",
    )
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0: greedy")
    parser.add_argument("--top-k", type=int, default=0, help="sample from the k most likely tokens; 0: all")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the most likely tokens whose probabilities sum to p"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-samples", type=int, default=1, help="texts of each prompt; needs --temperature above 0")
    parser.add_argument(
        "--no-cache", action="store_true", help="recompute all tokens for each new one: same result, but slow"
    )
    parser.add_argument("--chat", action="store_true", help="answer in turns, with the tokenizer's chat template")
    parser.add_argument("--chat-template", help="another: chatml, llama3 or a file", metavar="NAME")
    parser.add_argument("--system", help="system message of --chat", metavar="TEXT")
    add_model_flags(parser)
    parser.add_argument(
        "--out",
        type=local_path,
        help="JSONL file to write: prompt, number of the sample from 1, text and token ids",
        metavar="FILE",
    )
    arguments = parser.parse_args()
    with _one_process(arguments.custom_import):
        (_chat if arguments.chat else _continue_prompts)(arguments)


if __name__ == "__main__":
    run_command(main)
