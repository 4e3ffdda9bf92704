"""What forked test processes need, imported once by the process that they are forked from: not train.py, which reads
the rank."""

import os
from importlib import import_module

from torchtitan.launcher.imports import quick_imports

LIBRARIES = ("pydantic.type_adapter", "sentencepiece", "tomli_w", "torchao.prototype.mx_formats")
OURS = ("torchtitan.run.build_trainer", "torchtitan.run.watchdog", "torchtitan.plan.planner", "runs", "tiny")

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as the launcher does before it imports torch

with quick_imports():  # frozen, so that a forked process's first garbage collection copies none of it
    for name in (*LIBRARIES, *OURS):
        import_module(name)
    import_module("benchmarks.forks").import_ahead()
    import_module("torchtitan.config").ConfigManager().parse_args([])  # makes the parser of flags
