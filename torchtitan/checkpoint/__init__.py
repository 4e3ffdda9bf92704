"""The state of a run on disk and back."""

from torchtitan.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointManager"]
