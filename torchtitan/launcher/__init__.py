"""The processes of a run: starting and monitoring them, signals, progress, and the lock of the dump folder."""
