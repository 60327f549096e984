"""Tensor and pipeline parallelism: each rank's part of a model, and their collectives."""

from toolkit.distributed.group import SINGLE, Group, connect
from toolkit.distributed.shares import (
    Shard,
    aligned_shard,
    current_group,
    current_stage,
    even_shard,
    expert_shards,
    full_shard,
    kv_head_shard,
    parallel,
    splits_experts,
)
from toolkit.distributed.stage import SINGLE_STAGE, Stage, split_stages

__all__ = [
    "SINGLE",
    "SINGLE_STAGE",
    "Group",
    "Shard",
    "Stage",
    "aligned_shard",
    "connect",
    "current_group",
    "current_stage",
    "even_shard",
    "expert_shards",
    "full_shard",
    "kv_head_shard",
    "parallel",
    "split_stages",
    "splits_experts",
]
