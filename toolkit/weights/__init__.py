"""Reading checkpoints, and the formats that weights are stored and multiplied in."""
