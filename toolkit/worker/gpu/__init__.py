"""Steps on a GPU: CUDA graphs, their inputs, and copies in both directions."""
