"""The stages of tests/gpu/run, and what runs and records them."""
