"""Words get the times that Transformers' functions find from the same weights."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch

from toolkit.speech.alignment import find_path, median_filter, time_words, token_spans

END = 1000
LETTERS = [*"abcde", " a", " bc", " the", " ", "-", "!", ",", ".", ' "', '"', " (", ")", " -", "'s"]
TEXTS = [letter.encode() for letter in LETTERS]
PIECES = [*TEXTS, *(bytes([one]) for one in "é日。".encode()), " ¿".encode()]
TOKEN_BYTES = dict(enumerate(PIECES))


class Decoder:
    """The part of a tokenizer of Transformers that splits words."""

    eos_token_id = END
    language = "english"

    def decode(self, token_ids: list[int], *, decode_with_timestamps: bool) -> str:
        return b"".join(TOKEN_BYTES[one] for one in token_ids).decode(errors="replace")


@functools.cache
def transformers():
    from transformers.models.whisper import generation_whisper, tokenization_whisper

    return generation_whisper, tokenization_whisper


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (2, 2), (5, 40), (40, 5), (23, 61)])
def test_path_equals_that_of_transformers(shape):
    costs = np.random.default_rng(0).normal(size=shape)
    for own, expected in zip(
        find_path(costs), transformers()[0]._dynamic_time_warping(costs), strict=True
    ):
        np.testing.assert_array_equal(own, expected)


def test_path_of_equal_costs_equals_that_of_transformers():
    costs = np.random.default_rng(1).integers(0, 2, (12, 20)).astype(float)
    for own, expected in zip(
        find_path(costs), transformers()[0]._dynamic_time_warping(costs), strict=True
    ):
        np.testing.assert_array_equal(own, expected)


@pytest.mark.parametrize("count", [1, 3, 4, 7, 50])
def test_median_filter_equals_that_of_transformers(count):
    values = np.random.default_rng(0).normal(size=(2, 3, count)).astype(np.float32)
    expected = transformers()[0]._median_filter(torch.from_numpy(values), 7)
    np.testing.assert_array_equal(median_filter(values), expected.numpy())


def test_median_of_any_order_is_found():
    """By the principle of zeros and ones, a network that sorts these sorts all."""
    for bits in itertools.product([0.0, 1.0], repeat=7):
        assert median_filter(np.array(bits, np.float32))[3] == np.median(bits)


def test_tokens_follow_the_greatest_weights():
    """Each token attends to frames of its own, and the end token to the last ones."""
    weights = np.full((2, 5, 100), 1e-3, np.float32)
    for row, (begin, end) in enumerate([(0, 1), (0, 20), (20, 50), (50, 80), (80, 100)]):
        weights[:, row, begin:end] = 1
    spans = token_spans(weights, 1, 3)
    assert np.allclose(spans, [(0, 0.4), (0.4, 1.0), (1.0, 1.6)], atol=0.021)


def test_weights_without_differences_have_times():
    assert token_spans(np.ones((1, 1, 10), np.float32), 0, 0) == []
    assert token_spans(np.ones((1, 3, 0), np.float32), 0, 2) == [(0, 0), (0, 0)]
    for value in (0, 1):
        spans = token_spans(np.full((2, 4, 10), value, np.float32), 0, 2)
        assert len(spans) == 2
        assert np.isfinite(spans).all()


def test_weights_of_padding_and_scale_do_not_matter():
    """Cut weights need not sum to 1; rows around the tokens count in the normalization."""
    weights = np.random.default_rng(0).random((3, 9, 80)).astype(np.float32)
    scales = np.random.default_rng(1).random((3, 9, 1)).astype(np.float32) + 0.1
    spans = token_spans(weights / weights.sum(2, keepdims=True), 2, 5)
    assert token_spans(weights * scales, 2, 5) == spans
    assert len(spans) == 5
    assert all(start <= end for start, end in spans)


def test_words_equal_those_of_transformers():
    generator = np.random.default_rng(0)
    spans = [(index / 10, index / 10 + 0.05) for index in range(30)]
    for has_spaces, language in ((True, "english"), (False, "japanese")):
        for _ in range(200):
            ids = generator.integers(0, len(TEXTS), 12).tolist()
            expected = transformers()[1]._collate_word_timestamps(
                Decoder(), ids, spans, language, False
            )
            found = time_words(ids, spans, TOKEN_BYTES, has_spaces=has_spaces)
            assert [(one.text, (one.start, one.end)) for one in found] == [
                (one["text"], one["timestamp"]) for one in expected
            ]


def test_characters_of_several_tokens_are_not_cut():
    ids = [LETTERS.index(" a"), *range(len(TEXTS), len(PIECES))]
    spans = [(float(index), index + 1.0) for index in range(len(ids))]
    words = time_words(ids, spans, TOKEN_BYTES)
    assert [(one.text, one.start, one.end) for one in words] == [(" aé日。", 0, 9), (" ¿", 9, 10)]
    words = time_words(ids, spans, TOKEN_BYTES, has_spaces=False)
    assert [one.text for one in words] == [" a", "é", "日。", " ¿"]
    cut = time_words(ids[:2], spans, TOKEN_BYTES)
    assert [one.text for one in cut] == [" a\ufffd"]
