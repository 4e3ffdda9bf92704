"""Qwen3, the models with mixtures of experts."""
