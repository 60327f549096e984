"""The scheduler: which requests run in the next step. Python and NumPy, without torch.

Each step, `Scheduler` gives every request some tokens under one budget, so that
`num_computed_tokens` catches up with `num_tokens`. There is no prefill phase and no decode phase:
that one contract covers chunked prefill, prefix cache hits, preemption and resumption.

There are three layers, each a subclass of the one before: `live_requests` keeps the requests with
their blocks and rows, `planner` makes the steps, `scheduler` applies their results and recovers
from failures."""

from toolkit.scheduler.block_pool import BlockPool, HostBlockPool
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
