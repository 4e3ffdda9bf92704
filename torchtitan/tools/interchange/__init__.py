"""Importing and exporting weights: folders of Hugging Face `transformers` and of Meta's releases."""
