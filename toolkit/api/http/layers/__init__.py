"""Layers around the routes: access, limits, logs."""
