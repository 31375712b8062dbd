"""PyTorch on the devices of a group: streams, random numbers, per-thread state, and errors on their way from workers to the caller."""
