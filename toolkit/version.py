"""The version of tk."""

__version__ = "0.1.0"
