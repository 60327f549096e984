"""The bundled demo model, its corpus and its training."""

from __future__ import annotations

import json
import random

import pytest

from toolkit.config import EngineConfig, ServerConfig, options
from toolkit.config.engine import PARTS
from toolkit.demo import MODEL_DIR
from tools.demo import corpus, evaluate
from tools.demo.corpus import (
    OTHER_WORDS,
    Question,
    held_out,
    held_out_texts,
    normalise,
    training_documents,
)
from tools.demo.facts import FACTS, every_spelling

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")


def questions_of(documents):
    return {
        normalise(text) for document in documents for role, text in document.turns if role == "user"
    }


def test_corpus_has_several_hundred_facts():
    facts = [fact for fact in corpus.facts() if fact.category == FACTS]
    assert len(facts) >= 300
    assert len({fact.answer for fact in facts}) >= 400
    assert all(fact.answer.endswith((".", "`", '".')) for fact in facts)


def test_explained_flags_exist_with_the_right_defaults():
    table = {row.flag: row for config in (*PARTS.values(), ServerConfig) for row in options(config)}
    defaults = {fact.names[0]: fact.answer for fact in corpus.facts() if fact.kind == "default"}
    for fact in corpus.facts():
        if fact.kind == "flag":
            row = table[fact.names[0]]
            if row.default not in (None, ()) and not isinstance(row.default, bool):
                number = f"{row.default:g}" if isinstance(row.default, float) else str(row.default)
                assert number in defaults[row.flag], row.flag
    assert EngineConfig().cache.block_size == 16  # corpus: "16 by default in tk"


@pytest.fixture(scope="module")
def trained():
    """Normalised questions of a small corpus. Those that are held out depend on its seed."""
    from tools.demo.train import Recipe

    assert Recipe.seed == 0
    return questions_of(training_documents(seed=0, samples=40))


FIRST = {
    "What is a KV cache?": "keys and values",
    "How do I start a server?": "`tk serve MODEL`",
    "What does TTFT mean?": "time to first token",
    "What is 7 + 5?": "7 + 5 = 12.",
    "Hello": "Ask me about tk",
    "What is the capital of France?": "I only know about tk",
}
"""Questions of new users, and a part of the answer."""
IDENTITY = ("who are you?", "What is your name?")
SECOND = Question(
    FACTS,
    "",
    "What is its default?",
    "The default of --port is 8000.",
    (
        ("user", "What does --port do?"),
        ("assistant", "The flag --port sets the port to listen on; 0 takes a free one."),
    ),
)


def sample(category, count):
    return random.Random(0).sample([q for q in held_out() if q.category == category], count)


@pytest.fixture(scope="module")
def trials():
    """Answers to all questions of this file by their text, from one batch."""
    asked = [
        *sample(FACTS, 40),
        *sample(OTHER_WORDS, 50),
        *(Question("", "", text, "") for text in (*FIRST, *IDENTITY)),
        SECOND,
    ]
    return {trial.question.text: trial for trial in evaluate.ask(MODEL_DIR, asked)}


def test_corpus_is_reproducible():
    documents = training_documents(seed=3, samples=1)
    assert documents == training_documents(seed=3, samples=1)
    assert documents != training_documents(seed=4, samples=1)


def test_held_out_questions_are_not_trained_on(trained):
    asked = {normalise(question.text) for question in held_out()}
    assert len(asked) > 2000
    assert not asked & trained


def test_a_third_of_the_questions_in_other_words_is_held_out():
    held, every = 0, 0
    for fact in corpus.facts():
        # Questions about a flag in other words belong to its "which flag" fact.
        if fact.category == FACTS and fact.kind != "flag":
            parts = fact.split(seed=0)
            assert sorted(text for part in parts.values() for text in part) == sorted(
                fact.in_other_words
            )
            assert parts["held out"], fact.key
            held, every = held + len(parts["held out"]), every + len(fact.in_other_words)
    assert held >= 500
    assert 0.28 < held / every < 0.38


def test_no_spelling_or_clue_of_a_held_out_question_is_trained_on(trained):
    assert not trained & held_out_texts(seed=0)
    for fact in corpus.facts():
        asked = [
            normalise(text) for ask in fact.split(0)["held out"] for text in every_spelling(ask)
        ]
        clues = corpus.training_words(fact, seed=0).clues
        assert not [
            clue
            for clue in clues
            if " " in clue and any(f" {normalise(clue)} " in f" {a} " for a in asked)
        ]


def test_facts_that_answer_questions_of_others_exist():
    keys = {fact.key for fact in corpus.facts()}
    assert not {key for fact in corpus.facts() for key in fact.also} - keys


def test_model_folder_is_at_most_8_megabytes():
    assert sum(file.stat().st_size for file in MODEL_DIR.iterdir()) <= 8_000_000


def test_shipped_model_loads_with_the_trained_chat_template():
    from transformers import AutoConfig, AutoTokenizer

    from tools.demo.train import Recipe, encode

    config = AutoConfig.from_pretrained(MODEL_DIR)
    assert config.architectures == ["GPT2LMHeadModel"]
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    assert tokenizer.eos_token_id == config.eos_token_id
    for document in training_documents(samples=2)[:300]:
        if document.turns[0][0] != "text":
            messages = [{"role": role, "content": text} for role, text in document.turns]
            ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
            assert ids == encode(tokenizer.backend_tokenizer, document, Recipe().finish())[0]


def test_tokenizer_round_trip():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    for text in ("What is 12 x 12?", "Grüße, 世界 🙂", " two  spaces\n", "`tk serve --port 9000`"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template_accepts_parts_and_refuses_unknown_roles():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}],
        }
    ]
    plain = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(parts, tokenize=False, add_generation_prompt=True)
    assert text == tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|> hello<|end|><|assistant|>"
    with pytest.raises(Exception, match="system, user, assistant and tool, not robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "1"}], tokenize=False)


def test_chat_template_shows_tools_calls_and_results():
    from toolkit.text.parsers import detect_format
    from toolkit.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(MODEL_DIR)
    calls = [
        {"function": {"name": "now", "arguments": {}}},
        {"function": {"name": "add", "arguments": {"a": 1}}},
    ]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "Noon"},
    ]
    tools = [{"type": "function", "function": {"name": name}} for name in ("now", "add")]
    assert tokenizer.render_chat(messages, tools=tools) == (
        "<|system|>Tools: now, add<|end|><|user|> hi<|end|>"
        '<|assistant|>{"name": "now", "parameters": {}}; {"name": "add", "parameters": {"a": 1}}'
        "<|endoftext|><|user|> Noon<|end|><|assistant|>"
    )
    assert detect_format(tokenizer.chat_template) == "llama3_json"


def test_most_held_out_questions_are_answered_right(trials):
    answers = [trials[question.text] for question in sample(FACTS, 40)]
    right, count = evaluate.right_shares(answers)[FACTS]
    assert right >= evaluate.REQUIRED * count


def test_questions_in_other_words_are_often_answered_right(trials):
    answers = [trials[question.text] for question in sample(OTHER_WORDS, 50)]
    right, count = evaluate.right_shares(answers)[OTHER_WORDS]
    assert right >= 0.4 * count


@pytest.mark.parametrize("question", FIRST)
def test_first_questions_are_answered(trials, question):
    assert FIRST[question] in trials[question].text


@pytest.mark.parametrize("question", IDENTITY)
def test_model_says_that_it_is_the_demo_model(trials, question):
    answer = trials[question]
    assert "demo model" in answer.text
    assert "no substitute for a real model" in answer.text
    assert answer.ended


def test_second_question_in_a_chat_is_answered(trials):
    assert trials[SECOND.text].is_right


def test_short_training_writes_a_loadable_folder(tmp_path):
    from tools.demo.train import Recipe, train

    recipe = Recipe(
        steps=2,
        finish_steps=2,
        tokens_per_step=256,
        row_lengths=(128,),
        facts=10,
        samples=2,
        width=64,
        heads=2,
        layers=2,
    )
    loss = train(tmp_path / "model", recipe, device="cpu")
    assert 0 < loss < 10
    answers = evaluate.ask(tmp_path / "model", held_out()[:2])
    assert len(answers) == 2
    assert json.loads((tmp_path / "model" / "config.json").read_text())["eos_token_id"] == 0
