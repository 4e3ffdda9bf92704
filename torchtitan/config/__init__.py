"""The configuration: defaults, then a TOML file, then the command line. Does not import torch."""

from torchtitan.config.manager import ConfigManager, JobConfig, to_toml

__all__ = ["ConfigManager", "JobConfig", "to_toml"]
