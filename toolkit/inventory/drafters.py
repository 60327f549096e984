"""Describe the model of a drafter, without loading it."""

from typing import Literal

from toolkit.config import EngineConfig
from toolkit.errors import ConfigError, errors_about
from toolkit.inventory.checkpoint import TYPE_BYTES, Checkpoint
from toolkit.inventory.find import find_checkpoint
from toolkit.inventory.step_memory import Drafting
from toolkit.models.describe import Decoder, Parameter
from toolkit.models.eagle import (
    EAGLE3_TENSORS,
    EAGLE_TENSORS,
    Eagle3,
    describe_eagle,
    describe_own_layer,
)
from toolkit.weights.names import text_name


def drafter_of(checkpoint: Checkpoint, engine: EngineConfig) -> Drafting | None:
    """Describe the model of a checkpoint's drafter; None if it has none.

    Raises ToolkitError if it is missing or unsupported."""
    wanted = engine.speculation.drafter
    if wanted is None or wanted.method == "ngram":
        return None
    most = wanted.num_speculative_tokens
    if wanted.model is None:
        return _own_layer(checkpoint, most)
    found = find_drafter(wanted.model, wanted.revision)
    if wanted.method == "draft_model":
        return Drafting(
            most,
            found.description.memory,
            list(found.parameters),
            found.config.hidden_size,
            packings=found.packings,
            is_tied=found.config.tie_word_embeddings,
        )
    num_layers, is_third = checkpoint.description.num_layers, wanted.method == "eagle3"
    return _eagle(found, most, num_layers, is_third=is_third)


def find_drafter(model: str, revision: str | None) -> Checkpoint:
    with errors_about("the drafter of --speculative-config"):
        return find_checkpoint(model, revision)


def _own_layer(checkpoint: Checkpoint, most: int) -> Drafting:
    described = checkpoint.description
    found = describe_own_layer(described) if isinstance(described, Decoder) else None
    if found is None:
        raise _error(f"{checkpoint.name} has no layer that drafts")
    own = found.own.product.name
    names = [text_name(tensor.name) for tensor in checkpoint.tensors]
    if names and not any(name.startswith(own) for name in names):
        raise _error(f"{checkpoint.name} has no tensors of the layer that drafts ({own})")
    parameters = list(found.own.parameters(found.hidden_size, found.vocab_size))
    hidden, packings = found.hidden_size, checkpoint.packings
    return Drafting(most, found.memory, parameters, hidden, num_states=1, packings=packings)


def _eagle(checkpoint: Checkpoint, most: int, num_layers: int, *, is_third: bool) -> Drafting:
    """Describe an EAGLE drafter of a model with so many layers."""
    usual = EAGLE3_TENSORS if is_third else EAGLE_TENSORS
    names = {tensor.name for tensor in checkpoint.tensors} or usual
    try:
        described = describe_eagle(checkpoint.raw, names, num_layers, is_third=is_third)
    except ValueError as error:
        raise _error(f"{checkpoint.name} cannot be used: {error}") from None
    kinds: dict[str, Literal["head", "embedding"]] = {
        "lm_head.weight": "head",
        "embed_tokens.weight": "embedding",
    }
    parameters = [
        Parameter(
            one.name,
            one.shape,
            kinds.get(one.name, "linear" if len(one.shape) > 1 else "vector"),
        )
        for one in checkpoint.tensors
        if one.name not in ("d2t", "t2d") and (is_third or one.name not in kinds)
    ]
    if not parameters:  # pickled files do not say what they have
        stored = TYPE_BYTES.get(str(checkpoint.stored_type), 4)
        parameters = [Parameter("", (checkpoint.size // stored,), "vector")]
    return Drafting(
        most,
        described.memory,
        parameters,
        described.hidden_size,
        num_states=len(described.taps) if isinstance(described, Eagle3) else 1,
        packings=checkpoint.packings,
    )


def _error(problem: str) -> ConfigError:
    return ConfigError(f"--speculative-config: {problem}.", param="speculative_config")
