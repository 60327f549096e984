"""Embeddings and scores equal those of sentence-transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import checkpoints
from tests.pooling.folders import (
    MINILM,
    POSITIONS,
    TEXTS,
    bert,
    bert_tokenizer,
    roberta,
    roberta_tokenizer,
    save,
)
from toolkit import LLM
from toolkit.errors import CheckpointError, ConfigError, InvalidRequestError

LONG = "The waves go on and on, and so do the words of this text. " * 40


def embed(llm, texts, **options):
    return np.array([one.outputs.embedding for one in llm.embed(texts, **options)])


def load(folder, **settings):
    return LLM(str(folder), num_threads=1, **settings)


@pytest.fixture(scope="module")
def minilm():
    return load(MINILM, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def minilm_reference():
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(MINILM), device="cpu")


def test_real_model_equals_sentence_transformers(minilm, minilm_reference):
    texts = [*TEXTS, *(text * 3 for text in TEXTS), "one more"]
    assert np.abs(embed(minilm, texts) - minilm_reference.encode(texts)).max() < 1e-5


def test_overlapping_steps_and_few_rows(minilm, minilm_reference):
    overlapping = load(MINILM, async_scheduling=True, max_num_seqs=3, max_num_batched_tokens=64)
    assert np.abs(embed(overlapping, TEXTS * 2) - minilm_reference.encode(TEXTS * 2)).max() < 1e-5


def test_long_text_is_refused_unless_truncation_is_requested(minilm, minilm_reference):
    with pytest.raises(
        InvalidRequestError, match=r"length is 256 tokens. However, your input\[1\] .* 642 tokens"
    ):
        minilm.embed(["short", LONG])
    cut = embed(minilm, LONG, truncate_prompt_tokens=-1)
    assert np.abs(cut - minilm_reference.encode(LONG)).max() < 1e-5
    shorter = minilm.embed(LONG, truncate_prompt_tokens=9)[0]
    assert len(shorter.prompt_token_ids) == 9
    assert shorter.prompt_token_ids[-1] == bert_tokenizer().sep_token_id


def test_pairs_are_scored_by_cosine_similarity(minilm, minilm_reference):
    scores = [one.outputs.score for one in minilm.score("the sea", TEXTS)]
    of_all = minilm_reference.similarity(
        minilm_reference.encode("the sea"), minilm_reference.encode(TEXTS)
    )
    assert np.abs(scores - of_all[0].numpy()).max() < 1e-5


@pytest.mark.parametrize(
    "modes",
    [
        "cls",
        "mean_sqrt_len_tokens",
        ("mean", "max", "lasttoken"),
        ("cls", "max", "mean", "mean_sqrt_len_tokens", "lasttoken"),
    ],
    ids=str,
)
def test_all_pooling_modes(modes, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    save(bert(), bert_tokenizer(), tmp_path / "bert")
    reference = SentenceTransformer(
        modules=[Transformer(str(tmp_path / "bert")), Pooling(32, pooling_mode=modes)], device="cpu"
    )
    reference.save(str(tmp_path / "saved"))
    ours = embed(load(tmp_path / "saved"), TEXTS)
    assert np.abs(ours - reference.encode(TEXTS)).max() < 1e-5


@pytest.mark.parametrize(
    ("make", "tokenizer"),
    [(bert, bert_tokenizer), (roberta, roberta_tokenizer)],
    ids=["bert", "roberta"],
)
def test_dense_layers_and_normalization(make, tokenizer, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import (
        Dense,
        Normalize,
        Pooling,
        Transformer,
    )

    save(make(), tokenizer(), tmp_path / "model")
    reference = SentenceTransformer(
        modules=[
            Transformer(str(tmp_path / "model")),
            Pooling(32, pooling_mode="mean"),
            Dense(32, 24, activation_function=torch.nn.Tanh()),
            Dense(24, 12, bias=False, activation_function=torch.nn.Identity()),
            Normalize(),
        ],
        device="cpu",
    )
    reference.save(str(tmp_path / "saved"))
    # A step of 24 tokens pads three prompts to one length; the others run alone.
    llm = load(tmp_path / "saved", max_num_batched_tokens=24)
    assert llm.info.max_model_len == POSITIONS
    cut = embed(llm, [*TEXTS, LONG], truncate_prompt_tokens=-1)
    assert np.abs(cut - reference.encode([*TEXTS, LONG])).max() < 1e-5


def test_old_and_new_folder_formats_agree(minilm_reference, minilm, tmp_path):
    minilm_reference.save(str(tmp_path))  # in the new format; the loaded folder has that of 2021
    assert np.abs(embed(load(tmp_path), TEXTS) - embed(minilm, TEXTS)).max() < 1e-6


@pytest.mark.parametrize(
    ("make", "head", "tokenizer", "activation"),
    [
        (bert, "BertForSequenceClassification", bert_tokenizer, "Sigmoid"),
        (roberta, "XLMRobertaForSequenceClassification", roberta_tokenizer, "Identity"),
    ],
    ids=["bert", "roberta"],
)
def test_cross_encoders_equal_sentence_transformers(make, head, tokenizer, activation, tmp_path):
    from sentence_transformers import CrossEncoder

    save(make(head, num_labels=1), tokenizer(), tmp_path)
    name = f"torch.nn.modules.{'activation' if activation == 'Sigmoid' else 'linear'}.{activation}"
    checkpoints.edit_json(tmp_path / "config.json", sentence_transformers={"activation_fn": name})
    pairs = [(a, b) for a in TEXTS[:3] for b in [*TEXTS, LONG]] + [(LONG, "short"), (LONG, LONG)]
    expected = CrossEncoder(str(tmp_path), device="cpu").predict(pairs)
    firsts, seconds = zip(*pairs, strict=True)
    scored = load(tmp_path).score(firsts, seconds, truncate_prompt_tokens=-1)
    assert np.abs(np.array([one.outputs.score for one in scored]) - expected).max() < 1e-5


def test_bfloat16_is_close(minilm):
    exact = embed(minilm, TEXTS)
    assert (embed(load(MINILM, dtype="bfloat16"), TEXTS) * exact).sum(axis=1).min() > 0.99


@pytest.mark.parametrize(
    "settings", [{"kv_cache_dtype": "fp8"}, {"attention_backend": "torch"}], ids=str
)
def test_cache_settings_are_refused(settings):
    with pytest.raises(ConfigError, match="This one is an encoder"):
        load(MINILM, **settings)


def test_unsupported_models_are_refused_at_startup(tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    save(bert(), bert_tokenizer(), tmp_path / "bert")
    SentenceTransformer(
        modules=[Transformer(str(tmp_path / "bert")), Pooling(32, pooling_mode="weightedmean")],
        device="cpu",
    ).save(str(tmp_path / "weighted"))
    with pytest.raises(CheckpointError, match="weightedmean"):
        load(tmp_path / "weighted")
