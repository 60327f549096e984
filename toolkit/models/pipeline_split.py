"""How a model's layers are shared out over the stages of a pipeline. Light: no torch."""

from __future__ import annotations

from toolkit.errors import ConfigError


def share_out(total: int, stages: int, layer: int, head: int) -> list[int]:
    """How many of `total` layers each stage has, so that the slowest is as fast as can be. `layer`, `head`: what a step costs of
    one layer and of the output head, in bytes that are read; the last stage has the head. Of the embedding next to nothing is read.

    Raises ConfigError when there are fewer layers than stages.
    """
    if total < stages:
        raise ConfigError(
            f"--pipeline-parallel-size {stages}: the model has {total} layers, and each stage needs one. "
            f"Sizes that can be: 1 to {total}.",
            param="pipeline_parallel_size",
        )
    if stages == 1:
        return [total]
    others = stages - 1
    last = min(
        range(1, total - others + 1),
        key=lambda count: (
            max(-(-(total - count) // others) * layer, count * layer + head),
            -count,
        ),
    )
    each, more = divmod(total - last, others)
    return [each + (index >= others - more) for index in range(others)] + [last]
