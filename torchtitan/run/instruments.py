"""What measures and records a run while it trains: profiler, metrics reporter, garbage collection."""

import contextlib
import dataclasses
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from torchtitan.data import Batch
from torchtitan.engine.engine import Engine
from torchtitan.engine.forward import over_ranks
from torchtitan.launcher.monitor import watching
from torchtitan.logging import logger
from torchtitan.metrics import MetricsReporter, Peak, find_peak
from torchtitan.metrics.flops import describe_mfu
from torchtitan.metrics.writers import Writer
from torchtitan.parallel.object_collectives import all_gather_object
from torchtitan.protocols import IGNORE_INDEX, Hook
from torchtitan.registry import deferred, load
from torchtitan.run.garbage_collection import garbage_collection
from torchtitan.run.openmp_threads import limit_spinning
from torchtitan.run.startup_log import log_settings

if TYPE_CHECKING:
    from torchtitan.models.expert_balance import ExpertMetrics
    from torchtitan.run.measured_run import FurtherLosses, MeasuredRun

_expert_metrics: "Callable[..., ExpertMetrics | None]" = deferred("torchtitan.models.expert_balance:expert_metrics")
_SourceLosses: "Callable[..., FurtherLosses]" = deferred("torchtitan.engine.source_losses:SourceLosses")
_mtp_metrics: "Callable[..., dict[str, float]]" = deferred("torchtitan.models.mtp:mtp_metrics")
_collective_waits = deferred("torchtitan.parallel.collective_waits:collective_waits")


@dataclasses.dataclass
class Instruments:
    """The instruments of a run. Each stage has its own reporter and further losses.

    Attributes:
        settings, peaks: what the stages so far have logged.
        trackers: begin before the first stage, and end with the run.
        further_losses: what the reports of steps have beside the loss.
    """

    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    peaks: dict[str, Peak | None] = dataclasses.field(default_factory=dict)
    trackers: Sequence[Writer] = ()
    reporter: MetricsReporter = dataclasses.field(init=False)
    further_losses: "Sequence[FurtherLosses]" = ()

    @contextlib.contextmanager
    def of_stage(self, run: "MeasuredRun", checked_steps: set[int]) -> Iterator[Callable[[int], None]]:
        """Logs the settings of the stage that begins, and measures while it trains. Yields what collects garbage."""
        engine, config, folder, rank = run.engine, run.config, run.folder.path, dist.get_rank()
        device = engine.device
        self.settings = log_settings(
            engine,
            data=run.loader.description,
            stage=run.stage,
            first_step=run.step + 1,
            tokens_seen=run.tokens_seen,
            checkpoints=run.checkpoints.folder,
            before=self.settings,
        )

        def record_busy(threads_waiting: float) -> None:
            run.folder.record_event(run.step, "busy", threads_waiting=round(threads_waiting, 1))

        with (
            _profiler(run, checked_steps) as profilers,
            _collective_waits(device.type)
            if dist.get_world_size() > 1
            else contextlib.nullcontext(lambda: 0.0) as waited,
            MetricsReporter(
                config.metrics,
                folder,
                rank=rank,
                world_size=dist.get_world_size(),
                total_steps=config.training.steps,
                start_step=run.step,
                start_tokens=run.tokens_seen,
                tokens_per_step=run.tokens_per_step,
                flops_per_token=engine.full.flops_per_token,
                peak=self._peak(engine),
                device=device,
                trackers=self.trackers,
                stages=run.schedule,
                start_epochs=over_ranks_with_epochs(run, torch.zeros((), device=device.torch_device))[2],
                waited=waited,
                hosts=all_gather_object(platform.node()),
            ) as self.reporter,
            garbage_collection(config.training.gc_freq, config.training.gc_debug) as collect_garbage,
            watching(limit_spinning(record_busy)) if device.type == "cpu" else contextlib.nullcontext(),
        ):
            run.hooks.own[:0] = *profilers, self.reporter
            self.further_losses = _further_losses(run)
            yield collect_garbage
            self.further_losses = ()  # they refer to the engine

    def _peak(self, engine: Engine) -> Peak | None:
        """The reference for MFU of the stage's GEMMs, which all stages with their dtype share; logged once."""
        dtype, device = engine.config.training.mixed_precision_param, engine.device
        if dtype not in self.peaks:
            self.peaks[dtype] = find_peak(device.type, device.name, getattr(torch, dtype))
            logger.info(describe_mfu(self.peaks[dtype]))
        return self.peaks[dtype]


@contextlib.contextmanager
def _profiler(run: "MeasuredRun", checked_steps: set[int]) -> Iterator[list[Hook]]:
    profiling, rank, device = run.config.profiling, dist.get_rank(), run.engine.device.type
    if not (profiling.enable_profiling or profiling.enable_memory_snapshot):
        yield []
        return
    with load("torchtitan.metrics.profiling:Profiler")(
        profiling, run.folder.path, rank=rank, device_type=device, start_step=run.step, busy=checked_steps
    ) as profiler:
        yield [profiler]


def _further_losses(run: "MeasuredRun") -> "list[FurtherLosses]":
    """Those of multi-token prediction, and of the sources of a mixture."""
    engine, sources = run.engine, list(run.loader.epochs)
    mtp = partial(_mtp_metrics, engine.model, engine.device.torch_device)
    of_depths = [mtp] if run.config.training.mtp_layers else []
    return of_depths + ([_SourceLosses(engine, sources)] if len(sources) > 1 else [])


def over_ranks_with_epochs(
    run: "MeasuredRun", loss: torch.Tensor, own_seconds: float = 0.0
) -> tuple[torch.Tensor, list[float], dict[str, int]]:
    """The loss summed over ranks, the seconds of each, and how often all rows have read each source. Collective."""
    own = run.loader.epochs
    loss, of_ranks = over_ranks(run.engine, loss, [own_seconds, *own.values()])
    seconds, *epochs = of_ranks.T.tolist()
    return loss, seconds, {name: int(min(of_source)) for name, of_source in zip(own, epochs, strict=True)}


def metrics_of_experts(engine: Engine) -> "ExpertMetrics | None":
    moe = engine.model.args.moe
    return moe and _expert_metrics(engine.expert_statistics, moe.top_k, engine.meshes.mesh)


def packing_metrics(run: "MeasuredRun", microbatches: Sequence[Batch]) -> tuple[int, dict[str, float]]:
    """The number of tokens with a loss in all ranks' micro-batches of this step; with conversations that number and how
    many were too long, and with best fit the shares of padding and of cut documents, since the run began. Collective.
    """
    engine, packed, chats = run.engine, run.loader.packed, run.config.training.train_on is not None
    if not packed and not chats:
        return run.tokens_per_step, {}
    labels = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in microbatches)
    long = load("torchtitan.data.conversations:LONG").count if chats else 0
    total = torch.tensor([labels, long, *packed.values()], device=engine.device.torch_device)
    dist.all_reduce(total)
    labels, long, *sums = (total // (dist.get_world_size() // engine.meshes.dims.dp)).tolist()
    metrics: dict[str, float] = {"counted_tokens": labels, "long_conversations": long} if chats else {}
    if packed:
        documents, cut, padding, tokens = sums
        metrics |= {"padding_share": padding / tokens, "cut_share": cut / max(documents, 1)}
    return max(labels, 1), metrics
