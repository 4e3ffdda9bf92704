"""Counts the peak bytes of live tensors in a training step, on rank 0.

NGPU=2 python -m torchtitan.launch benchmarks/peak_memory.py --training.seq_len=128 ... (flags of train.py)

Kernel workspace is not seen. Prints a line of JSON: states (weights and optimizer state), gradients (of all parameters,
as if they existed at the same time) and peak, in bytes.
"""

import json
import os
import sys
import tempfile
from typing import Any

from torchtitan.checks.config_checks import check_run
from torchtitan.config import ConfigManager
from torchtitan.device import find_device
from torchtitan.engine.model_args import register_models
from torchtitan.run.build_trainer import build_trainer
from torchtitan.tools.plan.kernel_substitutes import kernel_substitutes
from torchtitan.tools.plan.recorder import Recorder
from torchtitan.tools.plan.simulation import local_bytes, state_bytes


class NoReport:
    """Replaces a reporter."""

    def due(self, step: int) -> bool:
        return False

    def step(self, step: int, loss: Any, **others: Any) -> None:
        loss()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = ConfigManager().parse_args([f"--job.dump_folder={folder}", *sys.argv[1:]])
        register_models(config)
        device = find_device(int(os.environ.get("LOCAL_RANK", 0)))
        dims, stages = check_run(config, int(os.environ.get("WORLD_SIZE", 1)), device.type)
        recorder = Recorder(name_of_group=str)
        with recorder, build_trainer(config, dims, stages, device) as trainer:
            trainer.instruments.reporter = NoReport()  # type: ignore[assignment]
            for _ in range(2):  # in the second step all states exist
                recorder.clear()
                with kernel_substitutes(device.type):
                    trainer.train_step(trainer.loader.next())
            states = state_bytes(trainer.engine.model, trainer.engine.optimizer)
            gradients = local_bytes(parameter for parameter in trainer.engine.model.parameters())  # of the same dtype
        if os.environ.get("RANK", "0") == "0":
            print(
                json.dumps(
                    {
                        "states": states["parameters"] + states["optimizer"],
                        "gradients": gradients,
                        "peak": max(recorder.peaks.values()),
                    }
                )
            )


if __name__ == "__main__":
    main()
