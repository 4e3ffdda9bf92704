"""Clock and power of a GPU while it works, for rows of gpu.py that run for a minute."""

import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

Reading = tuple[float, float]
Reader = Callable[[], Reading]


def find_reader() -> Reader | None:
    """What reads the multiprocessors' clock in MHz and the power in W: NVML, which torch calls through the package
    pynvml, or nvidia-smi. None if neither answers."""
    for reader in (_by_nvml, _by_nvidia_smi, _ask_nvidia_smi):
        with suppress(Exception):  # each library has errors of its own
            reader()
            return reader
    return None


def _by_nvml() -> Reading:
    return float(torch.cuda.clock_rate()), torch.cuda.power_draw() / 1e3


def _by_nvidia_smi() -> Reading:
    return _ask_nvidia_smi(f"--id=GPU-{torch.cuda.get_device_properties().uuid}")


def _ask_nvidia_smi(*gpu: str) -> Reading:
    """Of the first GPU, if none is given."""
    query = ["nvidia-smi", *gpu, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True, timeout=5).stdout.splitlines()
    clock, power = lines[0].split(",")
    return float(clock), float(power)


class Samples:
    """Reads every few seconds, in a thread, while it is open.

    Args:
        read: None: there is nothing to read, and the lists stay empty.
        every: seconds.

    Attributes:
        clocks: MHz.
        watts: W.
    """

    def __init__(self, read: Reader | None, every: float) -> None:
        self.read, self.every = read, every
        self.clocks: list[float] = []
        self.watts: list[float] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Samples":
        if self.read is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self.read is not None:
            self._thread.join()

    def _sample(self) -> None:
        while self.read is not None and not self._end.wait(self.every):
            with suppress(Exception):  # a reading that fails is one that is missing
                clock, power = self.read()
                self.clocks.append(clock)
                self.watts.append(power)


def rates_over(step_seconds: Sequence[float], tokens: int, every: float) -> list[float]:
    """Tokens/s of consecutive steps taken together until they last `every` seconds; those left at the end count only if
    there are no others. `tokens`: of a step."""
    rates, steps, passed = [], 0, 0.0
    for seconds in step_seconds:
        steps, passed = steps + 1, passed + seconds
        if passed >= every:
            rates.append(steps * tokens / passed)
            steps, passed = 0, 0.0
    return rates or ([steps * tokens / passed] if steps else [])
