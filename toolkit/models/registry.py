"""The architectures we run, and what the engine needs of a model."""

from __future__ import annotations

import abc
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import nn

from toolkit.attention import Attention, AttentionBatch
from toolkit.attention.packed import PackedBatch
from toolkit.distributed import WHOLE, Stage
from toolkit.errors import CheckpointError
from toolkit.layers import LayerNorm, Linear, OutputHead, RMSNorm
from toolkit.weights.slots import Slots

SUPPORTED = {
    "GPT2LMHeadModel": "toolkit.models.gpt2:GPT2",
    "LlamaForCausalLM": "toolkit.models.llama:Llama",
    "MistralForCausalLM": "toolkit.models.mistral:Mistral",
    "Qwen2ForCausalLM": "toolkit.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "toolkit.models.qwen3:Qwen3",
    "GPT2Model": "toolkit.models.gpt2:GPT2",
    "LlamaModel": "toolkit.models.llama:Llama",
    "MistralModel": "toolkit.models.mistral:Mistral",
    "Qwen2Model": "toolkit.models.qwen2:Qwen2",
    "Qwen3Model": "toolkit.models.qwen3:Qwen3",
    "BertModel": "toolkit.models.bert:Bert",
    "BertForSequenceClassification": "toolkit.models.bert:BertScorer",
    "RobertaModel": "toolkit.models.roberta:Roberta",
    "RobertaForSequenceClassification": "toolkit.models.roberta:RobertaScorer",
    "XLMRobertaModel": "toolkit.models.roberta:Roberta",
    "XLMRobertaForSequenceClassification": "toolkit.models.roberta:RobertaScorer",
}
"""By the name in config.json's `architectures`. A decoder's `...Model` has no output head: it only pools."""


class Model(nn.Module, abc.ABC):
    """A transformer over packed tokens. Its parameters are made, unfilled, on the default device and in the
    default dtype.
    """

    vocab_size: int
    hidden_size: int
    dtype: torch.dtype
    """Of the activations."""
    unused: ClassVar[tuple[str, ...]] = ()
    """What the names of those tensors of its checkpoints have that it does not need."""

    def __init__(self, config: Any, max_model_len: int) -> None:
        """`config`: what config.json says (`toolkit.models.model_config`); positions up to `max_model_len` can be run."""
        super().__init__()
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.dtype = torch.get_default_dtype()

    @staticmethod
    @abc.abstractmethod
    def max_positions(config: Any) -> int:
        """The longest sequence the model was made for, in tokens."""

    @abc.abstractmethod
    def slots(self) -> Slots:
        """Where each tensor of a checkpoint goes."""

    def pack_weights(self) -> None:
        """Puts the weights into the layout that a CPU computes fastest with."""
        for module in self.modules():
            if isinstance(module, Linear | LayerNorm | RMSNorm):
                module.pack()

    @property
    def nbytes(self) -> int:
        """Of the weights, packed or not."""
        packed = [module.packed for module in self.modules() if isinstance(module, Linear)]
        return sum(p.nbytes for p in self.parameters()) + sum(
            p.nbytes for p in packed if p is not None
        )


class Encoder(Model):
    """A model whose tokens see all of their prompt; it has no cache, and runs whole prompts."""

    @abc.abstractmethod
    def forward(self, token_ids: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """token_ids: [num_tokens]. Returns the last hidden states [num_tokens, hidden]."""


class Scorer(Encoder):
    """An encoder of two texts at once, with a head that says how well they fit."""

    @abc.abstractmethod
    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states of the prompts' first tokens [n, hidden] to scores [n, 1]."""


class CausalLM(Model):
    """A decoder, whose tokens see those before them."""

    lm_head: OutputHead
    """hidden to vocab_size; it may share the embedding's weight. Only the last stage has it."""
    stage: Stage = WHOLE
    """Which of its layers are here."""

    @abc.abstractmethod
    def forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """token_ids: [num_tokens]; hidden: [num_tokens, hidden], what the stage before gave, if there is one. Returns the
        last hidden states, normalized, [num_tokens, hidden], or those of `batch.wanted`; on another stage than the last what the
        next one is to be given.
        """

    def logits(self, hidden: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """[n, hidden] to [n, vocab_size]; on a GPU in `buffer`, where one is given."""
        logits: torch.Tensor = self.lm_head(hidden, buffer)
        return logits

    def attention_layers(self) -> list[Attention]:
        """In order of the layers."""
        return [module for module in self.modules() if isinstance(module, Attention)]


def resolve_architecture(config: Any, where: str) -> type[Model]:
    """The class for a config's architecture. Raises CheckpointError with the list of those there are."""
    names = list(getattr(config, "architectures", None) or [])
    for name in names:
        if name in SUPPORTED:
            module, _, attribute = SUPPORTED[name].partition(":")
            model: type[Model] = getattr(import_module(module), attribute)
            return model
    told = (
        " or ".join(names)
        if names
        else f"nothing (its model_type is {getattr(config, 'model_type', None)!r})"
    )
    raise CheckpointError(
        f"{where} has the architecture {told}, which tk does not run. It runs: {', '.join(SUPPORTED)}."
    )


def has_head(config: Any) -> bool:
    """Whether the checkpoint has what follows the last hidden states: for a decoder, what makes logits of them."""
    name = next(name for name in config.architectures if name in SUPPORTED)
    return name.endswith("HeadModel") or not name.endswith("Model")
