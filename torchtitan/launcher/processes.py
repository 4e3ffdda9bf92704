"""How many processes a run has on this machine."""

import contextlib
import os
import resource

from torchtitan.errors import ConfigError, counted
from torchtitan.hardware import SHARING, ranks_may_share_gpus

# Tasks of srun, mpirun, mpiexec. Variables with their number and their rank; how to start one task per machine.
TASK_VARIABLES = {
    "SLURM_NTASKS": ("SLURM_PROCID", "srun --ntasks-per-node=1"),
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "mpirun --map-by ppr:1:node"),
    "PMI_SIZE": ("PMI_RANK", "mpiexec -ppn 1"),
}


def raise_limit_of_open_files() -> None:
    """To the hard limit: each group of N ranks takes N connections, and the usual soft limit is 1,024. Processes that
    this one starts inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit besides
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def find_processes() -> int:
    """NGPU, by default one process for each GPU, or one. Raises a ConfigError if it is no number above 0, or above the
    number of GPUs if there are some and ranks may not share them."""
    import torch  # not at import: a launcher imports this before it handles signals

    gpus, given = torch.cuda.device_count(), os.environ.get("NGPU")
    try:
        processes = int(given or max(1, gpus))
    except ValueError:
        processes = 0
    if processes < 1:
        raise ConfigError(f"NGPU must be a number of processes above 0, not {given!r}.")
    if 0 < gpus < processes and not ranks_may_share_gpus():
        raise ConfigError(
            f"NGPU = {processes}, but this machine has only {counted(gpus, 'GPU')}; lower NGPU, or set {SHARING}=1 for "
            "a test in which ranks share a GPU."
        )
    return processes


def refuse_lone_tasks() -> None:
    """Raises a ConfigError if this process would train alone, or start all processes of a run, and is one of several
    tasks of srun or mpirun, each of which would do the same."""
    if "RANK" in os.environ:
        return
    # The batch script and the interactive shell of a SLURM job see the number of its tasks, and have started none yet.
    is_batch = os.environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in os.environ
    is_script = is_batch or os.environ.get("SLURM_STEP_NUM_TASKS") == "1"
    for count, (rank, command) in TASK_VARIABLES.items():
        if count == "SLURM_NTASKS" and is_script:
            continue
        tasks = os.environ.get(count, "")
        if rank in os.environ and tasks.isdecimal() and int(tasks) > 1:
            raise ConfigError(
                f"this is one of {tasks} tasks ({count}), and each would be a run of its own; start one launcher per "
                f"machine, which starts the processes there: {command} ./run_train.sh, on several machines with "
                f"PET_NNODES and PET_RDZV_ENDPOINT (docs/multinode.md). For separate runs: unset {count}."
            )
