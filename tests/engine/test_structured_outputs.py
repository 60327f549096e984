"""Structured outputs of models with random weights, which would generate anything."""

from __future__ import annotations

import json
import logging
import random
import re
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jsonschema
import pytest
import torch

from tests import checkpoints, engines
from toolkit import LLM, SamplingParams
from toolkit.engine.core import EngineCore
from toolkit.engine.messages import EngineRequest
from toolkit.errors import EngineError, InvalidRequestError
from toolkit.sampling.json_schema import (
    MAX_PATTERNS,
    MAX_PROPERTIES,
    MAX_RULES,
    MAX_RULES_SIZE,
)
from toolkit.sampling.structured_outputs import MAX_SIZE, StructuredOutputsParams

PROMPTS = ["Describe", "{", "What is 2 + 2?", "x"]
HARD = "(((a|b){1,50}c?){1,50}a?){1,50}"
"""Within the limits when compiled, beyond them during generation."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    reference = checkpoints.make_reference("llama3-gqa")
    folder = checkpoints.save(reference, tmp_path_factory.mktemp("structured") / "model")
    checkpoints.edit_json(folder / "config.json", max_position_embeddings=1024)
    return reference, folder


@pytest.fixture(scope="module")
def llm(model):
    return LLM(str(model[1]), num_gpu_blocks_override=4096, max_num_seqs=64)


def params(max_tokens: int = 100, **options: Any) -> SamplingParams:
    constraint = {
        k: options.pop(k) for k in list(options) if k in StructuredOutputsParams.__struct_fields__
    }
    asked = StructuredOutputsParams(**constraint) if constraint else None
    return SamplingParams(max_tokens=max_tokens, structured_outputs=asked, **options)


def texts(llm: LLM, *many: SamplingParams) -> list[list[tuple[str, str]]]:
    """Return (text, finish reason) of each answer of each request."""
    outputs = llm.generate([PROMPTS[i % 4] for i in range(len(many))], list(many), use_tqdm=False)
    return [
        [(answer.text, answer.finish_reason) for answer in output.outputs] for output in outputs
    ]


# 200 schemas


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a random JSON schema of supported keywords; with `$defs` it is complete."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    if depth < 3:
        kinds += ["object", "object", "array", "anyOf", "ref"]
    kind = rng.choice(kinds) if depth else rng.choice(["object", "object", "array"])
    if kind == "string":
        low = rng.randint(0, 4)
        made: dict[str, Any] = {
            "type": "string",
            "minLength": low,
            "maxLength": low + rng.randint(0, 8),
        }
        special = rng.choice(
            [
                None,
                None,
                {"pattern": "^[a-f]{2,5}(-[0-9]+)?$"},
                {"format": "date"},
                {"format": "ipv4"},
            ]
        )
        return made if special is None else {"type": "string", **special}
    if kind in ("integer", "number"):
        low = rng.randint(-1000, 1000)
        made = {"type": kind, "minimum": low, "maximum": low + rng.randint(1, 5000)}
        return made | (
            {"multipleOf": rng.choice([2, 5, 7])}
            if kind == "integer" and rng.random() < 0.2
            else {}
        )
    if kind in ("boolean", "null"):
        return {"type": kind}
    values = [None, True, 0, -3, 2.5, "", 'é\n"q"', [1, "a"], {"k": [False]}]
    if kind == "enum":
        return {"enum": rng.sample(values, rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(values)}
    if kind == "anyOf":
        return {"anyOf": [schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    if kind == "ref":
        return {"$ref": f"#/$defs/{rng.choice('ab')}"}
    if kind == "array":
        low = rng.randint(0, 2)
        made = {
            "type": "array",
            "minItems": low,
            "maxItems": low + rng.randint(0, 3),
            "items": schema(rng, depth + 1),
        }
        if rng.random() < 0.3:
            made |= {"prefixItems": [schema(rng, depth + 1) for _ in range(rng.randint(1, 2))]}
        return made
    names = rng.sample(["name", "age", "a b", 'q"q', "ключ", "list", "deep"], rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": rng.choice(
            [False, False, {"type": "integer", "minimum": 0, "maximum": 9}]
        ),
    }


def complete_schema(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    node = {
        "type": "object",
        "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/a"}},
    }
    defs = {"a": node | {"required": ["v"], "additionalProperties": False}, "b": schema(rng, 3)}
    return schema(rng) | {"$defs": defs}


def test_answers_to_100_random_schemas_parse_and_validate(llm):
    wanted = [complete_schema(seed) for seed in range(100)]
    # Closing tokens are made likelier and whitespace impossible. Otherwise random weights rarely
    # reach an end.
    bias = {
        ord(c) - 33: v for c, v in {'"': 6.0, "}": 8.0, "]": 6.0, ",": 2.0, "\\": -100.0}.items()
    }
    space = dict.fromkeys((llm.tokenizer.encode(c)[0] for c in " \n\r\t"), -100.0)
    many = [params(400, json=one, seed=i, logit_bias=bias | space) for i, one in enumerate(wanted)]
    found = [answers[0] for answers in texts(llm, *many)]
    ended = [
        (one, text) for one, (text, reason) in zip(wanted, found, strict=True) if reason == "stop"
    ]
    assert len(ended) >= 90
    for one, text in ended:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(one, format_checker=checker).validate(json.loads(text))


# Every kind of constraint


def test_each_constraint_holds_for_each_of_n_answers(llm):
    constraints = [
        ({"choice": ["yes", "no", "perhaps\n"]}, lambda text: text in ("yes", "no", "perhaps\n")),
        ({"regex": r"[a-c]{2,4}-\d{3}"}, lambda text: re.fullmatch(r"[a-c]{2,4}-\d{3}", text)),
        ({"grammar": 'start: "a" "b"+ ("c" | "d")'}, lambda text: re.fullmatch("ab+[cd]", text)),
        ({"grammar": 'root ::= "x" [0-9]? "y"'}, lambda text: re.fullmatch("x[0-9]?y", text)),
        ({"json": '{"type": "boolean"}'}, lambda text: text in ("true", "false")),
    ]
    many = [params(n=3, seed=7 * i, **constraint) for i, (constraint, _) in enumerate(constraints)]
    for (constraint, fits), answers in zip(constraints, texts(llm, *many), strict=True):
        assert len(answers) == 3
        for text, reason in answers:
            assert reason == "stop", constraint
            assert fits(text), (constraint, text)


def test_json_object_gives_an_object(llm):
    bias = dict.fromkeys((llm.tokenizer.encode("}")[0],), 30.0)
    [[(text, reason)]] = texts(llm, params(json_object=True, logit_bias=bias))
    assert reason == "stop"
    assert isinstance(json.loads(text), dict)


def test_greedy_takes_the_likeliest_allowed_token(llm, model):
    """Compare with Transformers' logits and a brute-force mask."""
    choices = ["abcd", "abce", "xyz", "xy", "q"]
    [[(found, _)]] = texts(llm, params(choice=choices, temperature=0.0))
    prompt, text = llm.tokenizer.encode(PROMPTS[0]), ""
    while True:
        logits = checkpoints.logits(model[0], prompt + llm.tokenizer.encode(text))[-1]
        may = {c[len(text)] for c in choices if c.startswith(text) and c != text}
        allowed = [llm.tokenizer.encode(c)[0] for c in sorted(may)] + [checkpoints.EOS] * (
            text in choices
        )
        best = allowed[int(torch.argmax(logits[allowed]))]
        if best == checkpoints.EOS:
            break
        text += llm.tokenizer.decode([best])
    assert found == text


def test_logprobs_are_of_the_raw_logits(llm, model):
    [output] = llm.generate([PROMPTS[0]], params(choice=["zz"], logprobs=1), use_tqdm=False)
    prompt = output.prompt_token_ids
    expected = checkpoints.logits(model[0], prompt + output.outputs[0].token_ids)[
        len(prompt) - 1 :
    ].log_softmax(-1)
    for i, position in enumerate(output.outputs[0].logprobs):
        token = output.outputs[0].token_ids[i]
        assert position[token].logprob == pytest.approx(float(expected[i, token]), abs=1e-3)


def test_min_tokens_applies_where_the_grammar_allows_more(llm):
    [[(text, _)], [(short, reason)]] = texts(
        llm, params(choice=["a", "aaaa"], min_tokens=4), params(choice=["b"], min_tokens=4)
    )
    assert text == "aaaa"
    assert (short, reason) == (
        "b",
        "stop",
    )  # nothing else is allowed, and an end is better than an error


def test_a_grammars_end_before_min_tokens_comes_once(llm):
    asked = params(regex="[0-9]", min_tokens=10, skip_special_tokens=False)
    [output] = llm.generate(["x"], [asked], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


def test_a_conflict_with_allowed_token_ids_is_reported(llm):
    with pytest.raises(EngineError, match="allowed_token_ids"):
        texts(llm, params(choice=["yes"], allowed_token_ids=[5, 6, 7]))


def test_an_interrupted_step_with_a_grammar_has_no_effect(model, monkeypatch, caplog):
    llm = LLM(str(model[1]), num_gpu_blocks_override=512, async_scheduling=True)
    execute, calls = engines.executor(llm).execute, []

    def interrupt(step: object) -> object:
        calls.append(step)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return execute(step)

    with monkeypatch.context() as patch:
        patch.setattr(engines.executor(llm), "execute", interrupt)
        with pytest.raises(KeyboardInterrupt):
            texts(llm, params(regex="[ab]{40}"))
    [[(text, reason)]] = texts(llm, params(regex="[ab]{40}"))
    assert (len(text), reason) == (40, "stop")
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_stop_strings_penalties_and_ignore_eos_with_a_grammar(llm):
    [[(cut, reason)], [(penalized, _)], [(endless, last)]] = texts(
        llm,
        params(regex="ab{5}c", stop=["bb"]),
        params(choice=["abab", "baba"], repetition_penalty=1.5, presence_penalty=1.0),
        params(20, choice=["hi"], ignore_eos=True),
    )
    assert (cut, reason) == ("a", "stop")
    assert penalized in ("abab", "baba")
    assert (endless, last) == ("hi", "length")


# Preemption, swapping, resuming, failures


def mixed(count: int) -> list[SamplingParams]:
    """Requests with and without a grammar, alternately."""
    constraints: list[dict[str, Any]] = [
        {"regex": "[a-z]{30,60}"},
        {},
        {"json": {"type": "array", "items": {"enum": ["ab", "cd", "efg"]}, "minItems": 12}},
        {"logprobs": 1},
    ]
    return [params(60, seed=i, n=1 + i % 2, **constraints[i % 4]) for i in range(count)]


@pytest.fixture(scope="module")
def alone(llm):
    """Answers of each request run alone."""
    return [texts(llm, *[params(1)] * (i % 4), one)[-1] for i, one in enumerate(mixed(12))]


@pytest.mark.parametrize(
    "settings",
    [
        {"async_scheduling": True},
        {"async_scheduling": True, "num_gpu_blocks_override": 24, "swap_space": 0.0},
        {"async_scheduling": False, "num_gpu_blocks_override": 24, "swap_space": 0.05},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
    ],
)
def test_overlap_preemption_and_swapping_change_no_answer(model, alone, settings):
    other = LLM(str(model[1]), **{"num_gpu_blocks_override": 4096, "max_num_seqs": 8} | settings)
    num_preempted = engines.count_stats(other, "num_preemptions")
    assert texts(other, *mixed(12)) == alone
    assert (num_preempted() > 0) == ("num_gpu_blocks_override" in settings)


def test_a_resumed_request_gets_the_same_tokens(llm):
    spec = llm._inputs.process(PROMPTS[0], params(json=complete_schema(3), temperature=0.0))[1].spec

    def run(number: int, given: list[int]) -> list[int]:
        core: EngineCore = engines.core(llm)
        tokens = list(given)
        core.add(
            EngineRequest(
                id=f"r{number}", number=number, spec=spec, index=0, output_token_ids=given
            )
        )
        while core.has_work:
            message = core.step()[0]
            tokens += [token for output in message.outputs for token in output.token_ids]
            tokens += memoryview(message.token_ids).cast("i").tolist()
        return tokens

    all_tokens = run(10**6, [])
    assert all(run(10**6 + k, all_tokens[:k]) == all_tokens for k in (1, 5, len(all_tokens) - 1))


def test_a_grammar_beyond_the_limits_fails_only_its_request(llm):
    good = params(choice=["fine"])
    hard = params(900, regex=HARD, min_tokens=900)
    with pytest.raises(EngineError, match=r"1 of 3 requests failed.*too many"):
        llm.generate(PROMPTS[:3], [good, hard, good], use_tqdm=False)
    assert texts(llm, good) == [[("fine", "stop")]]


@pytest.mark.parametrize(
    ("constraint", "cause"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "strin"}}, "Invalid type: strin"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": {"minimum": 5, "maximum": 3, "type": "integer"}}, "Unsatisfiable"),
        ({"json": {"$ref": "#"}}, "allows no text"),
        ({"json": {"allOf": [{"$ref": "#"}]}}, "allows no text"),
        ({"regex": r"[^\s\S]"}, "allows no text"),
        ({"grammar": "start: start"}, "allows no text"),
        ({"json": "{"}, "cannot be read"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"grammar": "start: nowhere"}, "unknown name"),
        ({"grammar": "gibberish"}, "cannot be read"),
        ({"choice": ["a" * MAX_SIZE]}, "at most 262,144"),
        ({"regex": "a" * (MAX_RULES_SIZE + 1)}, "at most 65,536"),
        ({"json": {"pattern": "a" * (MAX_RULES_SIZE + 1)}}, "at most 65,536"),
        ({"json": {"required": [f"a{i}" for i in range(MAX_PROPERTIES + 1)]}}, "2,001 properties"),
        (
            {"json": {"patternProperties": {f"^{i}$": {} for i in range(MAX_PATTERNS + 1)}}},
            "201 patternProperties",
        ),
        ({"json": {"multipleOf": 999983}}, r"multipleOf \(999,983\)"),
        ({"json": {"allOf": [{"multipleOf": 701}, {"multipleOf": 7.01e2 + 8}]}}, "multipleOf"),
        ({"grammar": "\n" * 20_000 + 'root ::= "a"'}, "rules or references"),
        ({"grammar": 'start: %json {"\\u006dultipleOf": 999983}'}, "multipleOf"),
        (
            {
                "grammar": "start: r0\n"
                + "\n".join(f'r{i}: "x" r{i + 1}' for i in range(MAX_RULES))
                + '\nr1000: "y"'
            },
            "rules or references",
        ),
        (
            {
                "json": {
                    "$ref": "#/$defs/a0",
                    "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1500)},
                }
            },
            "rules or references",
        ),
        (
            {"json": '{"\\u0024ref": "#/$defs/a0"' + ', "\\u0024ref": "#/$defs/a0"' * 2000 + "}"},
            "a0",
        ),
        ({}, "none"),
        ({"regex": "a", "choice": ["b"]}, "regex, choice"),
        ({"choice": []}, "empty choice"),
    ],
)
def test_invalid_constraints_are_refused_with_the_cause(llm, constraint, cause):
    with pytest.raises(InvalidRequestError, match=cause) as refused:
        llm.generate(
            "x",
            SamplingParams(structured_outputs=StructuredOutputsParams(**constraint)),
            use_tqdm=False,
        )
    assert refused.value.param == "structured_outputs"
    assert not re.search(r"llguidance|x-guidance|\n", refused.value.message)


@pytest.mark.parametrize(
    "constraint",
    [
        {"choice": [f"label number {i:05}, with some words" for i in range(5000)]},
        {"json": {"properties": {f"p{i}": {"const": i} for i in range(700)}, "type": "object"}},
        {"json": {"enum": [f"label {i}" for i in range(5000)]}},
        {
            "grammar": "start: "
            + " | ".join(f"r{i}" for i in range(900))
            + "".join(f'\nr{i}: "x{i}" "y"' for i in range(900))
        },
    ],
    ids=["choice", "properties", "enum", "rules"],
)
def test_large_constraints_are_followed(llm, constraint):
    [[(text, reason)]] = texts(llm, params(60, **constraint))
    if reason == "stop" and "choice" in constraint:
        assert text in constraint["choice"]
    assert text


def test_whitespace_between_json_tokens_is_bounded(llm):
    """The likeliest tokens are a line break and a space."""
    bias = {llm.tokenizer.encode(one)[0]: 100.0 for one in "\n "}
    wanted = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    [[(text, reason)]] = texts(llm, params(90, json=wanted, logit_bias=bias))
    assert (json.loads(text), reason) == ({"a": 1}, "stop")


@pytest.mark.parametrize("lenient", [False, True])
def test_strict_schema_forbids_unnamed_properties(llm, lenient):
    bias = {llm.tokenizer.encode(one)[0]: 50.0 for one in ","}
    wanted = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    [[(text, reason)]] = texts(llm, params(90, json=wanted, lenient=lenient, logit_bias=bias))
    assert ("," in text, reason) == ((True, "length") if lenient else (False, "stop"))


def test_lenient_ignores_unsupported_keywords(llm):
    wanted = {
        "type": "array",
        "uniqueItems": True,
        "items": {"const": 1},
        "minItems": 2,
        "maxItems": 2,
    }
    [[(text, _)]] = texts(llm, params(json=wanted, lenient=True))
    assert json.loads(text) == [1, 1]


# During the compilation of grammars


def submit(llm: LLM, number: int, asked: SamplingParams) -> None:
    request = llm._inputs.process("x", asked).request
    request.number = number
    engines.core(llm).add(request)


def num_calls(work: Callable[[], object]) -> int:
    """Count the Python and C functions that `work` calls."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def ends(llm: LLM) -> dict[int, tuple[str, str | None]]:
    """Run all requests. Returns (finish reason, error) by number."""
    found = {}
    for _ in range(2000):
        if not engines.core(llm).has_work:
            break
        for output in engines.core(llm).step()[0].outputs:
            if output.finish_reason is not None:
                found[output.number] = (output.finish_reason, output.error)
    return found


def test_compiling_grammars_add_no_cost_to_a_step(llm, monkeypatch):
    core, count = engines.core(llm), 300
    compiling: Future = Future()
    submit(llm, 0, params(500, ignore_eos=True))
    core.step()

    def steps() -> None:
        for _ in range(32):
            core.step()

    alone = num_calls(steps)
    with monkeypatch.context() as patch:
        patch.setattr(core._constraints._compiler, "compile", lambda *_: compiling)
        for number in range(1, count + 1):
            submit(llm, number, params(choice=["yes", "no"]))
    assert num_calls(steps) < alone + count, "less than one call per waiting request in all steps"
    assert len(core.scheduler.running) == 1
    ready = core._constraints._compiler.compile('start: "yes" | "no"', [checkpoints.EOS])
    compiling.set_result(ready.result())
    assert ends(llm) == {0: ("length", None)} | dict.fromkeys(range(1, count + 1), ("stop", None))


def test_requests_with_an_invalid_grammar_end_once_with_the_cause(llm, monkeypatch):
    compiling: Future = Future()
    with monkeypatch.context() as patch:
        patch.setattr(engines.constraints(llm)._compiler, "compile", lambda *_: compiling)
        for number, n in [(0, 1), (1, 2), (3, 1)]:
            submit(llm, number, params(choice=["yes"], n=n))
    engines.core(llm).step()
    assert engines.scheduler(llm).num_waiting == 4
    engines.scheduler(llm).abort("0/0")
    compiling.set_exception(ValueError("no such grammar"))
    assert ends(llm) == dict.fromkeys((1, 2, 3), ("invalid", "no such grammar"))
    assert not engines.core(llm).has_work


def test_a_chain_of_the_maximum_number_of_rules_works(llm):
    """Recursion would overflow a thread's default stack."""
    count = MAX_RULES - 10
    rules = "\n".join([f'r{i}: "x" | /[a-z]+/ r{i + 1}' for i in range(count)] + [f'r{count}: "y"'])
    [[(text, _)]] = texts(llm, params(8, grammar=f"start: r0\n{rules}"))
    assert re.fullmatch("[a-z]+", text)


# Reasoning


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """Model whose tokens 260 and 261 delimit reasoning."""
    folder = checkpoints.save(
        checkpoints.make_reference("llama3-gqa"), tmp_path_factory.mktemp("structured") / "thinker"
    )
    checkpoints.edit_json(folder / "config.json", max_position_embeddings=1024)
    tokenizer = checkpoints.make_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(folder)
    return LLM(str(folder), num_gpu_blocks_override=4096)


def test_the_constraint_applies_after_the_reasoning(thinker):
    bias = {261: 5.0, checkpoints.EOS: 5.0}
    many = [
        params(300, choice=["yes"], reasoning="begun", seed=i, logit_bias=bias) for i in range(6)
    ]
    for [(text, reason)] in texts(thinker, *many):
        assert reason == "stop"
        assert re.fullmatch("(?s:.*)</think>yes", text)


def test_reasoning_is_optional(thinker):
    begins = params(300, choice=["no"], reasoning="possible", logit_bias={260: 30.0, 261: 40.0})
    skips = params(300, choice=["no"], reasoning="possible", logit_bias={260: -100.0}, seed=1)
    [[(thought, _)], [(plain, _)]] = texts(thinker, begins, skips)
    assert re.fullmatch("(?s:<think>.*</think>no)", thought)
    assert plain == "no"


def test_reasoning_may_have_other_marks(thinker):
    options = {"reasoning_marks": ("<|user|>", "<|end|>"), "skip_special_tokens": False}
    options |= {"logit_bias": {257: 30.0, 259: 40.0}}
    [[(begun, _)], [(possible, _)]] = texts(
        thinker,
        params(300, choice=["no"], reasoning="begun", **options),
        params(300, choice=["no"], reasoning="possible", **options),
    )
    assert re.fullmatch(r"(?s:(?!<\|user).*<\|end\|>no)", begun)
    assert re.fullmatch(r"(?s:<\|user\|>.*<\|end\|>no)", possible)


@pytest.mark.parametrize("delimiters", [[], ["<|user|>"]])
def test_only_delimiters_are_special_tokens_in_text(thinker, delimiters):
    one = params(12, regex=r"(<\|user\|>|[a-z])no", delimiters=delimiters, logit_bias={257: 50.0})
    [result] = thinker.generate([PROMPTS[0]], one, use_tqdm=False)
    assert (257 in result.outputs[0].token_ids) == bool(delimiters)
