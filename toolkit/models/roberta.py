"""RoBERTa (Liu et al., 2019) and XLM-RoBERTa (Conneau et al., 2020).

They are BERT with positions that start after the padding token's id."""

from typing import ClassVar

from toolkit.models.bert import Bert, BertScorer


class Roberta(Bert):
    prefix: ClassVar[str] = "roberta"


class RobertaScorer(Roberta, BertScorer):
    head: ClassVar[tuple[str, str]] = ("classifier.dense", "classifier.out_proj")
