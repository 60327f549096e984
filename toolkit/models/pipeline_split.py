"""Split of a model's layers over pipeline stages. Imports no torch."""

from toolkit.errors import ConfigError


def split_layers(total: int, stages: int, layer: int, head: int, num_sharing: int = 1) -> list[int]:
    """Return the number of layers of each stage that minimizes the time of the slowest stage.

    `layer`, `head`: cost of one layer and of the output head, in bytes read per step. The last
    stage has the head. The embedding costs next to nothing. `num_sharing`: last layers that share
    memory, which are of one stage.

    Raises ConfigError if there are more stages than parts."""
    most = total - num_sharing + 1
    if most < stages:
        shared = f", the last {num_sharing} of which share memory" if num_sharing > 1 else ""
        raise ConfigError(
            f"--pipeline-parallel-size {stages}: the model has {total} layers{shared}, and each "
            f"stage needs at least one. Use 1 to {most}.",
            param="pipeline_parallel_size",
        )
    if stages == 1:
        return [total]
    others = stages - 1
    last = min(
        range(num_sharing, total - others + 1),
        key=lambda count: (
            max(-(-(total - count) // others) * layer, count * layer + head),
            -count,
        ),
    )
    each, more = divmod(total - last, others)
    return [each + (index >= others - more) for index in range(others)] + [last]
