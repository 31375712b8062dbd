"""What a step is given: the batch, its weights, what its items cost, and how it is split. Uses nothing else of this adapter."""
