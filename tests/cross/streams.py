"""A simulated GPU with streams, events, an allocator and a current device for each thread, and what is wrong there.

In a process with a simulated GPU (`simulated.py`), `Streams` stands in for `torch.cuda`'s streams while real training
code runs on fake tensors. It feeds torch's own race detector, `torch.cuda._sanitizer`, which orders what streams do by
vector clocks, and adds what that one leaves out: the allocator, the host, and threads.

- The host is one more stream, `HOST`: whatever it starts comes after what it did and waited for.
- A freed block belongs to the stream that allocated it, whose next block may take the same memory at once, whatever
  their sizes. Other streams' uses must come before the first use of the new one, or have been announced to the
  allocator (`record_stream`).
- A thread whose device was not set has another GPU as its current one.
- Collectives run on the current stream, as NCCL's do; asynchronous and functional ones on a stream of their own, and
  keep their operands until something waits for them.
"""

import contextlib
import dataclasses
import importlib
import inspect
import itertools
import sys
import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.cuda import _sanitizer
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[2]
PACKAGE, TORCH = str(ROOT / "torchtitan"), str(Path(torch.__file__).parent)
aten = torch.ops.aten

HOST = -1
OURS, OTHER = 0, 1  # this rank's GPU, and the one that is current in a new thread


def place() -> list[str]:
    """Where the code is: the innermost line of this package, and below it the line of FSDP or torch's checkpoints."""
    lines: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return [*lines, f"{Path(name).relative_to(ROOT)}:{frame.f_lineno}"]
        if not lines and name.startswith(TORCH) and ("/fsdp/" in name or "/checkpoint/" in name):
            lines.append(f"torch/{Path(name).relative_to(TORCH)}:{frame.f_lineno}")
        frame = frame.f_back
    return lines or ["the backward pass" if is_autograds() else threading.current_thread().name]


def is_autograds() -> bool:
    """Whether this thread was not started in Python."""
    return isinstance(threading.current_thread(), threading._DummyThread)


# Far shorter traces than the detector's own, which lists files' lines at each access.
_sanitizer.traceback = SimpleNamespace(  # type: ignore[assignment]
    StackSummary=SimpleNamespace(extract=lambda *_, **__: place()), walk_stack=lambda frame: None
)


def shown(access: Any) -> str:
    name = str(access.operator).split("(")[0]
    return f"{name} ({access.type} it on {Stream.names[access.stream]}, in {' < '.join(access.stack_trace)})"


class Stream:
    """`torch.cuda.Stream`."""

    names: ClassVar[dict[int, str]] = {HOST: "the host"}
    ids = itertools.count(1)
    streams: "Streams"

    def __init__(self, device: Any = None, priority: int = 0, name: str = "") -> None:
        self.device_index = self.streams.index(device)
        self.stream_id = self.cuda_stream = next(self.ids)
        self.device, self.device_type = torch.device("cuda", self.device_index), "cuda"
        self.names[self.stream_id] = name or f"the stream of {place()[0]}"
        self.streams.detector._handle_stream_creation(self.stream_id)
        self.streams.all.append(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        self.streams.detector._handle_event_wait(event.number, self.stream_id)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.streams.detector._handle_stream_synchronization(self.stream_id)

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> "Stream":
        self._entered = [*getattr(self, "_entered", []), self.streams.current_stream(self.device)]
        self.streams.set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.streams.set_stream(self._entered.pop())


class Event:
    """`torch.cuda.Event`."""

    numbers = itertools.count(1)

    def __init__(self, *args: Any, **options: Any) -> None:
        self.number = next(self.numbers)
        Stream.streams.detector._handle_event_creation(self.number)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or Stream.streams.current_stream()
        Stream.streams.detector._handle_event_record(self.number, stream.stream_id)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream.streams.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        Stream.streams.detector._handle_event_synchronization(self.number)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


@dataclasses.dataclass
class Block:
    """Memory of a tensor: from its allocation, or the last time that its storage was resized.

    Attributes:
        stream: of the allocation; HOST for pinned memory.
        told: streams that the allocator was told about.
        before: freed blocks whose memory this one may have.
        alive: calls when the storage is gone.
    """

    number: int
    stream: int
    place: list[str]
    told: set[int]
    before: "list[Freed]"
    alive: Any = None
    pinned: bool = False


@dataclasses.dataclass
class Freed:
    block: Block
    uses: list[Any]
    place: list[str]


class Detector(_sanitizer.EventHandler):
    """Torch's detector, whose clocks several threads advance: a number that two of them take at once would be lost."""

    def __init__(self, lock: Any) -> None:
        super().__init__()
        for name in dir(self):
            if name.startswith("_handle_"):
                setattr(self, name, self._locked(lock, getattr(self, name)))

    @staticmethod
    def _locked(lock: Any, handle: Callable[..., Any]) -> Callable[..., Any]:
        def handle_alone(*args: Any) -> Any:
            with lock:
                return handle(*args)

        return handle_alone


class Streams(TorchDispatchMode):
    """Within this context, and in threads started within, records what runs where.

    Attributes:
        reports: what is wrong, each once, in sentences with file and line.
        operations: how many ran on each stream, by its name.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.reports: dict[str, None] = {}
        self.operations: dict[str, int] = defaultdict(int)
        self.blocks: dict[int, Block] = {}
        self.numbers = itertools.count(1)
        self.freed: dict[int, list[Freed]] = defaultdict(list)
        # By the number of the block, or the work's id: when it has ended, and what lives until something waits for it.
        self.works: dict[int, tuple[Any, ...]] = {}
        self.lock = threading.RLock()
        self.detector = Detector(self.lock)
        self.clocks = self.detector.syncs
        self.detector._handle_stream_creation(HOST)
        self.all: list[Stream] = []
        self.local = threading.local()
        Stream.streams = self
        self.default = {index: Stream(torch.device("cuda", index), name=name) for index, name in NAMES.items()}
        self.nccl = Stream(torch.device("cuda", OURS), name="NCCL's stream")

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # so that torch.compile works within

    def report(self, sentence: str) -> None:
        self.reports[sentence] = None

    # Threads and devices

    def device(self) -> int:
        """The current one of this thread."""
        if hasattr(self.local, "device"):
            return self.local.device
        if is_autograds():  # it sets its threads' devices
            return OURS
        self.report(f"a thread whose device was not set uses its current device in {' < '.join(place())}")
        return OTHER

    def set_device(self, device: Any) -> None:
        self.local.device = self.index(device)

    def index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self.device() if index is None else index

    def current_stream(self, device: Any = None) -> Stream:
        index = self.index(device)
        return getattr(self.local, "streams", {}).get(index, self.default[index])

    def set_stream(self, stream: Stream) -> None:
        self.local.streams = {**getattr(self.local, "streams", {}), stream.device_index: stream}

    def synchronize(self, device: Any = None) -> None:
        index = self.index(device)
        for stream in self.all:
            if stream.device_index == index:
                stream.synchronize()

    # Memory

    def block_of(self, tensor: torch.Tensor, new: bool = False) -> Block:
        storage = tensor.untyped_storage()
        block = self.blocks.get(storage._cdata)
        if block is None:
            block = self._allocate(storage, tensor.device)
            if not new:
                block.place = ["an unknown place, before the check began"]
        return block

    def _allocate(self, storage: torch.UntypedStorage, device: torch.device) -> Block:
        stream = HOST if device.type == "cpu" else self.current_stream(device).stream_id
        waiting = [freed for freed in self.freed[stream] if not self._ordered(stream, freed.uses)]
        self.freed[stream] = waiting
        block = Block(next(self.numbers), stream, place(), set(), list(waiting))
        key = storage._cdata
        self.blocks[key] = block
        self.detector._handle_memory_allocation(block.number)
        block.alive = weakref.ref(storage, lambda _: self._free(key))
        return block

    def _free(self, key: int) -> None:
        with self.lock:
            self._free_block(self.blocks.pop(key))

    def _free_block(self, block: Block) -> None:
        block.alive = None
        info = self.detector.tensors_accessed.accesses.pop(block.number)
        uses = [use for use in (info.write, *info.reads) if use is not None and use.stream not in block.told]
        if block.stream != HOST and not self._ordered(block.stream, uses):
            self.freed[block.stream].append(Freed(block, uses, place()))

    def _ordered(self, stream: int, uses: list[Any]) -> bool:
        return all(self.clocks.is_ordered_after(stream, use.seq_num, use.stream) for use in uses)

    def resize(self, storage: torch.UntypedStorage, size: int) -> Any:
        changes = storage._cdata in self.blocks and size != storage.nbytes()
        result = self.originals["resize_"](storage, size)
        if changes:
            self._free(storage._cdata)
            if size:
                self._allocate(storage, torch.device("cuda", OURS))
        return result

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.block_of(tensor).told.add(stream.stream_id)

    # Operations

    def launch(self, operator: Any, stream: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        with self.lock:  # a thread that saves calls this without an operation
            self._launch(operator, stream, reads, writes)

    def _launch(self, operator: Any, stream: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        written = {self.block_of(tensor).number: self.block_of(tensor) for tensor in writes}
        read = {self.block_of(tensor).number: self.block_of(tensor) for tensor in reads}
        read = {number: block for number, block in read.items() if number not in written}
        state, host = self.clocks.current_sync_states[stream], self.clocks.current_sync_states[HOST]
        self.clocks._state_wait_for_other(state, host)
        self.operations[Stream.names[stream]] += 1
        for block in (*read.values(), *written.values()):
            for freed in block.before:
                late = [use for use in freed.uses if not self._ordered(stream, [use])]
                if late:
                    freed.uses = []  # reported once
                    self.report(
                        f"memory allocated in {' < '.join(freed.block.place)} and freed in {' < '.join(freed.place)} "
                        f"may be handed on to {' < '.join(block.place)}, for {Stream.names[stream]}, before this: "
                        f"{shown(late[0])}"
                    )
            block.before = []
        names: dict[int, list[str]] = {number: [] for number in (*read, *written)}
        launch: Any = self.detector._handle_kernel_launch
        errors = launch(stream, set(read), set(written), set(), str(operator), names)
        for error in errors:
            allocated = (read | written)[error.data_ptr].place
            self.report(
                f"memory allocated in {' < '.join(allocated)}: nothing orders {shown(error.current_access)} after "
                f"{shown(error.previous_access)}"
            )

    def host_uses(self, tensor: torch.Tensor, writes: bool = False, operator: Any = "the host") -> None:
        """Of memory that a copy has used."""
        if tensor.untyped_storage()._cdata in self.blocks:
            self.launch(operator, HOST, [] if writes else [tensor], [tensor] if writes else [])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        with self.lock:
            return self._dispatch(func, types, args, kwargs or {})

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not all(tensor_type in PLAIN for tensor_type in types):
            return NotImplemented  # a subclass such as DTensor first decomposes into plain operations
        if func is torch.ops.prim.device.default or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            self._wait_for(args[0])
            return 0
        out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if func.namespace in ("c10d", "_c10d_functional") and any(tensor.is_cuda for tensor in inputs):
            self._run_collective(func, args, kwargs, out, outputs)
        elif any(tensor.is_cuda for tensor in (*inputs, *outputs)):
            self._run(func, args, kwargs, inputs, outputs)
        else:
            for tensor in inputs:
                if not func.is_view:
                    self.host_uses(tensor, func._schema.is_mutable and tensor is inputs[0], func)
        return out

    def _wait_for(self, tensor: torch.Tensor) -> None:
        """A number that the host reads."""
        if tensor.is_cuda:
            stream = self.current_stream(tensor.device)
            self.launch("item", stream.stream_id, [tensor], [])
            stream.synchronize()
        else:
            self.host_uses(tensor)

    def _run(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        reads, writes, metadata = [], [], func.is_view
        factory = bool(_sanitizer.FACTORY_FUNCTION_REGEX.match(func._schema.name.split("::")[1]))
        for argument, value in _sanitizer.zip_arguments(func._schema, args, kwargs):
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            alias = argument.alias_info
            if (alias is not None and alias.is_write) or argument.name == WRITTEN.get(func):
                writes += tensors
            elif not (alias is not None or factory):
                reads += tensors
        if not metadata:
            known = [tensor.untyped_storage()._cdata for tensor in inputs]
            for tensor in outputs:
                if tensor.untyped_storage()._cdata not in known:
                    self.block_of(tensor, new=True)
                    if not any(word in str(func) for word in ("empty", "lift_fresh")):
                        writes.append(tensor)
        if func is aten.copy_.default and args[0] is args[1]:
            return  # does nothing
        on_gpu = [[tensor for tensor in group if tensor.is_cuda] for group in (reads, writes)]
        if not any(on_gpu):
            return
        stream = self.current_stream((*on_gpu[0], *on_gpu[1])[0].device)
        if func in (aten.copy_.default, aten._to_copy.default) and len({t.device.type for t in (*reads, *writes)}) == 2:
            self._copy(func, args, kwargs, stream, reads[-1] if func is aten._to_copy.default else args[1], writes[-1])
            return
        self.launch(func, stream.stream_id, *on_gpu)

    def _copy(
        self, func: Any, args: Any, kwargs: Any, stream: Stream, source: torch.Tensor, target: torch.Tensor
    ) -> None:
        """Between host and device. Memory of the host that is not pinned is copied in between, while the host waits."""
        asynchronous = kwargs.get("non_blocking") or (func is aten.copy_.default and len(args) > 2 and args[2])
        on_host = target if source.is_cuda else source
        pinned = self.block_of(on_host).pinned or (func is aten._to_copy.default and source.is_cuda)
        self.launch(func, stream.stream_id, [source], [target])
        if not (asynchronous and pinned):
            stream.synchronize()

    def _run_collective(self, func: Any, args: Any, kwargs: Any, out: Any, outputs: list[torch.Tensor]) -> None:
        arguments = {argument.name: value for argument, value in _sanitizer.zip_arguments(func._schema, args, kwargs)}
        tensors = {
            name: [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_cuda]
            for name, value in arguments.items()
        }
        if func.namespace == "_c10d_functional" and func._overloadpacket.__name__ == "wait_tensor":
            number = self.block_of(args[0]).number
            if number in self.works:
                self.current_stream(args[0].device).wait_event(self.works.pop(number)[0])
            return
        functional = func.namespace == "_c10d_functional"
        reads = [tensor for name, leaves in tensors.items() if name.startswith("input") for tensor in leaves]
        writes = [tensor for name, leaves in tensors.items() if not name.startswith("input") for tensor in leaves]
        if functional:
            writes = outputs
        if func._overloadpacket.__name__ == "send":
            reads, writes = writes, []
        stream = self.current_stream((*reads, *writes)[0].device)
        for tensor in outputs:
            self.block_of(tensor, new=True)
        if not functional and not arguments.get("async_op", True):
            self.launch(func, stream.stream_id, reads, writes)
            return
        self.nccl.wait_stream(stream)
        self.launch(func, self.nccl.stream_id, reads, writes)
        event = self.nccl.record_event()
        if functional:
            for tensor in outputs:
                self.works[self.block_of(tensor).number] = (event, reads)
        else:
            work = dist.Work.unbox(next(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.ScriptObject)))
            self.works[id(work)] = (event, reads, writes, work)

    def wait_for_work(self, work: Any) -> bool:
        if id(work) in self.works:
            self.current_stream().wait_event(self.works.pop(id(work))[0])
        return True

    # Entering

    def __enter__(self) -> "Streams":
        from torchtitan.checkpoint.manager import CheckpointManager

        self.originals = {"resize_": torch.UntypedStorage.resize_, "run": threading.Thread.run}
        streams = self

        @contextlib.contextmanager
        def use(stream: Stream | None) -> Iterator[None]:
            with stream or contextlib.nullcontext():
                yield

        def run(thread: threading.Thread) -> None:
            with Threads(streams):
                streams.originals["run"](thread)

        def save(tensor: torch.Tensor, file: Any) -> None:
            streams.host_uses(tensor, operator="torch.save")
            file.write(bytes(8))

        def pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
            pinned = tensor.clone()
            streams.block_of(pinned, new=True).pinned = True
            pinned.is_in_pinned_memory = True  # type: ignore[attr-defined]
            return pinned

        def stage(stager: Any, tensor: torch.Tensor, memo: Any, non_blocking: bool = False) -> torch.Tensor:
            mapping, storage = stager._cached_storage_mapping, tensor.untyped_storage()
            if storage not in mapping:
                mapping[storage] = torch.empty_like(tensor, device="cpu")
                streams.block_of(mapping[storage], new=True).pinned = stager.pin_memory
            return mapping[storage].copy_(tensor, non_blocking)

        def in_kernel(mode: FakeTensorMode) -> bool:
            return getattr(streams.local, "in_kernel", False)

        def set_in_kernel(mode: FakeTensorMode, value: bool) -> None:
            streams.local.in_kernel = value

        cuda: dict[str, Any] = {
            "Stream": Stream,
            "Event": Event,
            "stream": use,
            "current_stream": self.current_stream,
            "default_stream": lambda device=None: self.default[self.index(device)],
            "set_stream": self.set_stream,
            "current_device": self.device,
            "set_device": self.set_device,
            "synchronize": self.synchronize,
        }
        stand_ins: list[tuple[Any, str, Any]] = [
            *((torch.cuda, name, value) for name, value in cuda.items()),
            (torch, "Stream", Stream),
            (torch, "Event", Event),
            (torch, "save", save),
            # The compiler distinguishes them from torch.cuda's.
            (torch.accelerator, "current_stream", lambda device=None: self.current_stream(device)),
            (torch.accelerator, "set_stream", lambda stream: self.set_stream(stream)),
            (torch.accelerator, "synchronize", lambda device=None: self.synchronize(device)),
            (torch.Tensor, "record_stream", lambda tensor, stream: self.record_stream(tensor, stream)),
            (torch.Tensor, "pin_memory", pin_memory),
            (torch.UntypedStorage, "resize_", lambda storage, size: self.resize(storage, size)),
            (getattr(_distributed_c10d, "FakeWork", dist.Work), "wait", lambda work, *args: self.wait_for_work(work)),
            (StateDictStager, "_offload_tensor", stage),
            (threading.Thread, "run", run),
            (CheckpointManager, "_not_finite", lambda manager, dtype: ""),  # what is not computed may be anything
            # Fake tensors are not made for several threads.
            (FakeTensorMode, "in_kernel_invocation", property(in_kernel, set_in_kernel)),
        ]
        self.replaced = contextlib.ExitStack()
        for owner, name, value in stand_ins:
            self.replaced.enter_context(patch.object(owner, name, value, create=True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.replaced.close()


class Threads(TorchDispatchMode):
    """`Streams` in another thread."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return self.streams.__torch_dispatch__(func, types, args, kwargs)


NAMES = {OURS: "the compute stream", OTHER: "another GPU's stream"}
PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
WRITTEN: dict[Any, str] = {}  # arguments that the schema does not say are written


def train(
    flags: Sequence[str] = (),
    world_size: int = 1,
    model: tuple[str, str] = ("llama3", "8B"),
    microbatches: int = 1,
    save: str | None = None,
    layers: int = 3,
    faults: Sequence[tuple[str, str, str]] = (),
) -> tuple[list[str], dict[str, int]]:
    """What is wrong in two training steps of rank 0, a validation after each, and the operations on each stream.

    Args:
        microbatches: of each step.
        save: checkpoint.async_mode of a checkpoint after each step; None for none.
        layers: of the model.
        faults: see `plant`.
    """
    import steps
    from compiler import without_code

    from torchtitan.checkpoint.train_state import TrainState
    from torchtitan.engine.engine import train_step
    from torchtitan.engine.forward import evaluate

    WRITTEN[torch.ops.fsdp.all_gather_copy_in.default] = "all_gather_output"
    shape = (2, 256)
    with contextlib.ExitStack() as stack:
        for fault in faults:
            stack.enter_context(plant(*fault))
        if not {"--training.compile", "--training.document_mask"} & set(flags):
            # Roundings and updates run on the current stream, compiled or not, and this check never sees their kernels.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(without_code())  # what it would be is `steps.train`'s to look at
        engine, guard = stack.enter_context(steps.build(flags, world_size, *model, layers, shape))
        streams = stack.enter_context(Streams())
        streams.set_device(OURS)
        checkpoints = None if save is None else stack.enter_context(checkpoints_of(engine, save))
        for number in range(2):
            batches = [steps.make_batch(shape, engine.config.training.document_mask) for _ in range(microbatches)]
            train_step(engine, batches, 1e-4, guard.should_skip, number)
            for layer in steps.amax_histories([engine.model]).values():
                layer.has_scales = True
            evaluate(engine, batches[:1], lambda: False)
            if checkpoints is not None:
                checkpoints.save(number + 1, partial(TrainState, step=number + 1))
        if checkpoints is not None:
            checkpoints.wait()
            assert checkpoints.step_on_disk == 2
    return list(streams.reports), dict(streams.operations)


@contextlib.contextmanager
def checkpoints_of(engine: Any, mode: str) -> Iterator[Any]:
    """Saves in a folder of their own, of this rank alone."""
    from torch.distributed.checkpoint import utils

    from torchtitan.checkpoint import manager

    class Alone(utils._DistWrapper):
        def __init__(self, *_: Any) -> None:
            super().__init__(None, False, 0)

    config = dataclasses.replace(engine.config.checkpoint, enable_checkpoint=True, async_mode=mode)
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(state_dict_saver, "_DistWrapper", Alone),
        patch.object(manager, "all_gather_object", lambda value, *_: [value]),
        patch.object(manager, "raise_on_all_ranks", lambda read, *_: read()),
        patch.object(manager, "from_rank_0", lambda read: read()),
        patch.object(dist, "new_group", lambda **_: dist.group.WORLD),
        patch.object(dist, "barrier", lambda *_: None),
    ):
        yield manager.CheckpointManager(config, Path(folder), engine.model, engine.optimizer, {})


@contextlib.contextmanager
def plant(function: str, old: str, new: str) -> Iterator[None]:
    """Changes a line of a function of the package, such as "checkpoint.files:Writer.__init__"."""
    module, names = function.split(":")
    target: Any = importlib.import_module(f"torchtitan.{module}")
    for name in names.split("."):
        target = getattr(target, name)
    before, source = target.__code__, Path(target.__code__.co_filename).read_text()
    text = inspect.getsource(before)
    assert text.count(old) == source.count(text) == 1, old
    codes = [compile(source.replace(text, text.replace(old, new)), before.co_filename, "exec")]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    (target.__code__,) = [
        code for code in codes if (code.co_name, code.co_firstlineno) == (before.co_name, before.co_firstlineno)
    ]
    try:
        yield
    finally:
        target.__code__ = before
