"""Tensor and pipeline parallelism: which part of a model each rank has, and what the ranks exchange."""

from toolkit.distributed.group import SINGLE, Group, connect
from toolkit.distributed.shares import (
    Share,
    current,
    current_stage,
    even,
    kv_heads,
    parallel,
    rounded_up,
    whole,
)
from toolkit.distributed.stage import WHOLE, Stage, stages

__all__ = [
    "SINGLE",
    "WHOLE",
    "Group",
    "Share",
    "Stage",
    "connect",
    "current",
    "current_stage",
    "even",
    "kv_heads",
    "parallel",
    "rounded_up",
    "stages",
    "whole",
]
