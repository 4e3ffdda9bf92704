"""Pretraining of Llama-class models, from a laptop to hundreds of GPUs."""

__version__ = "0.1.0"
