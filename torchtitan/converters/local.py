"""Low-precision products under tensor parallelism: each rank quantizes and multiplies its own shards.

So scales are a shard's own, at least as fine as the whole tensor's, and no collective is needed for them.
"""

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def on_local_shards(product: Product, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`product(x, weight)`, from (tokens, k) and (n, k) to (tokens, n), with any leading dimensions of x.

    With a DTensor weight on a mesh of one dimension: sharded by rows (outputs), x is replicated and the result
    sharded by its last dimension; sharded by columns (inputs), x is sharded by its last dimension and the result is a
    partial sum.
    """
    if not isinstance(weight, DTensor):
        return product(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    mesh, (placement,) = weight.device_mesh, weight.placements
    last = x.dim() - 1
    wanted: Placement
    result: Placement
    x_grad: Placement
    if placement == Shard(0):
        wanted, x_grad, result = Replicate(), Partial(), Shard(last)
    elif placement == Shard(1):
        wanted, x_grad, result = Shard(last), Shard(last), Partial()
    else:
        wanted, x_grad, result = Replicate(), Replicate(), Replicate()
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    local_x = x.redistribute(placements=[wanted]).to_local(grad_placements=[x_grad])
    local_out = product(local_x.flatten(0, -2), weight.to_local()).unflatten(0, local_x.shape[:-1])
    return DTensor.from_local(local_out, mesh, [result], run_check=False)
