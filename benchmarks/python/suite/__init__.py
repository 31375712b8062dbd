"""Runs all benchmarks, one after the other, and writes down what they said."""
