"""RoBERTa (Liu et al., 2019) and XLM-RoBERTa (Conneau et al., 2020).

They are BERT with positions that start after the padding token's id."""

from typing import Any, ClassVar

from toolkit.models.bert import Bert, BertScorer


class Roberta(Bert):
    prefix: ClassVar[str] = "roberta"

    @staticmethod
    def max_positions(config: Any) -> int:
        return int(config.max_position_embeddings - config.pad_token_id - 1)


class RobertaScorer(Roberta, BertScorer):
    head: ClassVar[tuple[str, str]] = ("classifier.dense", "classifier.out_proj")
