"""Types of functions that one layer of the architecture hands to another.

Shapes: T tokens, V vocabulary.
"""

from collections.abc import Callable

from torch import Tensor

AttentionFunction = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Causal attention of (q, k, v, document_ids): `models.attention.causal_attention`, or its context-parallel form."""

CrossEntropyFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From (T, V) logits and (T,) labels to the sum over tokens of the cross-entropy, in float32, and its
gradient by the logits, in their dtype. It may overwrite the logits."""

IGNORE_INDEX = -100
"""Label of a position that has no loss; the default of torch's cross_entropy."""
