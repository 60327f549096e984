"""Who runs next. Pure Python and NumPy: it can be read and tested without torch.

`Scheduler` gives every request some number of tokens each step, under one token budget, so that
`num_computed_tokens` catches up with `num_tokens`. There is no prefill phase and no decode phase. That one
contract carries chunked prefill, prefix cache hits, preemption and resumption.
"""

from toolkit.scheduler.block_pool import BlockPool, HostBlockPool
from toolkit.scheduler.output import (
    ModelOutput,
    NewRow,
    PromptLogprobs,
    SchedulerOutput,
    TokenLogprobs,
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
    "TokenLogprobs",
]
