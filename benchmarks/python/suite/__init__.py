"""Run all benchmarks, one after the other, and write down their results."""
