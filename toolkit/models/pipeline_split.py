"""Split of a model's layers over pipeline stages. Imports no torch."""

from toolkit.errors import ConfigError


def split_layers(total: int, stages: int, layer: int, head: int) -> list[int]:
    """Return the number of layers of each stage that minimizes the time of the slowest stage.

    `layer`, `head`: cost of one layer and of the output head, in bytes read per step. The last
    stage has the head. The embedding costs next to nothing.

    Raises ConfigError if there are fewer layers than stages."""
    if total < stages:
        raise ConfigError(
            f"--pipeline-parallel-size {stages}: the model has {total} layers, and each stage "
            f"needs at least one. Use 1 to {total}.",
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
