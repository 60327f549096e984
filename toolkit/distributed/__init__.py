"""Tensor parallelism: which part of a model each rank has, and what the ranks exchange."""

from toolkit.distributed.group import SINGLE, Group, connect
from toolkit.distributed.shares import Share, current, even, kv_heads, parallel, rounded_up, whole

__all__ = [
    "SINGLE",
    "Group",
    "Share",
    "connect",
    "current",
    "even",
    "kv_heads",
    "parallel",
    "rounded_up",
    "whole",
]
