"""Published folders as used by a checkpoint manager: to load initially, and to export."""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan.errors import CheckpointError
from torchtitan.interchange.export import export
from torchtitan.interchange.load import load_weights
from torchtitan.interchange.model import PublishedModel
from torchtitan.interchange.sources import find_source, wrong_sums
from torchtitan.logging import logger
from torchtitan.parallel.object_collectives import all_gather_object, raise_on_all_ranks


class Exchange:
    """Loads and exports the weights of one run. All ranks call its methods together.

    Args:
        model: of the run; None if its family does not define its published weight names.
    """

    def __init__(self, model: PublishedModel | None) -> None:
        self.model = model

    def load(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Fills this rank's weights from a folder in Hugging Face's or Meta's format; False if it is neither.

        Raises:
            CheckpointError: on every rank, if the folder is damaged or contains another model.
        """
        source = raise_on_all_ranks(lambda: find_source(folder, None if self.model is None else self.model.naming))
        if source is None:
            return False
        assert self.model is not None  # checked by find_source
        wrong = sorted(
            {
                fault
                for part in all_gather_object(wrong_sums(folder, dist.get_rank(), dist.get_world_size()))
                for fault in part
            }
        )
        if wrong:
            raise CheckpointError(f"{folder} is damaged: {'; '.join(wrong[:3])}.")
        model = self.model
        raise_on_all_ranks(lambda: model.check(source))
        raise_on_all_ranks(lambda: load_weights(tensors, source))
        logger.info(f"loaded the weights of {folder}")
        return True

    def export(self, folder: Path, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        """Writes a new folder for `transformers`.

        Raises:
            CheckpointError: on every rank, if the folder exists or writing failed.
        """
        assert self.model is not None  # checked with the configuration
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        export(folder, shapes, tensors.__getitem__, self.model, dtype)
