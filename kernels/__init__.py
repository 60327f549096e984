"""Hand-written kernels: Triton for GPUs, C++ for CPUs, and the same functions in plain PyTorch.

Import the module that you need: `toolkit.kernels.cpu`, `toolkit.kernels.reference`, or
`toolkit.kernels.table` for GPUs. Nothing is imported here, so no compiler is loaded without need.
"""
