"""Makes Triton's interpreter several times as fast, for good, in the process that imports this module.

- Reductions and scans combine slices, in the order of a tree, as GPUs do. The interpreter's own call their function for
  each number.
- A function that a kernel calls finds the language prepared for the interpreter, which prepared it in every call.
- Sums and products of integers are not computed once more in 64 bits to see whether they overflow.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import ReduceOps, ScanOps, TensorHandle


def _combine(function: Callable[..., Any], first: list[Any], second: list[Any], types: Sequence[Any]) -> list[Any]:
    """What the function makes of each pair of numbers in two groups of arrays."""
    operands = [
        tl.tensor(TensorHandle(array, dtype.scalar), tl.block_type(dtype.scalar, list(array.shape)))
        for array, dtype in zip((*first, *second), (*types, *types), strict=True)
    ]
    results = function(*operands)
    return [result.handle.data for result in (results if isinstance(results, tuple) else (results,))]


def _reduce(self: Any, inputs: Sequence[Any]) -> list[Any]:
    everything, dimensions = self.axis is None, len(inputs[0].shape)
    axis, types = self.axis or 0, [value.dtype for value in inputs]
    arrays = [value.handle.data.reshape(-1) if everything else value.handle.data for value in inputs]
    arrays = [np.moveaxis(array, axis, 0) for array in arrays]
    while len(arrays[0]) > 1:  # a power of two
        pairs = [array[0::2] for array in arrays], [array[1::2] for array in arrays]
        arrays = _combine(self.combine_fn.fn, *pairs, types)
    results = [array[0] for array in arrays]
    if self.keep_dims:
        shape = (1,) * dimensions
        results = [result.reshape(shape) if everything else np.expand_dims(result, axis) for result in results]
    return [self.to_tensor(result, dtype) for result, dtype in zip(results, types, strict=True)]


def _scan(self: Any, inputs: Sequence[Any]) -> list[Any]:
    types = [value.dtype for value in inputs]
    arrays = [np.moveaxis(value.handle.data, self.axis, 0) for value in inputs]
    distance = 1
    while distance < len(arrays[0]):
        before = [np.roll(array, distance, 0) for array in arrays]  # the first of them are not used
        combined = _combine(self.combine_fn.fn, before, arrays, types)
        arrays = [
            np.concatenate((array[:distance], more[distance:])) for array, more in zip(arrays, combined, strict=True)
        ]
        distance *= 2
    return [self.to_tensor(np.moveaxis(array, 0, self.axis), dtype) for array, dtype in zip(arrays, types, strict=True)]


_prepare: Any = interpreter._patch_lang
_LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # of a function that uses both modules


def _prepare_once(function: Any) -> Any:
    return _prepare(_LANGUAGE) if tl.core.is_builtin(tl.load) or tl.core.is_builtin(tl.core.load) else None


ReduceOps.generic_reduce, ScanOps.generic_scan = _reduce, _scan
interpreter._patch_lang = _prepare_once
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
