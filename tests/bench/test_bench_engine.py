"""The engine benchmarks, on the demo model with small workloads."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch

from tests import hearing
from toolkit import LLM, SamplingParams
from toolkit.bench import workloads
from toolkit.demo import MODEL_DIR
from tools.bench import models
from tools.bench.models import (
    CONFIGS,
    make_model,
    save_int4_weights,
    save_tokenizer,
    save_weights,
)


@pytest.fixture
def tk(tk_here):
    """Function that runs `tk bench` and returns (exit code, stdout, stderr)."""

    def run(*arguments):
        done = tk_here("bench", *arguments, "--num-threads", "1")
        return done.returncode, done.stdout, done.stderr

    return run


class TestWorkloads:
    """The published comparisons use these prompts, so their sums are fixed."""

    @pytest.mark.parametrize(
        ("context", "prompt_tokens", "output_tokens"),
        [(1024, 68_822, 68_249), (40_960, 142_827, 133_966)],
    )
    def test_offline_mix_never_changes(self, context, prompt_tokens, output_tokens):
        work = workloads.offline(context, 50_257)
        assert len(work.prompts) == 256
        assert work.num_prompt_tokens == prompt_tokens
        assert sum(work.output_lens) == output_tokens
        assert work.prompts[0][:4] == [6311, 6890, 663, 4242]

    def test_other_prompts_never_change(self):
        assert workloads.latency(8, 50_257).prompts[7][-3:] == [6031, 7973, 4648]
        assert workloads.prefill(1024, 50_257).prompts[31][-2:] == [462, 6780]
        assert workloads.prefill(40_960, 50_257).prompts[31][-2:] == [7371, 2971]

    def test_lengths_fit_the_context(self):
        assert workloads.offline(1024, 50_257).longest <= 1024
        assert {len(p) for p in workloads.prefill(1024, 50_257).prompts} == {1000}
        assert {len(p) for p in workloads.prefill(8192, 50_257).prompts} == {2048}

    def test_throughput_has_one_length_and_no_shared_prefix(self):
        work = workloads.throughput(40_960, 50_257, count=90, wave=30, input_len=100, output_len=7)
        assert {len(prompt) for prompt in work.prompts} == {100}
        assert len({tuple(prompt[:2]) for prompt in work.prompts}) == 90
        assert work.output_lens == [7] * 90

    @pytest.mark.parametrize(("context", "length"), [(512, 200), (1024, 200), (40_960, 1000)])
    def test_throughput_lengths_default_by_context(self, context, length):
        work = workloads.throughput(context, 50_257, count=1, wave=1)
        assert (len(work.prompts[0]), work.output_lens) == (length, [length])

    def test_warm_up_is_the_first_wave(self):
        work = workloads.throughput(1024, 300, count=5, wave=2)
        assert work.warm_up.prompts == work.prompts[:2]
        assert work.warm_up.output_lens == [16] * 2
        short = workloads.throughput(1024, 300, count=5, wave=2, output_len=3)
        assert short.warm_up.output_lens == [3] * 2
        other = workloads.latency(3, 300)
        assert other.warm_up == other

    def test_ids_fit_a_small_vocabulary(self):
        assert max(max(p) for p in workloads.prefill(8192, 300).prompts) == 299


class TestRows:
    def test_offline(self, tk):
        code, out, err = tk(
            *(
                "offline",
                "--num-prompts",
                "6",
                "--min-len",
                "3",
                "--max-len",
                "9",
                "--repeats",
                "2",
                "--json",
            )
        )
        assert code == 0, err
        startup, row = map(json.loads, out.splitlines())
        vocab_size = json.loads((MODEL_DIR / "config.json").read_text())["vocab_size"]
        work = workloads.offline(512, vocab_size, count=6, shortest=3, longest=9)
        assert startup["bench"] == "startup"
        assert sum(startup["phases_s"].values()) <= startup["seconds"]
        assert row["requests"] == 6
        assert row["prompt_tokens"] == work.num_prompt_tokens
        assert row["output_tokens"] == sum(work.output_lens)  # no answer ended early
        assert not row["prefix_caching"]
        assert row["seconds"] == min(row["all_seconds"])
        assert len(row["all_seconds"]) == 2
        assert row["output_tokens_per_s"] == pytest.approx(
            row["output_tokens"] / row["seconds"], rel=0.01
        )

    def test_throughput_has_three_waves(self, tk):
        code, out, err = tk(
            *("throughput", "--input-len", "6", "--output-len", "5", "--max-num-seqs", "2"),
            "--json",
        )
        assert code == 0, err
        _, row = map(json.loads, out.splitlines())
        assert (row["requests"], row["prompt_tokens"], row["output_tokens"]) == (6, 36, 30)
        assert len(row["all_seconds"]) == 1
        assert row["preemptions"] == 0
        seconds = row["seconds"]
        assert row["requests_per_s"] == pytest.approx(6 / seconds, rel=0.01)
        assert row["total_tokens_per_s"] == pytest.approx(66 / seconds, rel=0.01)
        # The waves end at about a third, two thirds and all of the time.
        assert 0 < row["mean_request_s"] < row["p99_request_s"] <= seconds

    def test_throughput_line_has_the_time_of_a_request(self, tk):
        code, out, err = tk(
            *("throughput", "--input-len", "6", "--output-len", "5", "--num-prompts", "3")
        )
        assert code == 0, err
        row = out.splitlines()[-1]
        assert re.search(r"3 requests .* requests/s   request [\d.]+ s mean, [\d.]+ p99 ", row)

    def test_throughput_line_has_preemptions(self, tk):
        """Two of three requests fit when they end, in 6 blocks of 16 tokens."""
        options = ("--input-len", "16", "--output-len", "24", "--num-prompts", "3")
        memory = ("--num-gpu-blocks-override", "6", "--max-model-len", "48")
        code, out, err = tk("throughput", *options, *memory)
        assert code == 0, err
        row = out.splitlines()[-1]
        assert re.search(r" p99   [1-9]\d* preemptions   \(runs", row)

    def test_latency_has_a_row_for_each_batch_size(self, tk):
        code, out, err = tk(
            *(
                "latency",
                "--batch-sizes",
                "1,3",
                "--input-len",
                "4",
                "--output-len",
                "5",
                "--repeats",
                "1",
            ),
            "--json",
        )
        assert code == 0, err
        _, *rows = map(json.loads, out.splitlines())
        assert [(row["requests"], row["output_tokens"]) for row in rows] == [(1, 5), (3, 15)]
        for row in rows:  # seconds have four decimals, so that half of the last is 0.01 ms a token
            assert row["ms_per_token"] == pytest.approx(row["seconds"] * 1e3 / 5, abs=0.0101)

    def test_prefill_without_json_is_a_table(self, tk):
        code, out, err = tk("prefill", "--num-prompts", "3", "--input-len", "8", "--repeats", "1")
        assert code == 0, err
        heading, startup, row = out.splitlines()
        assert "tk-demo" in heading
        assert startup.startswith("start-up")
        assert "3 requests" in row
        assert "prompt tok/s" in row

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("prefill", "--input-len", "5000"), "sequences of 5001 tokens"),
            (
                ("throughput", "--input-len", "60", "--output-len", "5", "--max-model-len", "64"),
                "sequences of 65 tokens, but the model's context is 64",
            ),
            (
                ("latency", "--batch-sizes", "1,x"),
                "--batch-sizes takes a list such as 1,8,64; got '1,x'",
            ),
            (("latency", "--batch-sizes", "0"), "--batch-sizes takes a list"),
            (("--rps", "5", "offline"), "--request-rate is not allowed before 'offline'"),
            (("offline", "--device", "cpu", "--profile", "/dev/null"), "--profile needs a GPU"),
            (("offline", "--profile", "/nowhere/trace.json"), "--profile cannot write"),
        ],
    )
    def test_usage_error_is_one_line_on_stderr(self, tk, arguments, message):
        code, _, err = tk(*arguments)
        assert code == 2
        assert message in err
        assert len(err.strip().splitlines()) == 1

    def test_models_that_hear_are_refused(self, tk, tmp_path):
        folder = hearing.save(tmp_path / "whisper")
        code, _, err = tk("latency", str(folder), "--device", "cpu", "--dtype", "float32")
        assert code == 2
        assert "this model transcribes sound" in err


def test_gpu_busy_time_is_the_union_of_its_intervals():
    profile = pytest.importorskip("toolkit.bench.profile")
    spans = [(5, 9), (0, 2), (1, 4), (6, 7), (9, 10), (20, 21)]
    expected = len({t for start, end in spans for t in range(start, end)})
    assert profile.union_length(spans) == expected == 10
    assert profile.union_length([]) == 0.0


def test_longest_kernels_come_first():
    profile = pytest.importorskip("toolkit.bench.profile")
    events = [{"name": "a", "dur": 1.0}, {"name": "b", "dur": 3.0}, {"name": "a", "dur": 4.0}]
    first, second = profile.longest_kernels(events, length=10.0)
    assert first == {"name": "a", "share": 0.5, "count": 2, "mean_us": 2.5}
    assert (second["name"], second["share"]) == ("b", 0.3)


class TestModelFolders:
    def test_every_id_has_text_and_text_round_trips(self, tmp_path):
        from toolkit.text.tokenizer import Tokenizer

        make_model(tmp_path, CONFIGS["gpt2"])
        tokenizer = Tokenizer(tmp_path)
        assert tokenizer.size == 50_257
        assert tokenizer.eos_token_id == 50_256
        assert all(tokenizer.token_bytes(id) for id in range(50_256))
        assert (
            tokenizer.decode(tokenizer.encode("Über 3 apples,\n  naïvely"))
            == "Über 3 apples,\n  naïvely"
        )

    def test_tokenizers_have_exactly_the_model_vocab_size(self, tmp_path):
        import tokenizers

        for size in (257, 300, 5000):
            save_tokenizer(tmp_path / "tokenizer.json", size, {})
            assert (
                tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size()
                == size
            )

    def test_engine_runs_one_with_dummy_weights(self, tk, tmp_path):
        small = {
            "vocab_size": 300,
            "n_positions": 64,
            "n_ctx": 64,
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 2,
        }
        make_model(tmp_path / "tiny", CONFIGS["gpt2"] | small)
        code, out, err = tk(
            *(
                "latency",
                str(tmp_path / "tiny"),
                "--load-format",
                "dummy",
                "--json",
                "--repeats",
                "1",
            ),
            *("--batch-sizes", "2", "--input-len", "3", "--output-len", "4"),
        )
        assert code == 0, err
        assert json.loads(out.splitlines()[-1])["output_tokens"] == 8

    def test_int4_weights_make_a_valid_checkpoint(self, tmp_path):
        small = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 256}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        config = CONFIGS["llama-3.1-8b"] | small | heads | {"num_hidden_layers": 2}
        make_model(tmp_path, config)
        save_int4_weights(tmp_path, "40KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        limits = {"num_threads": 1, "kv_cache_memory": 0.01, "max_model_len": 64}
        llm = LLM(str(tmp_path), device="cpu", **limits)
        (done,) = llm.generate([[5, 6]], SamplingParams(max_tokens=3, logprobs=0), use_tqdm=False)
        assert all(-50 < x.logprob <= 0 for at in done.outputs[0].logprobs for x in at.values())

    def test_random_weights_make_a_valid_checkpoint(self, tmp_path):
        """The engine and Transformers generate the same from a checkpoint in several files."""

        import transformers

        small = {
            "vocab_size": 300,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
        }
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
        make_model(tmp_path, CONFIGS["qwen3-0.6b"] | small | heads | {"torch_dtype": "float32"})
        save_weights(tmp_path, "20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        llm = LLM(str(tmp_path), device="cpu", num_threads=1, kv_cache_memory=0.01)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (done,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        expected = reference.generate(
            torch.tensor([[5, 6, 7]]), min_new_tokens=6, max_new_tokens=6, do_sample=False
        )
        assert list(done.outputs[0].token_ids) == expected[0, 3:].tolist()

    @pytest.mark.parametrize("flag", ["--weights", "--int4"])
    def test_weights_are_created_only_for_named_models(self, tmp_path, monkeypatch, capsys, flag):
        monkeypatch.setattr(sys, "argv", ["models", flag, str(tmp_path)])
        with pytest.raises(SystemExit):
            models.main()
        assert "need names" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []
