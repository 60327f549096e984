"""What models are at hand, what they are, and whether a device has room for them: all without loading one, or torch."""
