"""Saves the state of a run to disk and loads it back."""
