"""Reads checkpoints, and the formats that weights are kept and multiplied in."""
