"""The corpus of the demo model, and the recipe that trains it."""
