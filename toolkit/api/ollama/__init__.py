"""Ollama's routes, answered by the code of chats, completions and embeddings."""
