"""Graphs as the compiler lowers them for a simulated GPU (`lowering.py`), and their Triton kernels."""

import math
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from compiler import bytes_of, launches, on_lowered, operator_of


@dataclass(frozen=True)
class Operand:
    """Of an operator that is called in place of a kernel."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    dtype: str


@dataclass(frozen=True)
class Call:
    """An operator that lowered code calls: a GEMM, attention, a collective."""

    operator: str
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class Lowered:
    """One lowered graph.

    Attributes:
        code: the generated Python code, with its Triton kernels.
        backward: whether it is the backward pass of another.
        bytes: that kernels and calls read and write, as the compiler counts them.
        kernels: launches of Triton kernels.
        calls: in the order in which they run.
        masks: shapes of boolean tensors that may be masks of queries x keys, whether or not they reach memory.
    """

    code: str
    backward: bool
    bytes: int
    kernels: int
    calls: tuple[Call, ...]
    masks: tuple[tuple[int, ...], ...]

    @property
    def is_block(self) -> bool:
        """Whether it has GEMMs, as transformer blocks have, unlike other compiled code."""
        return any("mm" in call.operator for call in self.calls)


MASK = range(1024, 2**16)  # queries and keys of a mask


def record() -> list[Lowered]:
    """A list to which each graph is added that the compiler lowers from now on."""
    graphs: list[Lowered] = []

    def take(graph: Any, code: str) -> None:
        graphs.append(
            Lowered(
                code,
                bool(graph.is_backward),
                sum(map(bytes_of, graph.scheduler.nodes)),
                launches(code),
                tuple(_calls(graph)),
                tuple(_masks(graph)),
            )
        )

    on_lowered(take)
    return graphs


def _calls(graph: Any) -> Iterator[Call]:
    for node in graph.scheduler.nodes:
        operator = operator_of(node)
        if operator is not None:
            operands = [
                Operand(
                    tuple(_number(size) for size in operand.get_size()),
                    tuple(_number(stride) for stride in operand.get_stride()),
                    str(operand.get_dtype()).removeprefix("torch."),
                )
                for operand in node.node.inputs
                if hasattr(operand, "get_stride") and operand.maybe_get_layout() is not None
            ]
            yield Call(operator, tuple(operands))


def _masks(graph: Any) -> Iterator[tuple[int, ...]]:
    import torch

    for node in graph.orig_gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
            shape = tuple(_number(size) for size in value.shape)
            if is_mask(shape):
                yield shape


def is_mask(shape: Sequence[Any]) -> bool:
    return len(shape) >= 2 and all(not isinstance(size, int) or size in MASK for size in shape[-2:])


def _number(size: Any) -> Any:
    """A size as an int, or as text if it is symbolic."""
    try:
        return int(size)
    except (TypeError, ValueError):
        return str(size)


def spills(lowered: Lowered, all_configurations: bool = False) -> dict[str, str]:
    """Compiles the Triton kernels of lowered code for the simulated GPU.

    Args:
        all_configurations: those that would be timed against each other on the GPU; else only the first of each kernel.

    Returns:
        For each kernel that spills registers to local memory, by name, the resources that it uses.
    """
    spilling = {}
    for name, kernel, source in kernels(lowered):
        for binary in binaries(source, kernel, all_configurations):
            usage = resource_usage(binary["cubin"])
            if spilled(usage):
                spilling[name] = " ".join(usage.split())
    return spilling


def kernels(lowered: Lowered) -> list[tuple[str, str, str]]:
    """The Triton kernels of lowered code: name there, name in the source, source."""
    return re.findall(r"(\w+) = async_compile\.triton\('(\w+)', '''(.*?)'''", lowered.code, re.S)


MANY = 2**20  # numbers: fewer are done before a kernel is launched
ONE_BYTE = re.compile(r"\*(?:fp8|[iu]8)")
BY_ROW, BY_COLUMN = re.compile(r"load\(\w+ \+ \(r0_\d+ \+ "), re.compile(r"(?:\d|ks\d+)\*r0_")


def slow_parts(source: str) -> set[str]:
    """What has cost milliseconds in a kernel of the compiler's, if done for each of many numbers.

    - "float64": arithmetic in float64, of which GPUs have few units, or none.
    - "divisor": an index is divided by a size that is known at run time only.
    - "transposed": a loop along rows writes results of one byte column by column: a sector of memory for each.
    - "float32": a loop writes float32 numbers that the next one reads; the compiler does not count these bytes.
    """
    hints, found = re.search(r"size_hints=\{(.*?)\}", source), set[str]()
    if hints and math.prod(map(int, re.findall(r": (\d+)", hints[1]))) < MANY:  # several in one have none
        return found
    types = dict(re.findall(r"'(\w+)': '(\*\w+)'", source))
    reduces, loops = "r0_index" in source, " in tl.range(" in source
    varies, written = set[str](), set[str]()  # values that are not the same for all numbers; float32 results
    for line in source.splitlines():
        often = line.startswith(" " * 8) or not loops  # of a kernel with loops, only what is in them
        if assigned := re.match(r"\s+(tmp\d+) = (.*)", line):
            value, expression = assigned.groups()
            places = re.search(r"tl\.load\(\w+ \+ (.*)", expression)
            index = places[1] if places else ""
            if not re.search(r", 1\)\[:, None\]|promote_to_tensor", expression) and (  # a reduction has ended
                re.search(r"\br0_\d" if reduces else r"\b[xyz]\d", index)
                or varies & set(re.findall(r"\btmp\d+", expression))
            ):
                varies.add(value)
                if often and "tl.float64" in expression:
                    found.add("float64")
        if often and re.search(r"(?://|%) .*\bks\d", line):
            found.add("divisor")
        if access := re.search(r"tl\.(load|store)\((\w+) \+ (.*)", line):
            action, pointer, index = access.groups()
            if action == "load" and pointer in written:
                found.add("float32")
            if action == "store" and loops and often and "r0_" in index:
                if types.get(pointer) == "*fp32":
                    written.add(pointer)
                if ONE_BYTE.match(types.get(pointer, "")) and BY_COLUMN.search(index) and BY_ROW.search(source):
                    found.add("transposed")
    return found


def spilled(usage: str) -> bool:
    """Whether a binary uses local memory, by what cuobjdump says."""
    local = re.findall(r"(?:STACK|LOCAL):(\d+)", usage)
    return not local or any(map(int, local))


def binaries(source: str, name: str, all_configurations: bool) -> list[dict[str, Any]]:
    """Compiles a Triton kernel of the compiler's, in each of its configurations, or the first: "ptx" and "cubin"."""
    import triton
    from torch._inductor.codecache import PyCodeCache
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tuner = getattr(PyCodeCache.load(source), name)
    compiled = []
    for config in tuner.configs[: None if all_configurations else 1]:
        meta = tuner._create_compile_meta(config)
        binary = triton.compile(
            ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0]),
            target=GPUTarget("cuda", meta["cc"], 32),
            options=tuner._create_compile_options(config, meta),
        )
        compiled.append(binary.asm)
    return compiled


def resource_usage(cubin: bytes) -> str:
    """Registers and memory of a binary, as NVIDIA's cuobjdump, which comes with Triton, prints them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
