"""Layers of experts."""
