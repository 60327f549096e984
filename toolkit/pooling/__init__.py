"""Prompts turned into one vector each: settings, heads and runner."""
