"""Operand formats of low-precision GEMMs: how a tensor is rounded, and how two rounded tensors are multiplied.

A linear layer of K inputs and N outputs computes three GEMMs of three tensors. For M tokens:

    output       (M, N) = x (M, K) @ weight (N, K).T             sums over K
    grad_input   (M, K) = grad_output (M, N) @ weight (N, K)     sums over N
    grad_weight  (N, K) = grad_output (M, N).T @ x (M, K)        sums over M

So each tensor is an operand of two GEMMs: one that sums over its columns ("rows" below: each row is rounded by itself)
and one that sums over its rows ("columns"). A scale can be taken out of a sum only if it is the same for all terms, so
a GEMM's operands have one scale per row or column, per block of the summed dimension, or one per tensor. Only the last
kind rounds a tensor to the same numbers for both GEMMs.

Layers of experts compute the same for each expert: x and grad_output are the rows of all experts, sorted by expert,
with the `ends` of each expert's rows, (E,) int32, and the weight is (E, N, K). Where `ends` is None, there is one
weight.
"""

import math
from typing import Any, Literal, NamedTuple, Protocol

import torch

from torchtitan.converters.converter import ProfilerOp
from torchtitan.converters.gather import GatheredTensor, gathered_operand
from torchtitan.device import HAS_TRITON
from torchtitan.kernels import grouped_8bit, rounding
from torchtitan.kernels.block_formats import ELEMENTS, BlockFormat, known_error, round_to_blocks, times
from torchtitan.kernels.block_formats import quantize_blocks as quantize_blocks
from torchtitan.kernels.grouped_gemm import grouped_mm, grouped_mm_over_rows
from torchtitan.kernels.matmul_8bit import as_right
from torchtitan.kernels.packed_blocks import Packed, block_mm, pack_blocks, pack_both
from torchtitan.kernels.quantize import (
    Kept,
    Quantized,
    ScaleRecipe,
    float8_scale,
    quantize,
    quantize_both,
    quantize_columns,
    quantize_columns_again,
    quantize_rows,
    quantize_weight,
    quantize_with,
    round_to_float8,
    scale_by,
)

Ends = torch.Tensor | None


class Scaled(NamedTuple):
    """An operand before and after rounding; both float32, in units of the format.

    Attributes:
        exact: the operand times its scale.
        rounded: the nearest number of the format.
        largest: largest number of the format; larger ones saturate.
    """

    exact: torch.Tensor
    rounded: torch.Tensor
    largest: float


class Rounded(NamedTuple):
    """An operand of an emulated GEMM: rounded to its format, in its own dtype."""

    data: torch.Tensor


Operand = Quantized | Packed | Rounded


class BothOperands(NamedTuple):
    """A tensor rounded for its two GEMMs. None: that GEMM uses the tensor itself, or rounds it later.

    rows: for the GEMM that sums over its columns.
    columns: for the GEMM that sums over its rows.
    ends: of the experts' rows in `columns`, which some kernels fill up.
    """

    rows: Operand | None
    columns: Operand | None
    ends: Ends


class Amax(NamedTuple):
    """Delayed scaling of one tensor.

    scale: scalar known from previous steps; None: a dynamic one.
    record: scalar updated to the largest amax seen; None records nothing.
    """

    scale: torch.Tensor | None
    record: torch.Tensor | None

    def scale_of(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The scale to round x with. Records the amax of x."""
        if self.scale is not None and self.record is None:
            return self.scale
        amax = rounding.amax(x).amax()
        if self.record is not None:
            self.record.copy_(torch.maximum(self.record, amax))
        return float8_scale(amax, dtype) if self.scale is None else self.scale


class Gathering(Protocol):
    """How tensor parallelism gathers tokens (`parallel.rounded_collectives`).

    all_gather: concatenates the shards of all ranks, along the dimension of tokens.
    largest: the largest of a scalar on all ranks.
    source: dimension and group of `all_gather`.
    """

    source: tuple[int, str]

    def all_gather(self, x: torch.Tensor) -> torch.Tensor: ...

    def largest(self, x: torch.Tensor) -> torch.Tensor: ...


class EightBit(NamedTuple):
    """int8 or float8 numbers with float32 scales: amax / 127 (int8), amax / 448 (e4m3), amax / 57344 (e5m2).

    Attributes:
        dtype: of the numbers.
        scales: rowwise: one per row of `BothOperands.rows` and per column of `.columns`; of float8, rounded to powers
            of two. tensorwise: one per tensor.
        columns_scales: the same for a weight in `.columns` alone, if it differs: torchao's rowwise_with_gw_hp has one
            power of two.
        emulate: multiply in float32 (float8) or float64 (int8) instead of 8 bits.
    """

    dtype: torch.dtype
    scales: ScaleRecipe
    columns_scales: ScaleRecipe | None = None
    emulate: bool = False

    @property
    def error(self) -> float:
        """Relative rounding error (2-norm) on normally distributed data."""
        return ERRORS_8_BIT[self.dtype, self.scales]

    def op(self, where: "Where", experts: bool) -> ProfilerOp:
        return OPS["int8" if self.dtype == torch.int8 else "float8", where][experts]

    @property
    def rounds_twice(self) -> bool:
        """Whether a weight gradient can use columns of rows that are rounded already: without error if there is one
        scale, or if scales are powers of two. Columns of int8 that are small beside others in their rows would be lost
        (docs/measurements/parallelism.md)."""
        return self.scales == "tensorwise" or self.dtype.is_floating_point

    def gather(self, x: torch.Tensor, collectives: "Gathering", keep_shard: bool) -> torch.Tensor:
        """Rounds this rank's tokens, (..., columns), and gathers 8-bit numbers and scales of all tokens. Rows are
        tokens, so their scales need no communication; one scale needs the amax over all ranks.

        Args:
            keep_shard: for GEMMs in high precision, which gather it when they come.
        """
        flat = x.flatten(0, -2)
        if self.scales == "tensorwise":
            scale, scale_inverse = scale_by(collectives.largest(rounding.amax(flat).amax()), "tensorwise", self.dtype)
            data = rounding.round_to(flat, scale, self.dtype).view(x.shape)
        else:
            rows = quantize(flat, self.scales, self.dtype)
            data = rows.data.view(x.shape)
            scale_inverse = collectives.all_gather(rows.scale_inverse.view(*x.shape[:-1], 1))
        tensors = [collectives.all_gather(data), scale_inverse, *([x] if keep_shard else [])]
        return GatheredTensor(tensors, self.scales, x.dtype, collectives.source if keep_shard else None)

    @property
    def fuses_collectives(self) -> bool:
        """Whether torch has operators that overlap its GEMMs with a collective: `symm_mem.fused_all_gather_scaled_
        matmul` and `fused_scaled_matmul_reduce_scatter`, which call `_scaled_mm`."""
        return self.dtype.is_floating_point and not self.emulate

    def round(
        self,
        x: torch.Tensor,
        ends: Ends = None,
        rows: bool = True,
        columns: bool = True,
        inputs: int = 0,
        amax: Amax | None = None,
    ) -> BothOperands:
        """Rounds x or grad_output, (..., rows, columns).

        Args:
            rows, columns: which operands are needed.
            inputs: of the layer, if this is its grad_output; 0 for x.
            amax: delayed scaling.
        """
        if not (rows or columns):
            return BothOperands(None, None, ends)
        if ends is not None and not columns:
            return BothOperands(grouped_8bit.round_expert_rows(x, self.dtype), None, ends)
        if ends is not None:
            by_row, by_column, ends = grouped_8bit.round_rows_and_columns(x, ends, self.dtype, self.emulate)
            return BothOperands(by_row if rows else None, by_column, ends)
        # A GPU takes the operands of a sum over rows transposed; `grad_weight` transposes grad_output's itself.
        laid_out = (lambda operand: operand) if inputs else as_right
        known_rows = gathered_operand(x)
        gathered = None if known_rows is None else known_rows.flatten()
        if self.scales == "tensorwise":
            low = gathered or self._one_scale(x.flatten(0, -2), amax)
            return BothOperands(low, laid_out(low) if columns else None, None)
        if gathered is not None:
            known_columns = gathered_operand(x, columns=True)
            if columns and known_columns is None:  # they are rounded twice
                known_columns = laid_out(quantize_columns_again(*gathered, self.scales, self.dtype))
            return BothOperands(gathered, known_columns if columns else None, None)
        x = x.flatten(0, -2)
        if not columns:
            return BothOperands(quantize(x, self.scales, self.dtype), None, None)
        if not rows:
            return BothOperands(None, laid_out(quantize_columns(x, self.scales, self.dtype)), None)
        if inputs:
            return BothOperands(*grouped_8bit.round_gradient(x, inputs, self.dtype), None)
        by_row, by_column = quantize_both(x, self.scales, self.dtype)
        return BothOperands(by_row, as_right(by_column), None)

    def _one_scale(self, x: torch.Tensor, amax: Amax | None) -> Quantized:
        if amax is None:
            return quantize(x, "tensorwise", self.dtype)
        return round_to_float8(x, amax.scale_of(x, self.dtype), self.dtype)

    def round_weight(
        self, weight: torch.Tensor, columns_follow: bool, amax: Amax | None, kept: Kept | None
    ) -> tuple[Quantized, torch.Tensor | None]:
        """The weight for the output GEMM, and what `round_weight_again`, if that follows, can use: a scale, or inverses
        of scales."""
        gathered = gathered_operand(weight)
        if gathered is not None:
            return gathered, None
        if amax is not None:
            scale = amax.scale_of(weight, self.dtype)
            return round_to_float8(weight, scale, self.dtype), scale

        def rounded(w: torch.Tensor) -> tuple[Quantized, torch.Tensor | None]:
            if w.dim() == 3:
                return grouped_8bit.round_weight(w, self.dtype)
            if columns_follow and self.columns_scales is None:
                return quantize_rows(w, self.scales, self.dtype)
            return quantize(w, self.scales, self.dtype), None

        return quantize_weight(weight, (self, "rows", columns_follow), rounded, kept)

    def round_weight_again(
        self, weight: torch.Tensor, known: torch.Tensor | None, amax: Amax | None, kept: Kept | None
    ) -> Quantized:
        """The weight for the input gradient. A copy kept since the forward pass would take memory even after FSDP has
        freed the gathered weight. `known` is from `round_weight`."""
        if amax is not None:
            assert known is not None
            return as_right(round_to_float8(weight, known, self.dtype))
        if (gathered := gathered_operand(weight, columns=True)) is not None:
            return as_right(gathered)
        if isinstance(weight, GatheredTensor):
            weight = weight.dequantize_all()
        return quantize_weight(weight, (self, "columns"), lambda w: self._columns(w, known, kept), kept)

    def _columns(self, weight: torch.Tensor, known: torch.Tensor | None, kept: Kept | None) -> Quantized:
        if weight.dim() == 3:  # `grouped_matmul` lays it out
            return grouped_8bit.round_columns(weight, self.dtype, known)
        return as_right(self._columns_of_matrix(weight, known, kept))

    def _columns_of_matrix(self, weight: torch.Tensor, known: torch.Tensor | None, kept: Kept | None) -> Quantized:
        if known is not None:
            return Quantized(quantize_with(weight, known, self.dtype), known)
        if self.scales == "tensorwise":  # the data of the output GEMM in another layout
            return self.round_weight(weight, True, None, kept)[0]
        return quantize_columns(weight, self.columns_scales or self.scales, self.dtype)

    def output(self, x: Quantized, weight: Quantized, dtype: torch.dtype, ends: Ends) -> torch.Tensor:
        """A GPU may accumulate float8 in reduced precision, as torchao's recipes do for outputs."""
        return grouped_8bit.grouped_matmul(x, weight.transpose(), ends, dtype, self.emulate, fast=True)

    def grad_input(self, grad: Quantized, weight: Quantized, dtype: torch.dtype, ends: Ends) -> torch.Tensor:
        return grouped_8bit.grouped_matmul(grad, weight, ends, dtype, self.emulate)

    def grad_weight(self, grad: Quantized, x: Quantized, dtype: torch.dtype, ends: Ends) -> torch.Tensor:
        return grouped_8bit.grouped_matmul_over_rows(grad, x, ends, dtype, self.emulate)

    def scaled(self, x: torch.Tensor) -> Scaled:
        """A float32 operand, (rows, columns), of a GEMM that sums over its columns."""
        amax = x.abs().amax(1, keepdim=True)
        scale, _ = scale_by(amax.amax() if self.scales == "tensorwise" else amax, self.scales, self.dtype)
        largest = rounding.INT8_LARGEST if self.dtype == torch.int8 else torch.finfo(self.dtype).max
        return Scaled(x * scale, rounding.round_to(x, scale, self.dtype).float(), largest)


class Blocks(NamedTuple):
    """A block-scaled format (`kernels/block_formats.py`), multiplied by a GPU (`kernels/packed_blocks.py`) or emulated:
    operands are rounded along the dimension that the GEMM sums over, then multiplied in their own dtype.

    Attributes:
        form: of operands of the output and the input gradient.
        over_tokens: of operands of the weight gradient, which may be transformed.
    """

    form: BlockFormat
    over_tokens: BlockFormat
    emulate: bool = False

    @property
    def fuses_collectives(self) -> bool:
        return False

    @property
    def error(self) -> float:
        return known_error(self.form)

    def op(self, where: "Where", experts: bool) -> ProfilerOp:
        return OPS["blocks", where][experts]

    def round(
        self, x: torch.Tensor, ends: Ends = None, rows: bool = True, columns: bool = True, **_: object
    ) -> BothOperands:
        """As `EightBit.round` does; there is no delayed scaling."""
        x = x.flatten(0, -2)
        if self.emulate:
            by_row = Rounded(round_to_blocks(x, self.form)) if rows else None
            if columns and ends is not None:  # blocks are of one expert's rows; the last one is filled up with zeros
                x, ends = grouped_8bit.pad_groups(x, ends, self.form.columns)
            return BothOperands(by_row, Rounded(round_to_blocks(x.t(), self.over_tokens)) if columns else None, ends)
        if rows and columns:
            return BothOperands(*pack_both(x, self.form, self.over_tokens), ends)
        return BothOperands(
            pack_blocks(x, self.form) if rows else None, pack_blocks(x.t(), self.over_tokens) if columns else None, ends
        )

    def round_weight(
        self, weight: torch.Tensor, columns_follow: bool, amax: Amax | None, kept: Kept | None
    ) -> tuple[Operand, None]:
        if self.emulate:
            return Rounded(round_to_blocks(weight, self.form)), None
        return quantize_weight(weight, (self, "rows"), lambda w: pack_blocks(w, self.form), kept), None

    def round_weight_again(
        self, weight: torch.Tensor, known: torch.Tensor | None, amax: Amax | None, kept: Kept | None
    ) -> Operand:
        if self.emulate:
            return Rounded(round_to_blocks(weight.mT, self.form))
        return quantize_weight(weight, (self, "columns"), lambda w: pack_blocks(w.t(), self.form), kept)

    def output(self, x: Any, weight: Any, dtype: torch.dtype, ends: Ends) -> torch.Tensor:
        return grouped_mm(x.data, weight.data.mT, ends) if self.emulate else block_mm(x, weight, dtype)

    def grad_input(self, grad: Any, weight: Any, dtype: torch.dtype, ends: Ends) -> torch.Tensor:
        return self.output(grad, weight, dtype, ends)

    def grad_weight(self, grad: Any, x: Any, dtype: torch.dtype, ends: Ends) -> torch.Tensor:
        if self.emulate:
            return grouped_mm_over_rows(grad.data.t(), x.data.t(), ends)
        return block_mm(grad, x, dtype)

    def scaled(self, x: torch.Tensor) -> Scaled:
        blocks = quantize_blocks(x, self.form)
        return Scaled(times(x, blocks.factor, self.form), blocks.data, ELEMENTS[self.form.element].largest)


OperandFormat = EightBit | Blocks
Gather = tuple[EightBit, bool]
"""The format in which to gather, and whether to keep this rank's shard in high precision."""

# Measured with the layers of tests/unit/test_float8.py and test_int8.py.
ERRORS_8_BIT = {
    (torch.float8_e4m3fn, "rowwise"): 0.0258,
    (torch.float8_e4m3fn, "tensorwise"): 0.0262,
    (torch.float8_e5m2, "rowwise"): 0.052,
    (torch.float8_e5m2, "tensorwise"): 0.053,
    (torch.int8, "rowwise"): 0.0073,
    (torch.int8, "tensorwise"): 0.0099,
}

Where = Literal["cpu", "gpu", "emulated"]
_GROUPED_FLOAT8 = ProfilerOp("torchtitan::grouped_8bit_mm", ("c10::Float8_e4m3fn",))
_GROUPED_INT8 = ProfilerOp("torchtitan::grouped_8bit_mm", ("signed char",))
# An emulated GEMM rounds both operands, then multiplies in high precision.
EMULATED_BLOCKS = ProfilerOp("torchtitan::round_to_blocks", per_gemm=2)
_INT8_MM_TRITON = ProfilerOp("torchtitan::int8_mm", kernel="int8_gemm_kernel")
# How the profiler shows the GEMMs of a layer, and of a layer of experts.
OPS: dict[tuple[str, Where], tuple[ProfilerOp, ProfilerOp]] = {
    ("float8", "cpu"): (ProfilerOp("torchtitan::float8_mm"), _GROUPED_FLOAT8),
    ("float8", "gpu"): (ProfilerOp("aten::_scaled_mm"), _GROUPED_FLOAT8),
    ("float8", "emulated"): (ProfilerOp("torchtitan::emulated_float8_mm"), _GROUPED_FLOAT8),
    ("int8", "cpu"): (ProfilerOp("torchtitan::int8_mm"), _GROUPED_INT8),
    ("int8", "gpu"): (_INT8_MM_TRITON if HAS_TRITON else ProfilerOp("aten::_int_mm"), _GROUPED_INT8),
    ("int8", "emulated"): (ProfilerOp("aten::mm", ("double",)), _GROUPED_INT8),
    ("blocks", "gpu"): (ProfilerOp("torchtitan::block_mm"), ProfilerOp("aten::_scaled_grouped_mm")),
    ("blocks", "emulated"): (EMULATED_BLOCKS, EMULATED_BLOCKS),
}


class Gemms(NamedTuple):
    """How a layer computes its three GEMMs.

    Attributes:
        x, weight, grad_output: formats of its three tensors, all of the same class.
        output, grad_input, grad_weight: whether these GEMMs are in these formats; else they stay in high precision.
    """

    x: OperandFormat
    weight: OperandFormat
    grad_output: OperandFormat
    output: bool = True
    grad_input: bool = True
    grad_weight: bool = True

    def emulated(self) -> "Gemms":
        x, weight, grad_output = (form._replace(emulate=True) for form in (self.x, self.weight, self.grad_output))
        return self._replace(x=x, weight=weight, grad_output=grad_output)

    def gathers(self, overlaps: bool) -> "tuple[Gather | None, Gather | None]":
        """How tensor parallelism rounds and gathers x of colwise layers, and grad_output of rowwise ones; None: it
        gathers them in high precision.

        Args:
            overlaps: a GEMM hides an all-gather of its left operand. Then a weight gradient that needs high precision
                gets one of its own; otherwise the GEMMs share the one in high precision.
        """

        def gather(form: OperandFormat, uses_rows: bool) -> Gather | None:
            if not (isinstance(form, EightBit) and uses_rows):
                return None
            keep_shard = not (self.grad_weight and form.rounds_twice)
            return None if keep_shard and not (overlaps and form.fuses_collectives) else (form, keep_shard)

        return gather(self.x, self.output), gather(self.grad_output, self.grad_input)

    def round_input(self, x: torch.Tensor, ends: Ends, trains: bool, amax: Amax | None = None) -> BothOperands:
        """`trains`: a backward pass follows."""
        if isinstance(self.x, Blocks) and self.x.emulate:  # x is kept as it is, and rounded in each pass
            return BothOperands(None, None, ends)
        return self.x.round(x, ends, self.output, self.grad_weight and trains, amax=amax)

    def errors(self) -> tuple[float | None, float | None, float | None]:
        """Known relative errors of the GEMMs; the errors of two operands are independent."""
        x, weight, grad = self.x.error, self.weight.error, self.grad_output.error
        return (
            math.hypot(x, weight) if self.output else None,
            math.hypot(grad, weight) if self.grad_input else None,
            math.hypot(grad, x) if self.grad_weight else None,
        )
