"""A clock that a test sets, so that no outcome depends on how fast the machine is."""

from collections.abc import Callable


class Clock:
    """In the place of a module `time`: its time passes where the test says so, and in `sleep`.

    Attributes:
        now: seconds.
        looks: how often the time was read.
        meanwhile: called in each `sleep`.
    """

    def __init__(self) -> None:
        self.now, self.looks = 0.0, 0
        self.meanwhile: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        self.looks += 1
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()
