"""Degrees of parallelism, and one file for each technique."""
