"""Attention of decode steps and prompts over a paged cache, and rotation."""
