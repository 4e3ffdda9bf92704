"""Lies here so that pytest puts this folder on the path: tests of all kinds share `runs.py` and `tiny.py`."""
