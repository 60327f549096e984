"""The architectures we run, and what the engine needs of a model."""

from __future__ import annotations

import abc
from importlib import import_module
from typing import Any

import torch
from torch import nn

from toolkit.attention import Attention, AttentionBatch
from toolkit.errors import CheckpointError
from toolkit.layers import Linear, OutputHead, Slots

SUPPORTED = {
    "GPT2LMHeadModel": "toolkit.models.gpt2:GPT2",
    "LlamaForCausalLM": "toolkit.models.llama:Llama",
    "MistralForCausalLM": "toolkit.models.mistral:Mistral",
    "Qwen2ForCausalLM": "toolkit.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "toolkit.models.qwen3:Qwen3",
}
"""By the name in config.json's `architectures`."""


class CausalLM(nn.Module, abc.ABC):
    """A decoder over packed tokens. Its parameters are made, unfilled, on the default device and in the
    default dtype.
    """

    vocab_size: int
    lm_head: OutputHead
    """hidden to vocab_size; it may share the embedding's weight."""

    def __init__(self, config: Any, max_model_len: int) -> None:
        """`config`: what config.json says (`toolkit.models.config`); positions up to `max_model_len` can be run."""
        super().__init__()

    @staticmethod
    @abc.abstractmethod
    def max_positions(config: Any) -> int:
        """The longest sequence the model was made for, in tokens."""

    @abc.abstractmethod
    def forward(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """token_ids: [num_tokens]. Returns the last hidden states [num_tokens, hidden],
        normalized.
        """

    @abc.abstractmethod
    def slots(self) -> Slots:
        """Where each tensor of a checkpoint goes."""

    def logits(self, hidden: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """[n, hidden] to [n, vocab_size]; on a GPU in `buffer`, where one is given."""
        logits: torch.Tensor = self.lm_head(hidden, buffer)
        return logits

    def pack_weights(self) -> None:
        """Puts the weights into the layout that a CPU computes fastest with."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def attention_layers(self) -> list[Attention]:
        """In order of the layers."""
        return [module for module in self.modules() if isinstance(module, Attention)]


def resolve_architecture(config: Any, where: str) -> type[CausalLM]:
    """The class for a config's architecture. Raises CheckpointError with the list of those there are."""
    names = list(getattr(config, "architectures", None) or [])
    for name in names:
        if name in SUPPORTED:
            module, _, attribute = SUPPORTED[name].partition(":")
            model: type[CausalLM] = getattr(import_module(module), attribute)
            return model
    told = (
        " or ".join(names)
        if names
        else f"nothing (its model_type is {getattr(config, 'model_type', None)!r})"
    )
    raise CheckpointError(
        f"{where} has the architecture {told}, which tk does not run. It runs: {', '.join(SUPPORTED)}."
    )
