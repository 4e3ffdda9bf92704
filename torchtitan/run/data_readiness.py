"""Waiting, on all ranks together, until data are there, and until what they have read is verified."""

import dataclasses
from collections.abc import Callable
from functools import partial
from time import perf_counter

from torchtitan.data.hashes import HASHES
from torchtitan.errors import DataError, counted
from torchtitan.launcher.signals import Stop
from torchtitan.logging import Waiting, logger
from torchtitan.parallel.object_collectives import all_gather_object

DATA_ENDED = 64  # passed to `Stop` in place of a signal number; larger than any of them
SECONDS_TOGETHER = 1.0  # between agreements to wait for a rank that reads its data again, or verifies them
SECONDS_TO_VERIFY = 10.0  # what a run that is asked to stop has read


@dataclasses.dataclass
class DataReadiness:
    """Whether a run can go on with its data.

    Attributes:
        error: why this rank can no longer read its data.
        files_verified: how many files of token shards this rank has said to be as they were written.
    """

    stop: Stop
    error: str | None = None
    files_verified: int = 0

    def agreed_to_stop(self, ready: bool = True) -> bool:
        return self.stop.agreed(DATA_ENDED if self.error else 0, ready)

    def on_all_ranks(self, wait: Callable[[Callable[[], bool]], bool], retrying: Callable[[], bool]) -> bool:
        """Calls `wait`, such as `Loader.wait`, until all ranks are ready to go on. False: they save and stop, because
        any of them got a signal or cannot read its data. While one is `retrying`, which may take longer than a
        collective may, all agree to wait. Collective."""
        while True:
            ready, retry = False, perf_counter() + SECONDS_TOGETHER
            try:
                ready = wait(partial(self._waits_no_longer, retry, retrying))
            except DataError as error:
                self.error = str(error)
            if self.agreed_to_stop(ready):
                return False
            if not self.stop.unready:
                return True

    def _waits_no_longer(self, retry: float, retrying: Callable[[], bool]) -> bool:
        return self.stop.requested > 0 or (retrying() and perf_counter() > retry)

    def verified(self) -> bool:
        """Waits until what all ranks have read is known to be as it was written. Else they are to stop. Collective."""
        before, left = HASHES.verified, HASHES.unverified
        with Waiting("verifying what was read", left, "files of token shards", lambda: HASHES.verified - before):
            if not self.on_all_ranks(HASHES.wait, lambda: True):
                return False
        if HASHES.verified > self.files_verified:
            self.files_verified = HASHES.verified
            files = counted(self.files_verified, "file")
            logger.info(f"all that this rank has read so far of token shards ({files}) is verified")
        return True

    def unverified_in_time(self, step: int) -> str:
        """Why `step` must not be saved before the run stops; "" if all that was read is verified. Raises a DataError
        with what is damaged. Collective."""
        fault, end = "", perf_counter() + SECONDS_TO_VERIFY
        try:
            HASHES.wait(lambda: perf_counter() > end)
        except DataError as error:
            fault = str(error)
        of_ranks = all_gather_object((fault, HASHES.unverified))
        if damaged := next((fault for fault, _ in of_ranks if fault), ""):
            raise DataError(
                f"{damaged} The run may have trained on it, so step {step} is not saved; when the file is "
                f"repaired, run the same command again. {self.stop.on_disk}"
            )
        left = sum(unverified for _, unverified in of_ranks)
        return f"{counted(left, 'file')} of token shards that it has read could not be verified in time" if left else ""
