"""The compiler's graph passes. Importing this module imports the compiler.

- `_inductor.custom_graph_pass`: `CustomGraphPass`, base class of a pass; `get_hash_for_files`, its key in the
  compiler's cache
- `_inductor.config._micro_pipeline_tp`: fuses collectives with GEMMs (asynchronous tensor parallelism)
- `_inductor.config.post_grad_custom_pre_pass`, `post_grad_custom_post_pass`: a pass before it, and one that counts what
  was fused
"""

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

__all__ = ["CustomGraphPass", "fuse_collectives_with_gemms", "get_hash_for_files"]


def fuse_collectives_with_gemms(first_pass: CustomGraphPass, last_pass: CustomGraphPass) -> None:
    """Enables the compiler's fusion; `first_pass` gets each graph before it, and `last_pass` after it."""
    torch._inductor.config._micro_pipeline_tp = True
    torch._inductor.config.post_grad_custom_pre_pass = first_pass
    torch._inductor.config.post_grad_custom_post_pass = last_pass
