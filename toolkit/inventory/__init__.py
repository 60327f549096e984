"""Local models: list, describe, download and remove them, and estimate whether they fit.

Nothing here loads a model. Only the check of a dry run's settings imports torch."""
