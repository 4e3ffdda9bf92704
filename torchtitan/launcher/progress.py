"""When steps begin and end, and where the main thread is: to report what takes unexpectedly long."""

import linecache
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

PACKAGE, STANDARD_LIBRARY = str(Path(__file__).parents[1]), os.path.dirname(os.__file__)
LIBRARY_FOLDERS = ("/site-packages/", "/dist-packages/", "/torchinductor")
LONGEST_STATEMENT = 80  # characters
COLLECTIVE = "in a collective"
ACTIVITIES = {
    "torch/_dynamo": "compiling",
    "torch/_inductor": "compiling",
    "torch/distributed/distributed_c10d": COLLECTIVE,
    "torch/distributed/_functional_collectives": COLLECTIVE,
    "torchtitan/parallel/collective_waits": COLLECTIVE,  # ours, between a collective and what waits for it
}


class Progress:
    """Steps of this process since it started. The main thread calls `begins` and `ends`; other threads read."""

    def __init__(self) -> None:
        self.steps = 0
        self.began: float | None = None  # start time of the current step; None between steps
        self.ended = time.monotonic()  # when the last step ended, or the run started
        self.longest_step = 0.0  # seconds. The first step, which compiles, counts only until the second one ends
        self.longest_interval = 0.0  # seconds between the ends of two steps, including saves and validation

    def begins(self) -> None:
        self.began = time.monotonic()

    def ends(self) -> None:
        now = time.monotonic()
        step, interval = now - (self.began or now), now - self.ended
        alone = self.steps < 2  # no earlier step that counts
        self.longest_step = step if alone else max(self.longest_step, step)
        self.longest_interval = interval if alone else max(self.longest_interval, interval)
        self.began, self.ended = None, now
        self.steps += 1


def main_thread_location() -> str:
    """Where the main thread is: the innermost frame of this project or of a user's module, its current statement, and
    what that has called: 'models/transformer.py:62, in forward (`self.wq(x)`), now in nn/linear.py:12, in forward'."""
    innermost = sys._current_frames()[threading.main_thread().ident or 0]
    frame, activity = innermost, ""
    while _is_foreign(frame) and frame.f_back is not None:
        activity = next((words for path, words in ACTIVITIES.items() if path in frame.f_code.co_filename), activity)
        frame = frame.f_back
    if _is_foreign(frame):
        return _name(innermost)
    try:
        statement = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    except TypeError:  # another thread is reading the same file into the cache
        statement = ""
    if len(statement) > LONGEST_STATEMENT:
        statement = f"{statement[:LONGEST_STATEMENT]}..."
    text = _name(frame) + (f" (`{statement}`)" if statement else "")
    if frame is not innermost:
        text += f", {activity or 'now'} in {_name(innermost)}"
    return text


def _is_foreign(frame: FrameType) -> bool:
    """Whether the frame belongs to a library or to compiled code."""
    path = frame.f_code.co_filename
    if path.startswith(PACKAGE):  # also if it is installed in site-packages
        return any(name in path for name in ACTIVITIES)
    return path.startswith(("<", STANDARD_LIBRARY)) or any(name in path for name in LIBRARY_FOLDERS)


def _name(frame: FrameType) -> str:
    file = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return f"{file}:{frame.f_lineno}, in {frame.f_code.co_name}"
