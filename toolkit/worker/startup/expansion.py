"""Weights of integers that a GPU with memory to spare keeps in 16 bits, too.

Products of few rows are bound by reading the weight, and read integers. For those of more rows,
arithmetic takes longer, and converting the weight for each tile longer still: cuBLAS is faster with
weights in 16 bits (docs/notes/gpu-kernels.md has the figures)."""

import logging

from toolkit.models.memory import MemoryLayout
from toolkit.models.model import Model
from toolkit.units import size
from toolkit.worker.startup.cache_problem import keeps_expanded
from toolkit.worker.startup.setup import Setup

logger = logging.getLogger(__name__)


def keep_expanded(setup: Setup, model: Model, layout: MemoryLayout, room: int) -> int:
    """Keep the weights of products in 16 bits, too, if `keeps_expanded`. Returns their bytes.

    `room`: bytes of the GPU for them and the cache. All ranks decide the same."""
    weights = model.expandable()
    nbytes = sum(weight.expanded_bytes for weight in weights)
    keeps = keeps_expanded(
        setup.config.cache,
        layout,
        room=room,
        nbytes=nbytes,
        max_num_seqs=setup.max_num_seqs,
        max_model_len=setup.max_model_len,
        max_num_batched_tokens=setup.token_budget,
    )
    if not setup.place.world.minimum(int(keeps)) or not weights:
        return 0
    for weight in weights:
        weight.keep_expanded()
    logger.info(
        "weights of integers are kept in 16 bits, too, for steps of many tokens: %s of %s for the "
        "KV cache",
        size(nbytes),
        size(room),
    )
    return nbytes
