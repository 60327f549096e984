"""Local models: list, describe, download and remove them, and estimate whether they fit.

Nothing here loads a model, or imports torch."""
