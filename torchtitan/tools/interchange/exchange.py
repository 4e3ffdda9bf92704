"""Published folders as used by a checkpoint manager: to load initially, and to export."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan.checkpoint.state_dict import refuse_not_finite, without_mtp
from torchtitan.checkpoint.tokenizer import check_published_tokenizer
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import CheckpointError
from torchtitan.logging import Waiting, logger
from torchtitan.parallel.object_collectives import all_gather_object, raise_on_all_ranks
from torchtitan.parallel.sharded_tensors import local_box, local_tensor
from torchtitan.protocols import ModelArgs
from torchtitan.tools.interchange.export import export, require_no_bias
from torchtitan.tools.interchange.model import PublishedModel
from torchtitan.tools.interchange.sources import WeightSource, find_source, longest_sequence, wrong_sums


@dataclass(eq=False)
class Exchange:
    """Loads and exports the weights of one run. All ranks call its methods together."""

    model: PublishedModel | None  # the run's; None if its family does not define its published weight names
    tokenizer: Tokenizer | None = None  # the run's, which folders to load must have; None: any

    def record_args(self, args: ModelArgs | None, seq_len: int) -> None:
        """Exports from here on have these sizes (None: as before), for sequences of at least `seq_len` tokens."""
        if self.model is not None:
            longest = max(seq_len, self.model.seq_len)
            self.model = replace(self.model, args=args or self.model.args, seq_len=longest)

    def find(self, folder: Path) -> WeightSource | None:
        """A folder in Hugging Face's or Meta's format, or None. A damaged one is a CheckpointError on every rank."""
        source = raise_on_all_ranks(lambda: find_source(folder, None if self.model is None else self.model.naming))
        if source is not None:
            of_ranks = all_gather_object(wrong_sums(folder, dist.get_rank(), dist.get_world_size()))
            if wrong := sorted(chain.from_iterable(of_ranks)):
                raise CheckpointError(f"{folder} is damaged: {'; '.join(wrong[:3])}.")
        return source

    def load(self, source: WeightSource, tensors: Mapping[str, torch.Tensor]) -> int:
        """Fills this rank's weights. Returns the longest sequence that they were trained on, by the folder, or 0 if it
        does not say. Another model or tokenizer or a read error is a CheckpointError on every rank."""
        assert self.model is not None  # checked by find
        model, tokenizer = self.model, self.tokenizer
        raise_on_all_ranks(lambda: model.check(source))
        if tokenizer is not None:
            remedy = "; or, to train these weights on other ids, set --checkpoint.exclude_from_loading=tokenizer"
            size = model.args.vocab_size
            raise_on_all_ranks(
                lambda: check_published_tokenizer(source.folder, tokenizer, size, "model.tokenizer_path", remedy)
            )
        weights = {name: tensor for name, tensor in tensors.items() if name in model.shapes}
        raise_on_all_ranks(lambda: load_weights(weights, source))
        logger.info(f"loaded the weights of {source.folder}")
        return raise_on_all_ranks(lambda: longest_sequence(source.folder) or 0)

    def export(
        self,
        folder: Path,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Writes a new folder for `transformers`. Ranks wait in `group` while others write. Raises a CheckpointError on
        every rank if the folder exists or writing failed."""
        assert self.model is not None  # checked with the configuration
        model = self.model
        without_mtp(chain.from_iterable(all_gather_object([*tensors])), folder)
        biases = [tensor for name, tensor in tensors.items() if name in model.unpublished]
        raise_on_all_ranks(lambda: require_no_bias(biases))
        shapes = {name: tensor.shape for name, tensor in tensors.items() if name in model.shapes}
        export(folder, shapes, tensors.__getitem__, model, dtype, group=group)


@torch.no_grad()
def load_weights(tensors: Mapping[str, torch.Tensor], source: WeightSource) -> None:
    """Fills the tensors, or this rank's shards of DTensors, by name; each rank reads only what it holds. Raises a
    CheckpointError if a weight cannot be read, or has numbers that are not finite."""
    bad = []
    for name, tensor in Waiting.over(list(tensors.items()), f"loading {source.folder}", "weights"):
        part = source.read(name, local_box(tensor))
        if not part.isfinite().all():
            bad.append(name)
        local_tensor(tensor).copy_(part)
    refuse_not_finite(source.folder, bad, "Download or export it again.")
