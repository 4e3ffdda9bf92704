"""Weight initialization that does not depend on the parallel layout."""

import hashlib
from collections.abc import Callable

import torch
from torch import nn

from torchtitan.parallel.sharded_tensors import local_box, local_tensor


@torch.no_grad()
def init_weights(
    model: nn.Module,
    std_of: Callable[[str], float | None],
    seed: int,
    factor_of: Callable[[str], float] = lambda name: 1.0,
) -> None:
    """Draws every parameter from a normal distribution truncated at three standard deviations, which `std_of` gives by
    name (None fills with 1, 0 with 0), and multiplies it by what `factor_of` gives.

    Each parameter has its own generator, seeded by `seed` and the parameter's name, and is drawn in full before a rank
    keeps its shard. So a weight does not depend on the mesh, the pipeline stage or the order of parameters. (On CPU,
    ranks that draw shards directly get the same numbers.) It takes the memory of the largest parameter for a while.
    """
    for name, parameter in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        std = std_of(name)
        if std is None:
            parameter.fill_(factor_of(name))
            continue
        if std == 0:
            parameter.zero_()
            continue
        key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator(device=parameter.device).manual_seed(int.from_bytes(key, "big"))
        full = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        nn.init.trunc_normal_(full, std=std, a=-3 * std, b=3 * std, generator=generator).mul_(factor_of(name))
        local_tensor(parameter).copy_(full[local_box(parameter)])
