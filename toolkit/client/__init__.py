"""Code shared by all clients of an OpenAI-compatible server."""
