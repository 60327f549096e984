"""Terminal chat with an OpenAI-compatible server."""
