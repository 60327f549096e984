"""Weights in GGUF files."""
