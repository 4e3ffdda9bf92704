"""Checks that a model fits the degrees of parallelism: a sentence for each mistake."""

from collections.abc import Iterator

from torchtitan.parallel.dims import ParallelDims
from torchtitan.protocols import ModelArgs


def model_conflicts(args: ModelArgs, dims: ParallelDims, seq_len: int, rotate_method: str) -> Iterator[str]:
    """Whether degrees divide the model's sizes; where not, with degrees that do."""
    experts, ranks = None if args.moe is None else args.moe.n_experts, dims.tp * dims.cp
    for key, degree, size, noun in (
        ("tensor", dims.tp, args.n_heads, "heads"),
        ("tensor", dims.tp, args.n_kv_heads, "key-value heads"),
        ("tensor", dims.tp, getattr(args, "ffn_dim", dims.tp), "feed-forward channels"),
        ("tensor", dims.tp, args.vocab_size or 0, "tokens in the vocabulary"),  # `find_model_args` fills it in
        ("expert", dims.ep, experts or 0, "experts of a layer"),
    ):
        if size % degree:
            yield (
                f"parallelism.{key}_parallel_degree = {degree} does not divide the model's {size} {noun}; these "
                f"degrees do: {', '.join(str(fit) for fit in range(1, min(size, 128) + 1) if size % fit == 0)}."
            )
    if dims.ep > 1 and experts is None:
        yield f"parallelism.expert_parallel_degree = {dims.ep}, but this model has no experts; set it to 1."
    pieces = ranks * (2 if dims.cp > 1 and rotate_method == "allgather" else 1)
    if seq_len % pieces:
        users = [f"{name} parallelism" for name, degree in (("tensor", dims.tp), ("context", dims.cp)) if degree > 1]
        yield (
            f"training.seq_len = {seq_len} cannot be divided into {pieces} equal parts, as needed for "
            f"{' and '.join(users)}; set it to {seq_len // pieces * pieces or pieces} or "
            f"{(seq_len // pieces + 1) * pieces}."
        )
    if dims.cp > 1 and rotate_method == "alltoall" and (args.n_heads % ranks or args.n_kv_heads % ranks):
        yield (
            f"parallelism.context_parallel_rotate_method = alltoall divides the {args.n_kv_heads} key-value heads over "
            f"tensor x context parallel ranks = {dims.tp} x {dims.cp}, which do not divide them evenly; use allgather."
        )
    if dims.pp > 1 and args.tied_embeddings:
        yield (
            f"parallelism.pipeline_parallel_degree = {dims.pp}: this model's output layer shares the embedding's "
            "weight, but they would be on different stages; set it to 1."
        )
