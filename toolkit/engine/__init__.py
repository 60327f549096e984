"""The engine: `LLM` (offline), `AsyncLLM` (online, cores in their own processes), and its loop."""
