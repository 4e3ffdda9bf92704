"""The compiler's graph passes and folders. Importing this module imports the compiler.

- `_inductor.custom_graph_pass`: `CustomGraphPass`, base class of a pass; `get_hash_for_files`, its key in the
  compiler's cache
- `_inductor.pattern_matcher.stable_topological_sort`: orders a graph after a pass has changed it
- `_inductor.config._micro_pipeline_tp`: fuses collectives with GEMMs (asynchronous tensor parallelism)
- `_inductor.config.post_grad_custom_pre_pass`, `post_grad_custom_post_pass`: a pass before it, and one that counts what
  was fused
- `_inductor.codegen.triton.get_triton_reduction_function`, `TritonOverrides`: what a kernel calls for the largest or
  smallest of many numbers, and its code for two numbers
- `_inductor.codegen.triton.TritonKernel`: its `codegen_body` adds a loop to its `body`
- `_inductor.virtualized.V`: the kernel that is being generated, which takes helper functions
- `_inductor.config.combo_kernels`, `combo_kernel_...`: several kernels in one launch, and how many
- `_inductor.codecache._HEADER_DIR`, `_HEADER_LOCK_DIR`: where precompiled C++ headers are
- `_inductor.runtime.cache_dir_utils.default_cache_dir`: the folder that it uses unless it is told otherwise
"""

import functools
import os
from typing import Any

import torch
from torch._inductor import codecache
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

__all__ = [
    "CustomGraphPass",
    "avoid_nan_instructions",
    "default_cache_dir",
    "few_launches",
    "fuse_collectives_with_gemms",
    "get_hash_for_files",
    "keep_precompiled_headers_in",
    "separate_loops",
    "stable_topological_sort",
]


def fuse_collectives_with_gemms(first_pass: CustomGraphPass, last_pass: CustomGraphPass) -> None:
    """Enables the compiler's fusion; `first_pass` gets each graph before it, and `last_pass` after it."""
    torch._inductor.config._micro_pipeline_tp = True
    torch._inductor.config.post_grad_custom_pre_pass = first_pass
    torch._inductor.config.post_grad_custom_post_pass = last_pass


def few_launches() -> dict[str, Any]:
    """Options of `torch.compile`: on GPUs, kernels that do not need each other's results are launched as one."""
    options = {
        "combo_kernels": True,
        "combo_kernel_max_num_nodes": 32,
        "combo_kernel_peak_memory_pct_threshold": float("inf"),
    }
    return {name: value for name, value in options.items() if hasattr(torch._inductor.config, name)}


CHOICE = "tl.where(({0} {sign} {1}) | ({0} != {0}), {0}, {1})"
REDUCTION = """
@triton.jit
def {{name}}(a, dim):
    return tl.reduce(a, dim, {choose})
"""


def avoid_nan_instructions() -> None:
    """On GPUs: generated kernels compare two numbers and choose, to the same result, where torch 2.14 and later use the
    GPU's minimum and maximum that keep NaN. In kernels with these Triton writes wrong 8-bit numbers to transposed
    results (triton-lang/triton#11111). In kernels of our own: `tl.where`, and no `propagate_nan`.

    torchao does the same for two numbers (`torchao.float8._inductor_patch`), but not for reductions.
    """
    if not torch.cuda.is_available():
        return
    from torch._inductor.codegen import triton
    from torch._inductor.virtualized import V

    original = triton.get_triton_reduction_function
    if hasattr(original, "__wrapped__"):  # done before
        return
    signs = {"min": "<", "max": ">"}

    @functools.wraps(original)
    def reduction_function(reduction_type: str) -> str:
        if reduction_type not in signs:
            return str(original(reduction_type))  # type: ignore[no-untyped-call]
        choice = CHOICE.format("a", "b", sign=signs[reduction_type])
        helpers = V.kernel.helper_functions
        choose = helpers.add(f"\n@triton.jit\ndef {{name}}(a, b):\n    return {choice}\n", base_name="_choose")
        return str(helpers.add(REDUCTION.format(choose=choose), base_name="_reduce"))

    triton.get_triton_reduction_function = reduction_function
    triton.TritonOverrides.minimum = staticmethod(functools.partial(CHOICE.format, sign="<"))  # type: ignore[method-assign]
    triton.TritonOverrides.maximum = staticmethod(functools.partial(CHOICE.format, sign=">"))  # type: ignore[method-assign]


def separate_loops() -> None:
    """On GPUs: all threads of a generated kernel end a loop over a row before one of them begins the next, which may
    read what others have written (triton-lang/triton#10924), or overwrite in place what they have yet to read. Triton
    adds a barrier only if the sum in between takes several warps. torch 2.14 and later add one before such reads
    (pytorch/pytorch#190519)."""
    if not torch.cuda.is_available():
        return
    from torch._inductor.codegen.triton import TritonKernel

    original = TritonKernel.codegen_body
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def codegen_body(self: Any) -> None:
        if any(tree.is_loop for tree in self.range_trees) and " in tl.range(" in self.body.getvalue():
            self.body.writeline("tl.debug_barrier()")
        original(self)  # type: ignore[no-untyped-call]

    TritonKernel.codegen_body = codegen_body  # type: ignore[method-assign]


def keep_precompiled_headers_in(folder: str) -> None:
    """Otherwise they are in the default folder, whichever one holds the other compiled code."""
    codecache._HEADER_DIR = os.path.join(folder, "precompiled_headers")
    codecache._HEADER_LOCK_DIR = os.path.join(codecache._HEADER_DIR, "locks")
