"""Benchmarks for developers: comparisons, floors, kernels, layers, the host loop."""
