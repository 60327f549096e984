"""What runs on one device: the model, its KV cache, and the state of the running requests."""

from toolkit.worker.info import Report, WorkerInfo

__all__ = ["Report", "WorkerInfo"]
