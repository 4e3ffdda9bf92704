"""A run from its start to its end: what is built, the loop, the files it writes, what watches it."""
