"""What a text log proves: tensors that somebody printed, read back and judged."""
