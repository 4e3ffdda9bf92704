"""Parameters and FLOPs per token of a configuration.

python -m benchmarks model_size --job.config_file=FILE.toml --section.key=value ...

Prints one JSON object: `parameters`, `full` (FLOPs of forward and backward for one token, with attention counted as if
each token attended to the entire sequence, as torchtitan and PaLM count) and `causal` (half the attention FLOPs, as
Megatron counts).
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from torchtitan.protocols import ModelArgs


def model_size(argv: Sequence[str]) -> dict[str, float]:
    """Computes the numbers in this process."""
    import torch

    from torchtitan.config import ConfigManager
    from torchtitan.engine.model_args import find_model_args, register_models
    from torchtitan.metrics.flops import flops_per_token
    from torchtitan.models import MODELS

    config = ConfigManager().parse_args(argv)
    register_models(config)
    spec = MODELS.get(config.model.name)
    args = find_model_args(config.model)
    with torch.device("meta"):
        model = spec.build(args)
    seq_len = config.training.seq_len
    parameters = sum(parameter.numel() for parameter in model.parameters())
    embedding = 0 if args.tied_embeddings or model.tok_embeddings is None else model.tok_embeddings.weight.numel()
    full = flops_per_token(parameters - embedding, args, seq_len)
    return {"parameters": parameters, "full": full, "causal": causal(full, args, seq_len)}


def causal(full: float, args: "ModelArgs", seq_len: int) -> float:
    """FLOPs per token with half the attention FLOPs. `args`: a model's sizes."""
    return full - 6.0 * args.n_layers * args.n_heads * args.head_dim * seq_len


def ask(argv: Sequence[str]) -> dict[str, float]:
    """`model_size` in a separate process."""
    command = [sys.executable, str(Path(__file__).resolve()), *argv]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"cannot build the configuration: {done.stderr.strip().splitlines()[-1]}")
    sizes: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return sizes


if __name__ == "__main__":
    print(json.dumps(model_size(sys.argv[1:])))
