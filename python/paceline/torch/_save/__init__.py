"""Saves of a training run: what is in them, their files, and the thread that writes them."""
