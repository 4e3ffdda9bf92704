"""Trinity, which `transformers` calls AFMoE."""
