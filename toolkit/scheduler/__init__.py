"""The scheduler: which requests run in the next step. Python and NumPy, without torch.

Each step, `Scheduler` gives every request some tokens under one budget, so that
`num_computed_tokens` catches up with `num_tokens`. There is no prefill phase and no decode phase:
that one contract covers chunked prefill, prefix cache hits, preemption and resumption.

`Scheduler` owns the parts: a `RequestQueue`, the `RunningRequests` with their `Rows`,
`BlockTables` and adapters, a `Planner`, which makes the steps, and a `TokenAppender`, which takes
in their results."""

from toolkit.scheduler.blocks.block_pool import BlockPool, HostBlockPool
from toolkit.scheduler.output import (
    ModelOutput,
    NewRow,
    PromptLogprobs,
    SchedulerOutput,
)
from toolkit.scheduler.request import FinishReason, Request, RequestStatus
from toolkit.scheduler.scheduler import Scheduler
from toolkit.scheduler.stats import EngineStats
from toolkit.scheduler.step import StepResult, StepResults

__all__ = [
    "BlockPool",
    "EngineStats",
    "FinishReason",
    "HostBlockPool",
    "ModelOutput",
    "NewRow",
    "PromptLogprobs",
    "Request",
    "RequestStatus",
    "Scheduler",
    "SchedulerOutput",
    "StepResult",
    "StepResults",
]
