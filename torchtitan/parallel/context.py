"""Context parallelism: ranks share each sequence and exchange keys and values, or heads, around attention.

Everything else in the model works token by token and only needs position ids. Llama 3 was trained with all-gathered
keys and values (arXiv 2407.21783, section 3.3.2); exchanging heads is DeepSpeed-Ulysses (arXiv 2309.14509). Both run on
any device, through torch's own attention kernels.

Shapes: B batch, H query heads, G key-value heads, S sequence, D channels of a head.
"""

from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.kernels.attention import attend
from torchtitan.kernels.dispatch import Kernel
from torchtitan.parallel.collectives import all_gather, all_to_all
from torchtitan.protocols import AttentionSpec

Method = Literal["allgather", "alltoall"]

HEADS, SEQUENCE = 1, 2  # dimensions of queries, keys and values, (B, H, S, D)


def own_positions(seq_len: int, rank: int, ranks: int, method: Method) -> torch.Tensor:
    """Position ids of this rank's tokens in each sequence: (seq_len / ranks,) int64, increasing.

    With "allgather", a rank has a chunk from the front and the mirrored chunk from the end. This balances the work:
    later tokens attend to more keys. With "alltoall", attention sees full sequences and a rank's chunk is contiguous.
    """
    if method == "alltoall":
        return torch.arange(seq_len).chunk(ranks)[rank]
    chunks = torch.arange(seq_len).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def context_parallel_attention(mesh: DeviceMesh, method: Method) -> Kernel:
    """Causal attention over queries, keys and values at `own_positions`, by the kernels of the table. Document ids
    cover full sequences. The ranks of `mesh` share a sequence."""
    rank, size, group = mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name

    def all_gather_attention(
        spec: AttentionSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        document_ids: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        k, v = all_gather(torch.stack([k, v]), SEQUENCE + 1, group).unbind()
        # Gathered order: (first, mirrored) of each rank. Sequence order: all first chunks, then the mirrored reversed.
        chunks, length = 2 * size, q.shape[SEQUENCE] // 2
        order = [*range(0, chunks, 2), *range(chunks - 1, 0, -2)]
        k, v = (torch.cat([t.chunk(chunks, SEQUENCE)[place] for place in order], SEQUENCE) for t in (k, v))
        outs = []
        for place, queries in zip((rank, chunks - 1 - rank), q.chunk(2, SEQUENCE), strict=True):
            end = (place + 1) * length
            begin = 0 if spec.window is None else max(0, end - length - spec.window + 1)
            ids = None if document_ids is None else document_ids[:, begin:]
            outs.append(attend(spec, queries, k[:, :, begin:end], v[:, :, begin:end], ids, True, sinks))
        return torch.cat(outs, SEQUENCE)

    def all_to_all_attention(
        spec: AttentionSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        document_ids: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q, k, v = (all_to_all(t, HEADS, SEQUENCE, group, size) for t in (q, k, v))
        own = None if sinks is None else sinks.chunk(size)[rank]
        return all_to_all(attend(spec, q, k, v, document_ids, sinks=own), SEQUENCE, HEADS, group, size)

    run = all_gather_attention if method == "allgather" else all_to_all_attention
    return Kernel(f"context parallelism by {method}", run, does=["documents", "window", "sinks"])
