"""The engine: what one rank trains with, and one training step. docs/tour.md walks through it."""
