"""Supported architectures, and the interface of a model."""

import abc
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import nn

from toolkit.attention import Attention, AttentionBatch
from toolkit.attention.packed import PackedBatch
from toolkit.distributed import SINGLE_STAGE, Stage
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
"""Classes by name in config.json's `architectures`. A decoder's `...Model` has no output head: it
only pools."""


class Model(nn.Module, abc.ABC):
    """A transformer over packed tokens.

    Its parameters are uninitialized, on the default device and in the default dtype."""

    vocab_size: int
    hidden_size: int
    dtype: torch.dtype  # of the activations
    unused: ClassVar[tuple[str, ...]] = ()  # substrings of checkpoint tensor names to ignore

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.dtype = torch.get_default_dtype()

    @staticmethod
    @abc.abstractmethod
    def max_positions(config: Any) -> int:
        """Return the longest sequence that the model supports, in tokens."""

    @abc.abstractmethod
    def slots(self) -> Slots:
        """Return the destination of each tensor of a checkpoint."""

    def pack_weights(self) -> None:
        """Convert the weights to the layout that is fastest on a CPU."""
        for module in self.modules():
            if isinstance(module, Linear | LayerNorm | RMSNorm):
                module.pack()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, packed or not."""
        packed = [module.packed for module in self.modules() if isinstance(module, Linear)]
        return sum(p.nbytes for p in self.parameters()) + sum(
            p.nbytes for p in packed if p is not None
        )


class Encoder(Model):
    """A model with bidirectional attention. It has no KV cache and runs complete prompts."""

    @abc.abstractmethod
    def forward(self, token_ids: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Return the last hidden states [num_tokens, hidden] of token_ids [num_tokens]."""


class Scorer(Encoder):
    """A cross-encoder: it scores pairs of texts."""

    @abc.abstractmethod
    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states of the prompts' first tokens [n, hidden] to scores [n, 1]."""


class CausalLM(Model):
    """A decoder, with causal attention."""

    lm_head: OutputHead  # on the last stage; may share the embedding's weight
    stage: Stage = SINGLE_STAGE

    @abc.abstractmethod
    def forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run this stage.

        token_ids: [num_tokens]. hidden: [num_tokens, hidden], the previous stage's output. On the
        last stage returns the normalized last hidden states [num_tokens, hidden], or only those of
        `batch.wanted`; on other stages the next stage's `hidden`."""

    def logits(self, hidden: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """Map [n, hidden] to logits [n, vocab_size]. On a GPU they are written to `buffer`."""
        logits: torch.Tensor = self.lm_head(hidden, buffer)
        return logits

    def with_few_layers(self) -> AbstractContextManager[None]:
        """Run as few layers inside the block as launch the kernels of all."""
        return nullcontext()

    def attention_layers(self) -> list[Attention]:
        """Return the attention layers in order."""
        return [module for module in self.modules() if isinstance(module, Attention)]


def resolve_architecture(config: Any, where: str) -> type[Model]:
    """Return the class for a config. Raises CheckpointError that lists the supported ones."""
    names = list(getattr(config, "architectures", None) or [])
    for name in names:
        if name in SUPPORTED:
            module, _, attribute = SUPPORTED[name].partition(":")
            model: type[Model] = getattr(import_module(module), attribute)
            return model
    found = (
        f"Unsupported architecture {' or '.join(map(repr, names))} in {where}."
        if names
        else f"{where} names no architecture; its model_type is "
        f"{getattr(config, 'model_type', None)!r}."
    )
    raise CheckpointError(f"{found} Supported: {', '.join(SUPPORTED)}.")


def has_head(config: Any) -> bool:
    """Return whether the checkpoint has a head: for a decoder, the output head."""
    name = next(name for name in config.architectures if name in SUPPORTED)
    return name.endswith("HeadModel") or not name.endswith("Model")
