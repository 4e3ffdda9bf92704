"""What `python -m torchtitan.tools.ladder` does with its flags."""

import argparse
from pathlib import Path

from torchtitan.config import JobConfig
from torchtitan.engine.model_args import register_models
from torchtitan.tools.ladder.report import report, runs_table, time_left
from torchtitan.tools.ladder.runs import choose_runs, train_rung, write_files


def climb(arguments: argparse.Namespace, config: JobConfig) -> None:
    """Chooses the runs, trains, fits and predicts."""
    register_models(config)
    ladder = choose_runs(arguments, config)
    runs = [*ladder.by_cost, *([ladder.target] if arguments.verify else [])]
    print(runs_table(runs))
    print(time_left(ladder, runs), flush=True)
    if arguments.dry_run:
        return
    write_files(runs)
    for rung in runs:
        if rung.loss() is None:
            print(f"{rung.folder.name}: training; see {rung.file.with_suffix('.log')}", flush=True)
            train_rung(rung)
            print(f"{rung.folder.name}: {rung.loss():.4f} bits per byte. {time_left(ladder, runs)}", flush=True)
    report(ladder, arguments.folder or Path(config.job.dump_folder))
