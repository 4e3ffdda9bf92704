"""What forked test processes need, imported once by the process that they are forked from: not train.py, which reads
the rank."""

import os
from contextlib import suppress
from importlib import import_module

from torchtitan.launcher.imports import quick_imports

LIBRARIES = ("pydantic.type_adapter", "sentencepiece", "tomli_w", "torchao.prototype.mx_formats")
OURS = ("torchtitan.run.build_trainer", "torchtitan.run.watchdog", "torchtitan.tools.plan.planner", "runs", "tiny")
# Modules that a run, and the compiler, import when they need them: a second of each forked process that compiles.
LATER = (
    "torchtitan.run.transitions",
    "torchtitan.run.resume",
    "torchtitan.run.checkpoints",
    "torchtitan.engine.pipelines",
    "torchtitan.parallel.context",
    "torchtitan.parallel.loss_parallel",
    "torchtitan.models.tensor_parallel",
    "torchtitan.kernels.compiler_passes",
    "torch._inductor.compile_fx",
    "torch._inductor.fx_passes.mkldnn_fusion",
    "torch._inductor.runtime.caching",
    "torch._inductor.choices",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.codegen.pallas",
    "torch.export._trace",
    "torch.utils.cpp_extension",
    "torch.utils.serialization",
    "sympy.physics.units",
    "sympy.tensor.tensor",
)

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as the launcher does before it imports torch

with quick_imports():  # frozen, so that a forked process's first garbage collection copies none of it
    for name in (*LIBRARIES, *OURS):
        import_module(name)
    for name in LATER:
        with suppress(ModuleNotFoundError):  # versions of torch do not have the same modules
            import_module(name)
    import_module("benchmarks.forks").import_ahead()
    import_module("torchtitan.config").ConfigManager().parse_args([])  # makes the parser of flags
    import_module("torchtitan.data.sources").python_stdlib()  # looks for its files
