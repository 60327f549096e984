"""Read config.json, and find the architecture that it names."""
