"""Degrees of parallelism, and one file per technique."""
