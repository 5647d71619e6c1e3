"""Published drafters, one file per family: what they are, and their tensors."""
