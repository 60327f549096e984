from __future__ import annotations

import json

import numpy as np
import orjson
import pytest

from toolkit.bench.load.dataset import WARMUP, RandomDataset, length_range, request
from toolkit.bench.load.recorded_datasets import open_dataset
from toolkit.bench.load.share import arrival_times
from toolkit.bench.run import resolve_config
from toolkit.config.load import BenchConfig
from toolkit.errors import ConfigError


def bodies(count=200, **settings):
    config = BenchConfig(**{"seed": 0} | settings)
    dataset = open_dataset(config)
    return [orjson.loads(request(dataset.prompt(i), config, "m").body) for i in range(count)]


def prompts(*args, **settings):
    return [body["prompt"] for body in bodies(*args, **settings)]


def written(tmp_path, text):
    path = tmp_path / "data"
    path.write_text(text)
    return str(path)


def lines(tmp_path, *rows):
    return written(tmp_path, "\n".join(map(json.dumps, rows)))


class TestRandom:
    def test_prompts_are_distinct_token_ids_below_the_vocab_size(self):
        found = prompts(random_vocab_size=50, random_input_len=20)
        assert all(len(ids) == 20 and 0 <= min(ids) <= max(ids) < 50 for ids in found)
        assert len(set(map(tuple, found))) == len(found)

    def test_chat_prompts_are_distinct_words(self):
        found = [
            body["messages"][0]["content"] for body in bodies(endpoint="chat", random_input_len=30)
        ]
        assert {len(text.split()) for text in found} == {30}
        assert len(set(found)) == len(found)

    def test_lengths_fill_the_range(self):
        found = bodies(400, random_input_len=10, random_output_len=20, random_range_ratio=0.5)
        assert {len(body["prompt"]) for body in found} == set(range(5, 16))
        assert {body["max_tokens"] for body in found} == set(range(10, 31))

    @pytest.mark.parametrize(
        ("length", "ratio", "expected"),
        [(128, 0.0, (128, 128)), (5, 0.3, (3, 7)), (1, 1.0, (1, 2))],
    )
    def test_the_range_is_rounded_outwards(self, length, ratio, expected):
        assert length_range(length, ratio) == expected

    def test_prompts_repeat_only_with_the_same_seed(self):
        assert bodies(5, seed=1) == bodies(5, seed=1)
        assert bodies(5, seed=1) != bodies(5, seed=2)
        first, second = (resolve_config(BenchConfig())[1].prompt(0) for _ in range(2))
        assert first != second

    def test_warm_ups_share_no_prompt_with_the_measurement(self):
        config = BenchConfig(seed=0)
        measured, warm = RandomDataset(config), RandomDataset(config, WARMUP)
        assert all(measured.prompt(i).content != warm.prompt(i).content for i in range(20))

    def test_ignore_eos_is_requested_by_default(self):
        assert bodies(1)[0]["ignore_eos"] is True
        assert "ignore_eos" not in bodies(1, ignore_eos=False)[0]

    def test_output_len_overrides_the_dataset(self):
        assert {
            body["max_tokens"] for body in bodies(20, random_range_ratio=0.9, output_len=7)
        } == {7}


def test_prefixes_are_shared_and_the_rest_is_not():
    found = prompts(100, dataset_name="prefix", prefix_len=30, num_prefixes=4, random_input_len=10)
    assert {len(ids) for ids in found} == {40}
    assert len({tuple(ids[:30]) for ids in found}) == 4
    assert len({tuple(ids[30:]) for ids in found}) == 100


def test_extra_fields_are_added_to_every_body():
    found = bodies(2, extra_body={"temperature": 0.7, "logit_bias": {"1": 2}})
    assert [(one["temperature"], one["logit_bias"]) for one in found] == [(0.7, {"1": 2})] * 2
    with pytest.raises(ConfigError, match="--extra-body cannot set stream"):
        BenchConfig(extra_body={"stream": False})


class TestCustom:
    def test_prompts_are_sent_unchanged_and_start_over(self, tmp_path):
        path = lines(
            tmp_path,
            {"prompt": "One?", "output_len": 5},
            {"prompt": [1, 2, 3]},
            {"prompt": "Three?", "max_tokens": 9},
        )
        found = bodies(4, dataset_name="custom", dataset_path=path, random_output_len=77)
        assert [body["prompt"] for body in found] == ["One?", [1, 2, 3], "Three?", "One?"]
        assert [body["max_tokens"] for body in found] == [5, 77, 9, 5]

    def test_conversations_go_to_the_chat_route(self, tmp_path):
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello?"},
        ]
        path = lines(tmp_path, {"messages": messages}, {"prompt": "And you?"})
        found = bodies(2, dataset_name="custom", dataset_path=path, endpoint="/v1/chat/completions")
        assert [body["messages"] for body in found] == [
            messages,
            [{"role": "user", "content": "And you?"}],
        ]
        with pytest.raises(ConfigError, match=r"data:1 needs --endpoint chat"):
            bodies(1, dataset_name="custom", dataset_path=path)

    @pytest.mark.parametrize(
        "text", ["{", "[1]", '{"question": "x"}', '{"prompt": "x", "output_len": 0}', ""]
    )
    def test_invalid_line_is_an_error_with_its_number(self, tmp_path, text):
        path = written(tmp_path, '{"prompt": "fine"}\n' + text if text else "")
        with pytest.raises(ConfigError, match=r"data:2|contains no requests"):
            bodies(1, dataset_name="custom", dataset_path=path)

    def test_missing_file_is_an_error(self, tmp_path):
        with pytest.raises(ConfigError, match="No such file"):
            bodies(1, dataset_name="custom", dataset_path=str(tmp_path / "missing"))


def test_sharegpt_sends_first_questions_with_recorded_lengths(tmp_path):
    def conversation(*turns):
        return {"conversations": [{"from": "human", "value": turn} for turn in turns]}

    rows = [
        conversation("What is a KV cache, and why?", "x" * 400, "And then?"),
        conversation("Alone, without any answer at all."),
        conversation("Hi", "x" * 400),  # too short
        conversation("x" * 8000, "x" * 400),  # too long
        conversation("What is a token, please?", "y" * 4000),
    ]
    found = bodies(2, dataset_name="sharegpt", dataset_path=written(tmp_path, json.dumps(rows)))
    assert [body["prompt"] for body in found] == [
        "What is a KV cache, and why?",
        "What is a token, please?",
    ]
    assert [body["max_tokens"] for body in found] == [100, 1000]
    short = written(tmp_path, json.dumps(rows[1:3]))
    with pytest.raises(ConfigError, match="no conversation of the lengths that are sent"):
        bodies(1, dataset_name="sharegpt", dataset_path=short)


class TestTrace:
    ROWS = (
        {"timestamp": 3000, "input_length": 1030, "output_length": 9, "hash_ids": [46, 48]},
        {"timestamp": 1000, "input_length": 1100, "output_length": 7, "hash_ids": [46, 47]},
        {"timestamp": 6500, "input_length": 20, "output_length": 3, "hash_ids": []},
    )

    def config(self, tmp_path, **settings):
        path = lines(tmp_path, *self.ROWS)
        return resolve_config(
            BenchConfig(seed=0, dataset_name="trace", dataset_path=path, **settings)
        )

    def test_is_replayed_at_its_recorded_times(self, tmp_path):
        config, dataset = self.config(tmp_path)
        assert (config.is_paced, config.max_requests) == (True, 3)
        assert arrival_times(config, dataset).tolist() == [0.0, 2.0, 5.5]
        assert len(arrival_times(*self.config(tmp_path, duration=5.0))) == 2

    def test_rate_replaces_the_recorded_times(self, tmp_path):
        config, dataset = self.config(tmp_path, request_rate=100.0)
        assert config.max_requests == 3
        assert arrival_times(config, dataset)[-1] < 2.0
        assert arrival_times(*self.config(tmp_path, max_concurrency=2)) is None

    def test_prompts_have_recorded_lengths_and_shared_blocks(self, tmp_path):
        _, dataset = self.config(tmp_path)
        first, second, third = (dataset.prompt(i) for i in range(3))
        assert [len(p.content) for p in (first, second, third)] == [1100, 1030, 20]
        assert [p.max_tokens for p in (first, second, third)] == [7, 9, 3]
        assert first.content[:512] == second.content[:512]
        assert first.content[512:1024] != second.content[512:1024]

    @pytest.mark.parametrize(
        "text",
        [
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:17:03.9799600,30,4\n2023-11-16 18:17:05.2299600,10,8\n",
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5,ChatGPT,30,4,34,log\n6.25,GPT-4,10,8,18,log\n",
        ],
        ids=["azure", "burstgpt"],
    )
    def test_published_traces_are_supported(self, tmp_path, text):
        config = BenchConfig(seed=0, dataset_name="trace", dataset_path=written(tmp_path, text))
        dataset = open_dataset(config)
        assert dataset.times == pytest.approx(np.array([0.0, 1.25]))
        assert [(len(p.content), p.max_tokens) for p in map(dataset.prompt, range(2))] == [
            (30, 4),
            (10, 8),
        ]

    def test_invalid_trace_line_is_an_error_with_its_number(self, tmp_path):
        path = lines(tmp_path, self.ROWS[0], {"timestamp": 1})
        with pytest.raises(ConfigError, match="data:2 is not a trace line"):
            open_dataset(BenchConfig(seed=0, dataset_name="trace", dataset_path=path))
