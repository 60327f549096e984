"""Developer tools. Not part of the wheel."""
