"""Qwen3, the dense models."""
