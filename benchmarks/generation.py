"""Generation against `transformers.generate`, with the same weights on the same device: tokens/s as ratios.

python -m benchmarks generation [--flavor debugmodel] [--batches 1,8] [--prompt 32] [--new 64] [--dtype float32]

The weights are random. Both sides generate greedily with a key-value cache, in turns; each round gives one ratio.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.tables import markdown, spread
from torchtitan.data.tokenizer import load_tokenizer
from torchtitan.device import find_device
from torchtitan.models import MODELS
from torchtitan.models.init import init_weights
from torchtitan.tools.generation.open import choose_dtype, open_model
from torchtitan.tools.generation.sample import Sampling, generate
from torchtitan.tools.interchange.convert import one_process
from torchtitan.tools.interchange.export import export
from torchtitan.tools.interchange.model import published


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="debugmodel", help="flavor of llama3")
    parser.add_argument("--batches", default="1,8", help="batch sizes, comma-separated")
    parser.add_argument("--prompt", type=int, default=32, help="tokens per prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: the faster on this device"
    )
    arguments = parser.parse_args()
    device = find_device(0)
    dtype = choose_dtype(arguments.dtype, device.torch_device)
    with tempfile.TemporaryDirectory() as folder, one_process(None):
        rows = compare(arguments, Path(folder) / "model", device.torch_device, dtype)
    import transformers

    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {device.name}, "
        f"{torch.get_num_threads()} threads, {str(dtype)[6:]}, llama3 {arguments.flavor}, prompts of "
        f"{arguments.prompt} tokens, {arguments.new} new ones, {arguments.rounds} rounds\n"
    )
    print(markdown(["prompts", "tokens/s", "of transformers'", "range"], rows))


def compare(arguments: argparse.Namespace, folder: Path, device: torch.device, dtype: torch.dtype) -> list[list[str]]:
    """A row for each number of prompts."""
    from transformers import AutoModelForCausalLM

    spec, tokenizer = MODELS.get("llama3"), load_tokenizer(None)
    args = spec.flavor(arguments.flavor).with_vocab_size(tokenizer.vocab_size)
    model = spec.build(args)
    init_weights(model, model.init_std, seed=0)
    weights = dict(model.named_parameters())
    form = published(spec, args, None, arguments.prompt + arguments.new)
    assert form is not None
    export(folder, {name: weight.shape for name, weight in weights.items()}, weights.__getitem__, form, dtype)
    ours = open_model(folder, device, dtype).model
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    reference = reference.to(device).eval()
    nothing: tuple[int, ...] = ()  # no token ends the text
    rows = []
    for batch in map(int, arguments.batches.split(",")):
        prompts = torch.randint(tokenizer.vocab_size, (batch, arguments.prompt), generator=torch.Generator())
        options = {"max_new_tokens": arguments.new, "min_new_tokens": arguments.new, "do_sample": False}
        seconds: list[tuple[float, float]] = []
        for _ in range(arguments.rounds + 1):
            start = perf_counter()
            generate(ours, prompts.tolist(), Sampling(arguments.new), nothing)
            between = perf_counter()
            inputs = prompts.to(device)
            reference.generate(inputs, attention_mask=torch.ones_like(inputs), pad_token_id=0, **options)
            seconds.append((between - start, perf_counter() - between))
        ratios = [their / our for our, their in seconds[1:]]  # the first round warms up
        rate = batch * arguments.new / statistics.median(our for our, _ in seconds[1:])
        rows.append([str(batch), f"{rate:,.0f}", f"{statistics.median(ratios):.2f}", spread(ratios, "{:.2f}")])
    return rows


if __name__ == "__main__":
    main()
