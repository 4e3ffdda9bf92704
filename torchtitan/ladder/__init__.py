"""A ladder: small trainings whose losses predict that of a large one. `python -m torchtitan.ladder --help`."""
