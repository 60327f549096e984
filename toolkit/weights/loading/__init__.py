"""Loading the weights of a checkpoint."""
