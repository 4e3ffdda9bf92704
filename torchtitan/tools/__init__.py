"""Commands beside training, and their parts: they know the core, which reaches them only by rows (`registry.load`)."""
