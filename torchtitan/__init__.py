"""Pretraining of Llama-class models, from a laptop to hundreds of GPUs."""

__version__ = "0.2.0"
