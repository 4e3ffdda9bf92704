"""Loads the weights of a published folder into a model; each rank reads only what it holds."""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from torchtitan.interchange.sources import Source, read_part
from torchtitan.logging import Waiting
from torchtitan.models.init import local_box


@torch.no_grad()
def load_weights(tensors: Mapping[str, torch.Tensor], source: Source) -> None:
    """Fills the tensors, or this rank's shards of DTensors, by name.

    Raises:
        CheckpointError: a weight cannot be read.
    """
    for name, tensor in Waiting.over(list(tensors.items()), f"loading {source.folder}", "weights"):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.copy_(read_part(source, name, local_box(tensor)))
