"""Lines in the log about work that takes long."""

import time

from torchtitan.logging import logger

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Logs how far some work is and when it will end: at most every ten seconds, so short work logs nothing.

    Args:
        doing: begins each line.
        total: amount of work.
    """

    def __init__(self, doing: str, total: int) -> None:
        self.doing = doing
        self.total = total
        self.start = self.last = time.monotonic()

    def at(self, done: int) -> None:
        now = time.monotonic()
        if now < self.last + SECONDS_BETWEEN_LINES:
            return
        self.last = now
        left = f", about {(now - self.start) * (self.total - done) / done:,.0f} s left" if done else ""
        logger.info(f"{self.doing}: {done / self.total:.0%}{left}")
