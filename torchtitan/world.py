"""The place of this process among those of a run, as the variables that torchrun sets say it."""

import os
import re
from typing import NamedTuple

from torchtitan.errors import ConfigError

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
RANK_REMEDY = (
    "unset RANK, WORLD_SIZE and LOCAL_RANK for a run of one process; for several, ./run_train.sh and torchrun set all "
    "that ranks need."
)


class World(NamedTuple):
    """Ranks count from 0, in the run and on this machine; so many processes the run has, and so many this machine."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1


def number_in(name: str, default: int) -> int:
    """A variable of torchrun, where a wrong one must not matter: in messages, and for numbers of threads."""
    text = os.environ.get(name, "")
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else default


def world() -> World:
    """One process without torchrun. Raises a ConfigError with the variable at fault if they are malformed, incomplete
    or contradict each other: what reads them would fail, or wait for ranks that do not exist."""
    texts = {name: os.environ[name] for name in RANK_VARIABLES if name in os.environ}
    for name, text in texts.items():
        if not re.fullmatch("[0-9]{1,9}", text):
            raise ConfigError(f"{name}={text} is no number: {RANK_REMEDY}")
    given = {name: int(text) for name, text in texts.items()}
    rank, size = given.get("RANK", 0), given.get("WORLD_SIZE", 1)
    local_rank, local_size = given.get("LOCAL_RANK", 0), given.get("LOCAL_WORLD_SIZE", 1)
    if "RANK" not in given:
        if size != 1:
            raise ConfigError(f"WORLD_SIZE={size} is set, but RANK is not: {RANK_REMEDY}")
        return World(local_rank=local_rank)
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ConfigError(f"RANK={rank} is set, but {name} is not: {RANK_REMEDY}")
    faults = {
        f"RANK={rank} is not below WORLD_SIZE={size}": rank >= size,
        f"LOCAL_WORLD_SIZE={local_size} is not between 1 and WORLD_SIZE={size}": not 1 <= local_size <= size,
        f"LOCAL_RANK={local_rank} is above RANK={rank}": local_rank > rank,
        f"LOCAL_RANK={local_rank} is not below LOCAL_WORLD_SIZE={local_size}": local_rank >= local_size
        and "LOCAL_WORLD_SIZE" in given,
        f"MASTER_PORT={given['MASTER_PORT']} is no port, which is 1 to 65535": not 1 <= given["MASTER_PORT"] <= 65535,
    }
    for fault in (fault for fault, is_so in faults.items() if is_so):
        raise ConfigError(f"{fault}: {RANK_REMEDY}")
    return World(rank, local_rank, size, local_size)
