"""Qwen3, dense models and mixtures of experts."""
