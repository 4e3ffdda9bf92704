"""Whether a configuration fits together."""
