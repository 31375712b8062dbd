"""What a step is given: the batch, its weights, what its items cost, and how it is split. Uses no other sub-package of `paceline.torch`."""
