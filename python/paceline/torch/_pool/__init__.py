"""Independent jobs on all devices: what `paceline.torch.Pool` consists of."""
