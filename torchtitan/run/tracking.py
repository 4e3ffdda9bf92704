"""A run's trackers, from its start to its end."""

import contextlib
import dataclasses
from collections.abc import Iterator

import torch.distributed as dist

from torchtitan.errors import EXIT_STATUS, UserError
from torchtitan.launcher.signals import before_exit
from torchtitan.metrics.trackers import FAILED, FINISHED, KILLED, begin_trackers
from torchtitan.parallel.process_group import heartbeat
from torchtitan.run.trainer import Trainer


@contextlib.contextmanager
def tracked(run: Trainer) -> Iterator[None]:
    """Begins the trackers, and tells them how the run has ended, whatever ends it."""
    config, ranks = run.folder.config, (dist.get_rank(), dist.get_world_size())
    trackers = begin_trackers(
        config.metrics, run.folder.path, *ranks, run.step > 0, dataclasses.asdict(config), run.folder.texts
    )
    run.instruments.trackers = [*trackers]

    def close(state: str) -> None:
        run.instruments.trackers, left = [], [*trackers]
        trackers.clear()
        for tracker in left:
            tracker.close(state)

    def state_of_stop() -> str:
        """A launcher stops the ranks that are left when one has failed, as it does when it is stopped itself."""
        heart = heartbeat()
        return FAILED if heart is not None and heart.has_lost_a_rank() else KILLED

    with before_exit(lambda status: close(FAILED if status in (1, EXIT_STATUS) else state_of_stop())):
        try:
            yield
        except BaseException as error:
            close(state_of_stop() if run.stop.requested and not isinstance(error, UserError) else FAILED)
            raise
        close(KILLED if run.stop.agreed_on else FINISHED)
