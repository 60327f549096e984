"""Everything on one device: the model, its KV cache, and the state of running requests."""

from toolkit.worker.info import Report, WorkerInfo

__all__ = ["Report", "WorkerInfo"]
