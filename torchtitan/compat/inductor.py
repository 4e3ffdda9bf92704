"""The compiler's graph passes. Importing this module imports the compiler.

- `_inductor.custom_graph_pass`: `CustomGraphPass`, base class of a pass; `get_hash_for_files`, its key in the
  compiler's cache
- `_inductor.config._micro_pipeline_tp`: fuses collectives with GEMMs (asynchronous tensor parallelism)
- `_inductor.config.post_grad_custom_post_pass`: a pass that counts what was fused
"""

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

__all__ = ["CustomGraphPass", "fuse_collectives_with_gemms", "get_hash_for_files"]


def fuse_collectives_with_gemms(last_pass: CustomGraphPass) -> None:
    """Enables the compiler's fusion; `last_pass` then sees each graph after it."""
    torch._inductor.config._micro_pipeline_tp = True
    torch._inductor.config.post_grad_custom_post_pass = last_pass
