"""Weights by how they are stored."""
