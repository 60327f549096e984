"""Layers with a state for each request."""
