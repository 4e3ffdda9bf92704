"""A `torch.autograd.Function` whose `apply` has a type, which torch leaves out."""

from collections.abc import Callable
from typing import ClassVar

import torch


class Function(torch.autograd.Function):
    """A differentiable operation that returns one tensor."""

    apply: ClassVar[Callable[..., torch.Tensor]]
