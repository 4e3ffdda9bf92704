"""Which layers a configuration converts to low precision, without training: on the meta device, in one process."""

import torch

from torchtitan.config import JobConfig
from torchtitan.converters import Decision, Target, apply_converters, conversion_report
from torchtitan.device import Device
from torchtitan.engine.model_args import find_model_args
from torchtitan.models import MODELS, ModelSpec


def conversion_target(config: JobConfig, spec: ModelSpec, device: Device | None, shards: int = 1) -> Target:
    """Where the converted model of this configuration will run; without a device, anywhere."""
    training, parallelism = config.training, config.parallelism
    pipeline = parallelism.pipeline_parallel_degree > 1
    rows = parallelism.pipeline_parallel_microbatch_size if pipeline else training.local_batch_size
    return Target(
        device_type=device.type if device else "meta",
        device_name=device.name if device else "",
        compute_capability=torch.cuda.get_device_capability() if device and device.type == "cuda" else None,
        tokens=rows * training.seq_len // parallelism.context_parallel_degree,
        compile=training.compile,
        dtype=torch.float32 if training.mixed_precision_param == "float32" else torch.bfloat16,
        tensor_parallel=parallelism.tensor_parallel_degree,
        expert_parallel=parallelism.expert_parallel_degree,
        plan=spec.plan,
        shards=shards,
        optimizer=config.optimizer,
    )


def explain_conversion(config: JobConfig) -> list[Decision]:
    """One decision per linear layer of the configured model, as in `conversion.json`.

    Raises:
        ConfigError: as a training run would, also if no layer is converted.
    """
    spec = MODELS.get(config.model.name)
    with torch.device("meta"):
        model = spec.build(find_model_args(config.model))
    converters = apply_converters(
        model,
        config.model.converters,
        lambda section: getattr(config, section),
        conversion_target(config, spec, device=None),
    )
    return conversion_report(converter.decisions for converter in converters)
