"""What a model can do, during training or afterwards: multiple choice, bits per byte, sample texts."""
