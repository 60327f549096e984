"""Model architectures, one per file; their registry and configs; the Hugging Face hub."""
