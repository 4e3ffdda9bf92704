"""How many processes a run has on this machine."""

import os

from torchtitan.errors import ConfigError


def find_processes() -> int:
    """NGPU, by default one process for each GPU, or one.

    Raises:
        ConfigError: NGPU is no number above 0, or above the number of GPUs if there are some.
    """
    import torch  # not at import: a launcher imports this before it handles signals

    gpus, given = torch.cuda.device_count(), os.environ.get("NGPU")
    try:
        processes = int(given or max(1, gpus))
    except ValueError:
        processes = 0
    if processes < 1:
        raise ConfigError(f"NGPU must be a number of processes above 0, not {given!r}.")
    if 0 < gpus < processes:
        raise ConfigError(f"NGPU = {processes}, but this machine has only {gpus} GPUs; lower NGPU.")
    return processes
