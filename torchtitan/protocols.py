"""Function types passed between layers of the architecture.

Shapes: T tokens, V vocabulary.
"""

from collections.abc import Callable

from torch import Tensor

AttentionFunction = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Causal attention of (q, k, v, document_ids): `models.attention.causal_attention` or its context-parallel form."""

CrossEntropyFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From (T, V) logits and (T,) labels: the cross-entropy summed over tokens, in float32, and its gradient with respect
to the logits, in their dtype. May overwrite the logits."""

IGNORE_INDEX = -100
"""Label of positions without a loss; the default of torch's cross_entropy."""
