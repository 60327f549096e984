from __future__ import annotations

import orjson
import pytest

from toolkit.bench.dataset import RandomDataset, length_range
from toolkit.config.clients import BenchConfig


def bodies(count=200, **settings):
    dataset = RandomDataset(BenchConfig(**settings), "m")
    return [orjson.loads(dataset.request(i).body) for i in range(count)]


def test_prompts_are_token_ids_below_the_vocabulary_and_all_different():
    found = bodies(random_vocab_size=50, random_input_len=20)
    assert all(
        len(body["prompt"]) == 20 and 0 <= min(body["prompt"]) <= max(body["prompt"]) < 50 for body in found
    )
    assert len({tuple(body["prompt"]) for body in found}) == len(found)


def test_chat_prompts_are_words_and_all_different():
    found = [body["messages"][0]["content"] for body in bodies(endpoint="chat", random_input_len=30)]
    assert {len(text.split()) for text in found} == {30}
    assert len(set(found)) == len(found)


def test_lengths_fill_the_range():
    found = bodies(400, random_input_len=10, random_output_len=20, random_range_ratio=0.5)
    assert {len(body["prompt"]) for body in found} == set(range(5, 16))
    assert {body["max_tokens"] for body in found} == set(range(10, 31))


@pytest.mark.parametrize(
    ("length", "ratio", "expected"), [(128, 0.0, (128, 128)), (5, 0.3, (3, 7)), (1, 1.0, (1, 2))]
)
def test_length_range(length, ratio, expected):
    assert length_range(length, ratio) == expected


def test_a_seed_repeats_the_work():
    assert bodies(5, seed=1) == bodies(5, seed=1)
    assert bodies(5, seed=1) != bodies(5, seed=2)


def test_full_length_answers_are_asked_for_unless_told_otherwise():
    assert bodies(1)[0]["ignore_eos"] is True
    assert "ignore_eos" not in bodies(1, ignore_eos=False)[0]
