"""Hand-written kernels: Triton for GPUs, C++ for CPUs, and the same functions in plain PyTorch.

Import the module that is wanted (`toolkit.kernels.reference`, `toolkit.kernels.triton.attention`); nothing is
imported here, so that no one pays for a compiler they do not use.
"""
