"""Reading checkpoints, and the formats of weights with their products."""
