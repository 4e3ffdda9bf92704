"""From the command line to the runs of a ladder."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from torchtitan.checks.config_checks import global_batch_size
from torchtitan.config import JobConfig
from torchtitan.errors import ConfigError
from torchtitan.ladder.fit import varies_tokens
from torchtitan.ladder.runs import Rung, make_rung
from torchtitan.ladder.shapes import find_shape, parse_number, short
from torchtitan.launcher.processes import find_processes
from torchtitan.parallel.dims import find_dims


@dataclass(frozen=True)
class Ladder:
    """The runs of a ladder and the run that they predict.

    Attributes:
        rungs: by series ("20 tokens per parameter", "1M tokens"), from the smallest size to the largest.
        target: the run to predict.
    """

    rungs: dict[str, list[Rung]]
    target: Rung
    processes: int

    @property
    def by_cost(self) -> list[Rung]:
        return sorted((rung for series in self.rungs.values() for rung in series), key=lambda rung: rung.flops)


def plan(arguments: argparse.Namespace, config: JobConfig) -> Ladder:
    """The runs of a ladder, checked.

    Raises:
        ConfigError: with one sentence; nothing has been trained yet.
    """
    processes = find_processes()
    problems: list[str] = []
    dims = find_dims(config.parallelism, processes, problems)
    if dims is None or problems:
        raise ConfigError(*problems)
    batch, folder = global_batch_size(config, dims), arguments.folder or Path(config.job.dump_folder)
    flag, listed = (
        ("--tokens", arguments.tokens)
        if arguments.tokens
        else ("--tokens-per-parameter", arguments.tokens_per_parameter)
    )
    amounts = sorted(parse_number(text, flag) for text in listed.split(","))
    sizes = {text.strip(): parse_number(text, "--sizes") for text in arguments.sizes.split(",")}
    wanted = parse_number(arguments.predict, "--predict")
    if wanted <= max(sizes.values()):
        raise ConfigError(f"--predict {arguments.predict} is not above the largest of --sizes, {arguments.sizes}.")

    def rung(size: str, parameters: float, amount: float) -> Rung:
        shape = find_shape(config.model, parameters, config.training.seq_len)
        tokens = amount if arguments.tokens else amount * shape.parameters
        return make_rung(config, size, shape, tokens, batch, folder)

    unit = "tokens" if arguments.tokens else "tokens per parameter"
    by_size = sorted(sizes.items(), key=lambda size: size[1])
    rungs = {f"{short(amount)} {unit}": [rung(*size, amount) for size in by_size] for amount in amounts}
    target = rung(arguments.predict.strip(), wanted, amounts[-1])
    same: dict[tuple[int, int], str] = {}
    for one in [*next(iter(rungs.values())), target]:
        shape = one.shape
        if other := same.get((shape.dim, shape.n_layers)):
            raise ConfigError(
                f"--sizes: {other} and {one.size} both become {shape.n_layers} layers of width {shape.dim}, "
                f"{short(shape.parameters)} parameters; leave one out."
            )
        same[shape.dim, shape.n_layers] = one.size
    ladder = Ladder(rungs, target, processes)
    varies_tokens([(one.shape.parameters, one.tokens) for one in ladder.by_cost])
    return ladder
