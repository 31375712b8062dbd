"""`DataParallel` and the parts that it has."""
