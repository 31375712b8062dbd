"""One run of a batch on all devices: micro-batches, their memory and size, gradients, and what is committed."""
