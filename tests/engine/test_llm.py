"""The offline interface: prompts, outputs, their order, and cleanup."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import checkpoints, engines
from tests.checkpoints import EOS, VOCAB
from toolkit import LLM, SamplingParams
from toolkit.errors import ConfigError, EngineDeadError, InvalidRequestError

TEXTS = ["a", "The sea is", "ünïcödé ☃", "x" * 60]


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path]) -> LLM:
    return LLM(str(checkpoint("llama3-gqa")), device="cpu", max_num_seqs=8)


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    return checkpoints.make_reference("llama3-gqa")


@pytest.fixture(autouse=True)
def check_cleanup(request):
    """Check after every test that the engine is idle and its cache is free."""
    yield
    if "llm" in request.fixturenames:
        scheduler = engines.scheduler(request.getfixturevalue("llm"))
        assert scheduler.num_unfinished == 0
        assert scheduler.pool.num_free == scheduler.pool.num_blocks
        assert not request.getfixturevalue("llm")._outputs.requests


def greedy(max_tokens: int = 12, **params: object) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, **{"max_tokens": max_tokens, "ignore_eos": True} | params
    )


def tokens_of(outputs) -> list[list[int]]:
    return [list(answer.token_ids) for output in outputs for answer in output.outputs]


def ragged(seed: int, count: int = 6) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 17, 40]))] for _ in range(count)]


class TestPrompts:
    def test_ragged_prompts_come_back_in_order(self, llm, reference):
        prompts = ragged(0)
        outputs = llm.generate(prompts, greedy())
        assert [output.prompt_token_ids for output in outputs] == prompts
        assert tokens_of(outputs) == [
            checkpoints.greedy(reference, prompt, 12) for prompt in prompts
        ]
        assert all(output.finished for output in outputs)

    def test_text_is_tokenized_and_kept(self, llm):
        outputs = llm.generate(TEXTS, greedy())
        tokenizer = checkpoints.make_tokenizer()
        assert [output.prompt for output in outputs] == TEXTS
        assert [output.prompt_token_ids for output in outputs] == [
            tokenizer.encode(text) for text in TEXTS
        ]
        for output in outputs:
            assert output.outputs[0].text == tokenizer.decode(
                output.outputs[0].token_ids, skip_special_tokens=True
            )

    def test_every_prompt_format_gives_the_same_answer(self, llm):
        ids = checkpoints.make_tokenizer().encode("The sea")
        formats = ["The sea", ids, {"prompt": "The sea"}, {"prompt_token_ids": ids}]
        answers = tokens_of(llm.generate(formats, greedy()))
        assert len(answers) == 4
        assert answers == [answers[0]] * 4
        for prompt in formats:
            assert tokens_of(llm.generate(prompt, greedy())) == [answers[0]]

    def test_sampling_params_for_all_or_one_each(self, llm):
        each = [greedy(max_tokens=n) for n in (1, 5, 3)]
        assert [len(tokens) for tokens in tokens_of(llm.generate(["a", "b", "c"], each))] == [
            1,
            5,
            3,
        ]
        assert [len(tokens) for tokens in tokens_of(llm.generate(["a", "b", "c"], each[1]))] == [
            5,
            5,
            5,
        ]
        with pytest.raises(InvalidRequestError, match="3 prompts and 2 sampling parameters"):
            llm.generate(["a", "b", "c"], each[:2])

    def test_no_prompts_give_no_outputs(self, llm):
        assert llm.generate([], greedy()) == []

    def test_chat_applies_the_template(self, llm):
        messages = [{"role": "user", "content": "hi"}]
        tokenizer = checkpoints.make_tokenizer()
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        (output,) = llm.chat(messages, greedy())
        assert output.prompt_token_ids == tokenizer.encode(rendered, add_special_tokens=False)
        several = llm.chat([messages, messages], greedy())
        assert tokens_of(several) == [list(output.outputs[0].token_ids)] * 2

    def test_chat_takes_the_input_of_templates_by_itself_or_in_a_dict(self, llm):
        messages = [{"role": "user", "content": "hi"}]
        template = "{{ messages[0].content }}{{ mood }}"
        options = {"chat_template": template, "mood": "!"}
        expected = checkpoints.make_tokenizer().encode("hi!")
        assert llm.chat_prompt(messages, **options) == expected
        assert llm.chat_prompt(messages, chat_template_kwargs=options) == expected
        given = {"chat_template": template, "chat_template_kwargs": {"mood": "!"}}
        assert llm.chat(messages, greedy(1), **given)[0].prompt_token_ids == expected

    def test_chat_reports_the_templates_error(self, llm):
        with pytest.raises(InvalidRequestError, match="no such role"):
            llm.chat([{"role": "pirate", "content": "arr"}])

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ("", "empty"),
            ([VOCAB], f"token {VOCAB}"),
            ([-1, 3], "token -1"),
            ({"text": "hi"}, "prompt_token_ids"),
            ({"prompt_token_ids": ["a"]}, "list of integers"),
            ({"prompt_token_ids": []}, "empty"),
            ([3] * 160, "160 tokens"),
            ([3] * 150, "162 tokens .150 in the prompt, 12 in"),
            ("x" * 300_000, "300000 characters"),
        ],
    )
    def test_one_invalid_prompt_prevents_the_whole_call(self, llm, monkeypatch, bad, message):
        monkeypatch.setattr(engines.core(llm), "step", lambda: pytest.fail("something ran"))
        with pytest.raises(InvalidRequestError, match=message):
            llm.generate(["good", bad, "good"], greedy())

    @pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias"])
    def test_tokens_in_sampling_params_are_checked(self, llm, name):
        value = {VOCAB: 1.0} if name == "logit_bias" else [VOCAB]
        with pytest.raises(InvalidRequestError, match=f"{name} contains token {VOCAB}"):
            llm.generate("a", SamplingParams(**{name: value}))

    def test_a_model_without_tokenizer_takes_token_ids_only(self, checkpoint, tmp_path, reference):
        folder = tmp_path / "bare"
        shutil.copytree(
            checkpoint("llama3-gqa"),
            folder,
            ignore=shutil.ignore_patterns("*token*", "*.jinja", "special*"),
        )
        llm = LLM(str(folder), device="cpu", max_num_seqs=2)
        assert tokens_of(llm.generate([[1, 2, 3]], greedy())) == [
            checkpoints.greedy(reference, [1, 2, 3], 12)
        ]
        for call in (
            lambda: llm.generate("text", greedy()),
            lambda: llm.generate([1, 2], greedy(stop=["x"])),
        ):
            with pytest.raises(InvalidRequestError, match="no tokenizer"):
                call()

    def test_another_tokenizer_keeps_the_models_end_token(self, checkpoint, tmp_path, reference):
        """--tokenizer changes how text is tokenized, not the end token."""
        words = tmp_path / "tokenizer"
        tokenizer = checkpoints.make_tokenizer()
        tokenizer.eos_token = "<|user|>"
        tokenizer.save_pretrained(words)
        llm = LLM(str(checkpoint("llama3-gqa")), device="cpu", max_num_seqs=2, tokenizer=str(words))
        (output,) = llm.generate(
            [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=9, logit_bias={EOS: 100})
        )
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([EOS], "stop")


class TestSettings:
    def test_an_unknown_setting_names_the_nearest(self, checkpoint):
        with pytest.raises(ConfigError, match=r"max_num_seq.*Did you mean max_num_seqs"):
            LLM(str(checkpoint("gpt2")), max_num_seq=3)

    def test_vllms_setting_names_work(self, checkpoint, reference):
        llm = LLM(
            str(checkpoint("llama3-gqa")),
            device="cpu",
            max_num_batched_tokens=32,
            num_gpu_blocks_override=26,
        )
        assert (llm.info.max_num_batched_tokens, llm.info.num_blocks) == (32, 26)
        prompts = ragged(1)
        assert tokens_of(llm.generate(prompts, greedy(), use_tqdm=False)) == [
            checkpoints.greedy(reference, prompt, 12) for prompt in prompts
        ]

    def test_priorities_decide_the_order(self, checkpoint, monkeypatch):
        llm = LLM(
            str(checkpoint("llama3-gqa")),
            device="cpu",
            scheduling_policy="priority",
            max_num_seqs=1,
        )
        order: list[int] = []
        process = llm._outputs.process
        monkeypatch.setattr(
            llm._outputs,
            "process",
            lambda message, now: (
                order.extend(out.number for out in message.outputs),
                process(message, now),
            )[1],
        )
        llm.generate(["a", "b", "c"], greedy(max_tokens=2), priority=[5, -1, 0])
        assert list(dict.fromkeys(order)) == [1, 2, 0]
        with pytest.raises(InvalidRequestError, match="2 prompts and 1 priorities"):
            llm.generate(["a", "b"], priority=[1])


class TestEnds:
    def expected(self, reference, prompt: list[int], count: int = 30) -> list[int]:
        return checkpoints.greedy(reference, prompt, count)

    def test_length(self, llm):
        (answer,) = llm.generate("a", greedy(max_tokens=7))[0].outputs
        assert (len(answer.token_ids), answer.finish_reason, answer.stop_reason) == (
            7,
            "length",
            None,
        )

    def test_the_context_ends_an_answer_without_max_tokens(self, llm):
        prompt = [5] * 100
        (answer,) = llm.generate(prompt, greedy(max_tokens=None))[0].outputs
        assert (len(answer.token_ids), answer.finish_reason) == (60, "length")

    def test_the_end_token_adds_no_text(self, llm):
        params = SamplingParams(temperature=0, max_tokens=9, logit_bias={EOS: 100})
        (answer,) = llm.generate("a", params)[0].outputs
        assert (answer.token_ids, answer.text) == ([EOS], "")
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)

    def test_ignore_eos_continues(self, llm):
        params = greedy(max_tokens=9, logit_bias={EOS: 100})
        (answer,) = llm.generate("a", params)[0].outputs
        assert (answer.token_ids, answer.finish_reason) == ([EOS] * 9, "length")

    def test_min_tokens_delays_the_end(self, llm):
        params = SamplingParams(temperature=0, max_tokens=9, min_tokens=4, logit_bias={EOS: 100})
        (answer,) = llm.generate("a", params)[0].outputs
        assert len(answer.token_ids) == 5
        assert EOS not in answer.token_ids[:4]
        assert (answer.token_ids[-1], answer.finish_reason) == (EOS, "stop")

    def test_a_stop_token_ends_the_answer_and_is_reported(self, llm, reference):
        prompt = [10, 20, 30]
        expected = self.expected(reference, prompt)
        stop = expected[8]
        first = expected.index(stop)
        (answer,) = llm.generate(prompt, greedy(max_tokens=30, stop_token_ids=[stop]))[0].outputs
        assert answer.token_ids == expected[: first + 1]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


class TestLogprobs:
    def test_chosen_and_likeliest_tokens_match_transformers(self, llm, reference):
        prompt = [4, 8, 15, 16, 23, 42]
        (output,) = llm.generate(prompt, greedy(max_tokens=8, logprobs=4))
        answer = output.outputs[0]
        values = checkpoints.logits(reference, prompt + answer.token_ids).log_softmax(-1)[
            len(prompt) - 1 : -1
        ]
        assert len(answer.logprobs) == 8
        for position, token, row in zip(answer.logprobs, answer.token_ids, values, strict=True):
            top = row.topk(4)
            assert list(position) == top.indices.tolist()
            assert position[token].rank == 1
            for value, expected in zip(position.values(), top.values.tolist(), strict=True):
                assert value.logprob == pytest.approx(expected, abs=1e-3)
        assert answer.cumulative_logprob == pytest.approx(
            float(values.max(-1).values.sum()), abs=1e-2
        )

    def test_logprobs_are_of_the_raw_logits(self, llm, reference):
        prompt = [4, 8, 15]
        params = SamplingParams(
            max_tokens=1,
            seed=3,
            temperature=2.0,
            top_k=3,
            logprobs=1,
            repetition_penalty=1.5,
            logit_bias={7: 100},
        )
        (answer,) = llm.generate(prompt, params)[0].outputs
        row = checkpoints.logits(reference, prompt)[-1].log_softmax(-1)
        assert answer.token_ids == [7]
        first, *_ = answer.logprobs[0].items()
        assert first[0] == 7
        assert first[1].logprob == pytest.approx(float(row[7]), abs=1e-3)
        assert first[1].rank == int((row > row[7]).sum()) + 1


class TestStream:
    def test_deltas_add_up_to_the_output(self, llm):
        params = greedy(max_tokens=30, logprobs=1)
        (full,) = llm.generate("The sea", params)
        deltas = list(llm.stream("The sea", params))
        assert "".join(delta.text for delta in deltas) == full.outputs[0].text
        assert [t for delta in deltas for t in delta.token_ids] == full.outputs[0].token_ids
        assert [p for delta in deltas for p in delta.logprobs] == full.outputs[0].logprobs
        assert [delta.finish_reason for delta in deltas][-1] == "length"
        assert len(deltas) == 30

    def test_closing_a_stream_frees_its_blocks(self, llm):
        stream = llm.stream("The sea", greedy(max_tokens=100))
        next(stream)
        assert engines.scheduler(llm).num_unfinished == 1
        stream.close()
        assert engines.scheduler(llm).num_unfinished == 0
        assert engines.scheduler(llm).pool.usage == 0.0

    def test_two_streams_and_a_batch_can_be_interleaved(self, llm):
        settings = greedy(max_tokens=10)
        expected = [
            llm.generate(text, settings)[0].outputs[0].text for text in ("abc", "xyz", "mno")
        ]
        first, second = llm.stream("abc", settings), llm.stream("xyz", settings)
        texts = [next(first).text, next(first).text], [next(second).text]
        middle = llm.generate("mno", settings)[0].outputs[0].text
        for index, stream in ((1, second), (0, first)):
            texts[index].extend(delta.text for delta in stream)
        assert ["".join(texts[0]), "".join(texts[1]), middle] == expected


class TestAfterAnException:
    def test_the_engine_works_after_an_exception_in_a_caller(self, llm, reference):
        def fail(*_: object) -> None:
            raise ZeroDivisionError

        prompts = ragged(2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm._outputs, "process", fail)
            with pytest.raises(ZeroDivisionError):
                llm.generate(prompts, greedy())
        assert tokens_of(llm.generate(prompts, greedy())) == [
            checkpoints.greedy(reference, prompt, 12) for prompt in prompts
        ]

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("at", [0, 3])
    def test_an_interrupted_step_leaves_the_cache_correct(self, checkpoint, reference, overlap, at):
        """Ctrl-C during a prompt, then the same prompts again; an open stream continues."""
        llm = LLM(
            str(checkpoint("llama3-gqa")), device="cpu", max_num_seqs=8, async_scheduling=overlap
        )
        stream = llm.stream([9, 9, 9], greedy(max_tokens=20))
        prefix = next(stream).token_ids
        model = engines.model(llm)
        forward, calls = model.forward, []

        def interrupt(*args: object) -> torch.Tensor:
            calls.append(args)
            if len(calls) > at:
                raise KeyboardInterrupt
            return forward(*args)

        prompts = ragged(3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "forward", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompts, greedy())
        assert tokens_of(llm.generate(prompts, greedy())) == [
            checkpoints.greedy(reference, prompt, 12) for prompt in prompts
        ]
        rest = [token for delta in stream for token in delta.token_ids]
        assert prefix + rest == checkpoints.greedy(reference, [9, 9, 9], 20)
        assert engines.scheduler(llm).pool.usage == 0.0
        assert engines.scheduler(llm).num_steps_in_flight == 0

    def test_calls_after_shutdown_raise(self, checkpoint):
        llm = LLM(str(checkpoint("gpt2")), device="cpu", max_num_seqs=2)
        stream = llm.stream([9, 9, 9], greedy(20))
        next(stream)
        llm.shutdown()
        for use in (lambda: llm.generate("a"), lambda: next(stream), lambda: list(llm.stream("a"))):
            with pytest.raises(EngineDeadError, match=r"^The engine was shut down\.$"):
                use()
        llm.shutdown()


def test_a_steps_work_is_computed(checkpoint):
    llm = LLM(str(checkpoint("gpt2")), device="cpu", max_num_seqs=2)
    core, info = engines.core(llm), llm.info
    work = []
    observe = core.stats
    core.stats = lambda step=None, num_sampled=0: (
        work.append(step and core._work_of(step, step.total_tokens)) or observe(step, num_sampled)
    )
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
    prompt, token = [one for one in work if one]
    config = json.loads((checkpoint("gpt2") / "config.json").read_text())
    width, per_token = (
        config["n_layer"] * config["n_embd"],
        info.cache_bytes / info.num_blocks / info.block_size,
    )
    assert info.attention_size == width
    assert prompt == (
        2 * info.num_parameters * 3 + 4 * width * (1 + 2 + 3),
        info.weight_bytes + 3 * per_token,
        3 * per_token,
    )
    assert token == (
        2 * info.num_parameters + 4 * width * 4,
        info.weight_bytes + 4 * per_token,
        per_token,
    )
