"""XLM-RoBERTa (Conneau et al., 2020)."""

from toolkit.models.architectures import roberta
from toolkit.models.architectures.roberta import describe
from toolkit.models.config.model_config import Size

__all__ = ["ARCHITECTURES", "Config", "describe"]

ARCHITECTURES = ("XLMRobertaModel", "XLMRobertaForSequenceClassification")


class Config(roberta.Config, kw_only=True):
    vocab_size: Size = 30522
