"""Builds what a run trains with in a stage: data, engine, reports."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan.config import JobConfig
from torchtitan.data import Loader, Tokenizer, build_loader
from torchtitan.data.datasets import DataOfRun
from torchtitan.device import Device
from torchtitan.engine.engine import Engine, build_engine
from torchtitan.engine.model_args import find_model_args
from torchtitan.engine.stages import Stage
from torchtitan.errors import CheckpointError
from torchtitan.parallel.dims import Meshes
from torchtitan.parallel.object_collectives import raise_on_all_ranks, refuse_differences
from torchtitan.registry import load
from torchtitan.run.reports import Report, validate

if TYPE_CHECKING:
    from torchtitan.data import ValidationLoader


class StageParts(NamedTuple):
    """What a run trains with in a stage."""

    engine: Engine
    loader: Loader
    reports: list[Report]


@dataclass(frozen=True)
class StageBuilder:
    """Builds the parts of each stage, from what all of them have in common."""

    tokenizer: Tokenizer
    meshes: Meshes
    device: Device
    data: DataOfRun

    def build(self, stage: Stage) -> StageParts:
        """Builds a stage, whose weights are uninitialized. Collective.

        Raises:
            UserError: data, tasks or model cannot be used as configured.
        """
        config = stage.config
        args = find_model_args(config.model, self.tokenizer.vocab_size)
        loader = self._loader(config)  # starts prefetching
        validation_loader = self._validation_loader(config)
        # Model on the meta device, converters, parallelism, parameters, optimizer.
        rows = config.training.sequences_per_step(self.meshes.dims.dp)
        engine = build_engine(config, self.meshes, self.device, args, rows)
        return StageParts(engine, loader, self._reports(config, engine, validation_loader))

    def read_first_batches(self, config: JobConfig) -> None:
        """Reads the first batches of a later stage, and forgets them. Collective.

        Raises:
            UserError: they cannot be read.
        """
        loader = self._loader(config)
        raise_on_all_ranks(loader.wait)
        loader.close()
        self._validation_loader(config)

    def reads_as(self, config: JobConfig, state: Mapping[str, Any]) -> bool:
        """Whether a stage reads the data that a loader's state is of. Collective."""
        loader = self._loader(config)
        try:
            loader.load_state_dict(state)
        except CheckpointError:
            return False
        finally:
            loader.close()
        return True

    def _loader(self, config: JobConfig) -> Loader:
        loader = build_loader(
            config.training,
            self.tokenizer,
            global_batch_size=config.training.sequences_per_step(self.meshes.dims.dp),
            hold_out=self.data.hold_out,
            run=self.data,
            **self._place,
        )
        identity = {f"training data: {key}": value for key, value in loader.identity.items()}
        refuse_differences(identity, "all machines need the same data, and Python for python_stdlib")
        return loader

    def _validation_loader(self, config: JobConfig) -> "ValidationLoader | None":
        """The validation data, of which the first batch is read; None without validation. Collective."""
        validation = config.validation
        if not validation.enabled:
            return None
        # The other ranks are in a collective meanwhile.
        patience = min(config.training.retry_seconds, config.comm.train_timeout_seconds // 2)
        loader: ValidationLoader = load("torchtitan.data:build_validation_loader")(
            validation, config.training, self.tokenizer, **self._place, retry_seconds=patience
        )
        raise_on_all_ranks(loader.prepare)
        return loader

    @property
    def _place(self) -> dict[str, Any]:
        return {
            "dp_rank": self.meshes.dp_rank,
            "dp_size": self.meshes.dims.dp,
            "pin_memory": self.device.type == "cuda",
        }

    def _reports(self, config: JobConfig, engine: Engine, validation_loader: "ValidationLoader | None") -> list[Report]:
        validation = config.validation
        reports = [Report("validation_loss", validation.freq, validate, validation_loader)] if validation_loader else []
        if config.evaluation.tasks or (validation.enabled and validation.sample_prompts):
            reports += load("torchtitan.tools.evaluation.reports:build_reports")(engine, self.tokenizer)
        return reports
