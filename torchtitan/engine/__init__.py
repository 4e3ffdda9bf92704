"""Running training steps: checks before a run, what a CPU run needs, the watchdog."""
