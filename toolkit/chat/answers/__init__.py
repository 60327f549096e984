"""A question, and its answer as it is streamed."""
