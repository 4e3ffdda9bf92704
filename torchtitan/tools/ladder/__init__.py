"""A ladder: small runs whose losses predict the loss of a large one. `python -m torchtitan.tools.ladder --help`."""
