"""The engine: `LLM` (offline, in-process), `AsyncLLM` (online, the core in a process of its own), and the
core's loop.
"""
