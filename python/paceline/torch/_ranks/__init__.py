"""Unequal batches for ranks that stay on DistributedDataParallel or FSDP."""
