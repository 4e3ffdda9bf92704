"""Saves the state of a run to disk and loads it back."""

from torchtitan.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointManager"]
