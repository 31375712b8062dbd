"""`DataParallel.check`: whether a loss can be split, and if not, why."""
