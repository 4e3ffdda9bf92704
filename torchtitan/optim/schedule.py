"""Learning-rate schedule: warm-up, stable, decay (WSD, arXiv 2404.06395). A stateless function of the step."""

import math

from torchtitan.config.training import LRScheduler


def lr_factor(step: int, steps: int, config: LRScheduler) -> float:
    """Factor on the peak learning rate for update `step`, from 1 to `steps`.

    Warm-up: step / W, up to 1 at step W. Decay: over the last D updates, from 1 at the first of them towards lr_min,
    which would be reached one update after the last (so that the last update still changes the weights). "power" falls
    with the inverse square root of the step instead (arXiv 2408.13359), wherever the run ends. D is decay_ratio *
    steps, or all updates after the warm-up. If the run is shorter than W + D, the decay is shortened; if it is shorter
    than W, so is the warm-up. A schedule of more `total_steps` than the run has goes on as if the run were that long.
    """
    steps = max(steps, config.total_steps or 0)
    warmup = min(config.warmup_steps, steps)
    decay = steps - warmup
    if config.decay_ratio is not None:
        decay = min(decay, round(config.decay_ratio * steps))
    if step <= warmup:
        return step / warmup
    done = step - (steps - decay) - 1
    if done <= 0:
        return 1.0
    progress = done / decay
    match config.decay_type:
        case "linear":
            left = 1 - progress
        case "sqrt":
            left = 1 - math.sqrt(progress)
        case "cosine":
            left = 0.5 * (1 + math.cos(math.pi * progress))
        case "power":
            left = ((step - done) / step) ** 0.5
    return config.lr_min + (1 - config.lr_min) * left


def shortened(steps: int, config: LRScheduler) -> str:
    """What `lr_factor` makes shorter than the configuration says, because the run is; "" if nothing."""
    steps = max(steps, config.total_steps or 0)
    warmup = min(config.warmup_steps, steps)
    decay = round((config.decay_ratio or 0) * steps)
    phases = {
        f"warm-up {warmup} instead of lr_scheduler.warmup_steps = {config.warmup_steps}": warmup < config.warmup_steps,
        f"decay {steps - warmup} instead of {decay} (lr_scheduler.decay_ratio)": decay > steps - warmup,
    }
    return ", ".join(phase for phase, applies in phases.items() if applies)
