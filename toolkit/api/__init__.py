"""HTTP server with OpenAI's, Anthropic's and Ollama's interfaces."""
