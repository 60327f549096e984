"""Benchmarks for developers: comparisons, lower bounds, kernels, layers, the host loop."""
