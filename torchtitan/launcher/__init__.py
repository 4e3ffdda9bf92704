"""The processes of a run: starting and watching them, signals, the lock of their folder, how far they are."""
