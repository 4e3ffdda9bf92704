"""The compiler's graph passes and folders. Importing this module imports the compiler.

- `_inductor.custom_graph_pass`: `CustomGraphPass`, base class of a pass; `get_hash_for_files`, its key in the
  compiler's cache
- `_inductor.config._micro_pipeline_tp`: fuses collectives with GEMMs (asynchronous tensor parallelism)
- `_inductor.config.post_grad_custom_pre_pass`, `post_grad_custom_post_pass`: a pass before it, and one that counts what
  was fused
- `_inductor.codecache._HEADER_DIR`, `_HEADER_LOCK_DIR`: where precompiled C++ headers are
- `_inductor.runtime.cache_dir_utils.default_cache_dir`: the folder that it uses unless it is told otherwise
"""

import os

import torch
from torch._inductor import codecache
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

__all__ = [
    "CustomGraphPass",
    "default_cache_dir",
    "fuse_collectives_with_gemms",
    "get_hash_for_files",
    "keep_precompiled_headers_in",
]


def fuse_collectives_with_gemms(first_pass: CustomGraphPass, last_pass: CustomGraphPass) -> None:
    """Enables the compiler's fusion; `first_pass` gets each graph before it, and `last_pass` after it."""
    torch._inductor.config._micro_pipeline_tp = True
    torch._inductor.config.post_grad_custom_pre_pass = first_pass
    torch._inductor.config.post_grad_custom_post_pass = last_pass


def keep_precompiled_headers_in(folder: str) -> None:
    """Otherwise they are in the default folder, whichever one holds the other compiled code."""
    codecache._HEADER_DIR = os.path.join(folder, "precompiled_headers")
    codecache._HEADER_LOCK_DIR = os.path.join(codecache._HEADER_DIR, "locks")
