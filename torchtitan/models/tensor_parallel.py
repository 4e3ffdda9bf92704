"""Tensor parallelism of a decoder: its modules by the family's sharding, and its loss."""

import functools
from collections.abc import Mapping

from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config.system import Parallelism
from torchtitan.models.transformer import Transformer
from torchtitan.parallel.dims import Style
from torchtitan.parallel.loss_parallel import all_gather_cross_entropy, vocab_parallel_cross_entropy
from torchtitan.parallel.rounded_collectives import collectives_for
from torchtitan.parallel.tensor import apply_tensor_parallel

# Each rank projects its part of the sequence, as the norms before and the block afterwards have it.
OF_MTP: dict[str, Style] = {"enorm": "sequence", "hnorm": "sequence", "eh_proj": "sequence"}


def shard_tensors(
    model: Transformer, sharding: Mapping[str, Style], tensor_mesh: DeviceMesh, parallelism: Parallelism
) -> None:
    # For the loss of each sequence that evens the load of experts, a rank must hold a chunk of every sequence.
    flatten = model.args.moe is None
    collectives = functools.partial(collectives_for, overlaps=parallelism.enable_async_tensor_parallel)
    sharding = {**sharding, **OF_MTP} if hasattr(model, "mtp") else sharding
    apply_tensor_parallel(model, sharding, tensor_mesh, collectives, flatten)
    if parallelism.disable_loss_parallel:
        model.cross_entropy = all_gather_cross_entropy(model.cross_entropy, tensor_mesh)
    else:
        model.cross_entropy = vocab_parallel_cross_entropy(tensor_mesh)
