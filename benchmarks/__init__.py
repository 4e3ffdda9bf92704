"""Benchmark scripts. README.md has a command for each table. They import torchtitan from their own checkout."""
