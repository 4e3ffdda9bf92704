"""Tensor subclasses and fake tensors.

- `utils._pytree`: maps over the arguments of an operation
- `utils._python_dispatch.TorchDispatchMode`: lets a plan see every operation
- `_subclasses.fake_tensor`, its `FakeTensor` and `FakeTensorMode`: tensors without memory, for plans;
  `unset_fake_temporarily`: real ones in the middle of a plan
- `_subclasses.functional_tensor.FunctionalTensorMode`: where the compiler traces an operator
- `distributed.tensor._sharding_prop.ShardingPropagator`: DTensor infers shapes with full-size fake tensors, which a
  plan must not count; its method is `PROPAGATE`
- `distributed.tensor.debug._clear_sharding_prop_cache`: the cache refers to meshes of destroyed process groups
- `testing._internal.distributed.fake_pg.FakeStore`: lets one process simulate a process group of many
- `_C._current_graph_task_id`: whether a forward pass is a recomputation inside a backward pass
"""

import torch.utils._pytree as pytree
from torch import _C
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.distributed import Store
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "PROPAGATE",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensorMode",
    "ShardingPropagator",
    "TorchDispatchMode",
    "clear_sharding_cache",
    "fake_store",
    "in_backward_pass",
    "pytree",
    "unset_fake_temporarily",
]

PROPAGATE = "_propagate_tensor_meta_non_cached"


def clear_sharding_cache() -> None:
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def fake_store() -> Store:
    """The store of a process group with backend "fake", in which collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def in_backward_pass() -> bool:
    """Whether this thread is inside a backward pass, as it is during activation recomputation."""
    return _C._current_graph_task_id() >= 0
