"""Styled text, charts and tables."""
