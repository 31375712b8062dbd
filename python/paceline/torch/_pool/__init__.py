"""Independent jobs on many devices: what `paceline.torch.Pool` consists of."""
