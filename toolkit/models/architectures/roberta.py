"""RoBERTa (Liu et al., 2019)."""

from toolkit.models.architectures import bert
from toolkit.models.config.model_config import Size
from toolkit.models.describe import Encoder

ARCHITECTURES = ("RobertaModel", "RobertaForSequenceClassification")


class Config(bert.Config, kw_only=True):
    vocab_size: Size = 50265
    pad_token_id: int = 1


def describe(config: Config) -> Encoder:
    scores = config.architectures[0].endswith("ForSequenceClassification")
    model = "toolkit.models.roberta:" + ("RobertaScorer" if scores else "Roberta")
    # Positions begin after the padding token's id.
    return Encoder(model, config.max_position_embeddings - config.pad_token_id - 1, scores)
