"""Connections: uvicorn's with limits, and those that outlive a worker."""
