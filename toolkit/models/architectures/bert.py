"""BERT (Devlin et al., 2019)."""

from typing import Any, ClassVar

from toolkit.models.config.model_config import ArchitectureConfig, Size, head_size
from toolkit.models.describe import Encoder

ARCHITECTURES = ("BertModel", "BertForSequenceClassification")


class Config(ArchitectureConfig, kw_only=True):
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {"directionality": ("bidi",)}

    vocab_size: Size = 30522
    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_hidden_layers: Size = 12
    num_attention_heads: Size = 12
    hidden_act: str = "gelu"
    max_position_embeddings: Size = 512
    type_vocab_size: Size = 2
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    num_labels: Size = 2  # labels of a classifier. The length of `id2label` replaces it
    id2label: dict[str, Any] | None = None
    problem_type: str | None = None  # multi_label_classification: labels do not exclude each other
    sentence_transformers: dict[str, Any] | None = None
    sbert_ce_default_activation_function: str | None = None
    """Old spelling of `sentence_transformers.activation_fn`: a torch.nn class, for scores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        head_size(self.hidden_size, self.num_attention_heads)
        if self.id2label is not None:
            self.num_labels = len(self.id2label)

    @property
    def score_activation(self) -> str:
        """Name of the torch.nn class that is applied to scores."""
        name = (self.sentence_transformers or {}).get("activation_fn")
        excludes = self.num_labels > 1 and self.problem_type != "multi_label_classification"
        name = name or self.sbert_ce_default_activation_function
        return str(name or ("Softmax" if excludes else "Sigmoid")).rpartition(".")[2]

    @property
    def labels(self) -> list[str]:
        """Names of a classifier's labels."""
        names = self.id2label or {}
        return [str(names.get(str(i), f"LABEL_{i}")) for i in range(self.num_labels)]


def describe(config: Config) -> Encoder:
    scores = config.architectures[0].endswith("ForSequenceClassification")
    model = "toolkit.models.bert:" + ("BertScorer" if scores else "Bert")
    return Encoder(model, config.max_position_embeddings, scores)
