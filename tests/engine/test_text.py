"""Streamed text against Transformers' decode, and stop strings against a plain search."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from tests import checkpoints, engines
from toolkit import LLM, SamplingParams
from toolkit.engine.front.output_processor import IncrementalDetokenizer
from toolkit.text.tokenizer import TextStream, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

quick = settings(max_examples=100, deadline=None, derandomize=True, database=None)
CORPUS = [
    "The sea is wide — naïve 日本語 text, ☃ and 👩‍👩‍👧 families. " * 3,
    "a  b\n\n\tdef f(x): return x",
    "ééé日日☃☃",
]
SPECIAL = ["<|endoftext|>", "<|user|>"]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> tuple[PreTrainedTokenizerFast, Tokenizer]:
    """Byte-level tokenizer like GPT-2's. Merges split characters; one added token is special but
    not named in the tokenizer's special tokens.
    """

    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(
        [AddedToken("<tool>", special=False), AddedToken("<|reserved|>", special=True)]
    )
    return save(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[0]), tmp_path_factory
    )


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory) -> tuple[PreTrainedTokenizerFast, Tokenizer]:
    """Tokenizer like Llama 2's: words begin with ▁, other characters become byte tokens."""

    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdeést", "▁a", "▁b", "▁s", "▁se", "ab", "se", "▁sea", "▁▁"]
    merges = [
        ("▁", "a"),
        ("▁", "b"),
        ("▁", "s"),
        ("▁s", "e"),
        ("a", "b"),
        ("s", "e"),
        ("▁se", "a"),
        ("▁", "▁"),
    ]
    backend = Backend(
        models.BPE(
            {p: i for i, p in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<unk>"
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    return save(made, tmp_path_factory)


def save(tokenizer: PreTrainedTokenizerFast, factory) -> tuple[PreTrainedTokenizerFast, Tokenizer]:
    folder = factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return tokenizer, Tokenizer(folder)


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> list[str]:
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    return [*(stream.add_one(id) for id in ids), stream.end()]


class TestStreams:
    @given(data=st.data(), skip=st.booleans())
    @quick
    def test_any_tokens_decode_like_transformers(self, byte_level, data, skip):
        """Invalid bytes, split characters and special tokens give U+FFFD in the same places."""
        theirs, ours = byte_level
        ids = data.draw(st.lists(st.integers(0, len(theirs) - 1), max_size=30))
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert "".join(pieces_of(ours, ids, skip=skip)) == expected
        assert ours.decode(ids, skip_special_tokens=skip) == expected

    @given(data=st.data(), skip=st.booleans())
    @quick
    def test_group_size_makes_no_difference(self, byte_level, data, skip):
        theirs, ours = byte_level
        groups = data.draw(
            st.lists(st.lists(st.integers(0, len(theirs) - 1), max_size=4), max_size=12)
        )
        stream = TextStream(ours, skip_special_tokens=skip)
        pieces = [
            stream.add_one(group[0]) if len(group) == 1 else stream.add(group) for group in groups
        ]
        ids = [id for group in groups for id in group]
        assert "".join(pieces) + stream.end() == ours.decode(ids, skip_special_tokens=skip)

    @given(text=st.text(max_size=30))
    @quick
    def test_any_text_streams_in_complete_characters(self, byte_level, text):
        theirs, ours = byte_level
        pieces = pieces_of(ours, theirs.encode(text), skip=False)
        assert "".join(pieces) == text
        if "\ufffd" not in text:
            assert "\ufffd" not in "".join(pieces)

    def test_the_cases_are_not_trivial(self, byte_level):
        theirs, ours = byte_level
        pieces = pieces_of(ours, theirs.encode("🦀ß"), skip=False)
        assert len(pieces) > 4
        assert "" in pieces[:-1]
        assert len(theirs.encode("The sea is wide")) < 15

    @pytest.mark.parametrize("skip", [True, False])
    def test_special_tokens_are_skipped_or_kept(self, byte_level, skip):
        theirs, ours = byte_level
        ids = theirs.encode("a<|user|>b<|reserved|>c<tool>d<|endoftext|>")
        text = ours.decode(ids, skip_special_tokens=skip)
        assert text == ("abc<tool>d" if skip else "a<|user|>b<|reserved|>c<tool>d<|endoftext|>")
        assert text == theirs.decode(ids, skip_special_tokens=skip)

    @given(data=st.data(), skip=st.booleans())
    @quick
    def test_sentencepiece_differs_only_by_the_leading_space(self, sentence_piece, data, skip):
        theirs, ours = sentence_piece
        word = st.integers(259, len(theirs) - 1).map(lambda id: [id])
        character = st.characters(exclude_categories=["Cs"]).map(
            lambda c: [3 + byte for byte in c.encode()]
        )
        special = st.sampled_from([[1], [2]])
        groups = data.draw(st.lists(st.one_of(word, word, character, special), max_size=20))
        ids = [id for group in groups for id in group]
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        text = "".join(pieces_of(ours, ids, skip=skip))
        assert text in (expected, f" {expected}")

    @given(ids=st.lists(st.integers(3, 258), max_size=12))
    @quick
    def test_invalid_bytes_become_replacement_characters(self, sentence_piece, ids):
        """Matches Python's decoding. Tokenizers rejects the entire run of bytes, whose extent is
        unknown while streaming.
        """
        pieces = pieces_of(sentence_piece[1], ids, skip=True)
        assert "".join(pieces) == bytes(id - 3 for id in ids).decode(errors="replace")

    def test_unknown_tokens_add_no_text(self, byte_level):
        _, ours = byte_level
        assert ours.decode([ours.size, ours.size + 1000]) == ""

    @pytest.mark.parametrize("text", ["sea a", "東京 sea", " sea", "</s>sea"])
    def test_offsets_of_a_prompt_index_its_text(self, sentence_piece, byte_level, text):
        for _, ours in (sentence_piece, byte_level):
            tokens = ours.encode(text)
            offsets = ours.offsets(tokens, text)
            names = [ours.token_names[token] for token in tokens]
            ends = [*offsets[1:], len(text)]
            for name, start, end in zip(names, offsets, ends, strict=True):
                assert (
                    name.startswith("bytes:") or name.removeprefix(" ") == text[start:end].strip()
                )
            assert offsets[0] == 0
            *_, last = ours.encode(f"{text} b")  # a prompt whose start was cut
            start = len(f"{text} b") - len(ours.token_names[last])
            assert ours.offsets([last], f"{text} b") == [start]

    def test_a_part_of_a_character_is_named_by_its_bytes(self, byte_level):
        theirs, ours = byte_level
        complete, *_ = theirs.encode("a")
        part = theirs.convert_tokens_to_ids("ð")
        assert (ours.token_names[complete], ours.token_names[part]) == ("a", r"bytes:\xf0")


tokenizer_of_bytes = functools.cache(checkpoints.make_tokenizer)
"""Returns a tokenizer with one token per byte."""


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("bytes")
    tokenizer_of_bytes().save_pretrained(folder)
    return Tokenizer(folder)


def stream_until_stop(
    tokenizer: Tokenizer, pieces: list[str], params: SamplingParams
) -> tuple[list[str], str | None]:
    """Return (shown texts, stop string) of an answer whose tokens spell `pieces`, one per step."""
    state = IncrementalDetokenizer(tokenizer, params)
    shown: list[str] = []
    for index, piece in enumerate(pieces):
        text, stop = state.add(tokenizer_of_bytes().encode(piece), index == len(pieces) - 1)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return shown, None


def search(pieces: list[str], stops: list[str]) -> tuple[int, str] | None:
    """Return (position, stop string) of the first complete one; if several, the leftmost."""
    text = ""
    for piece in pieces:
        text += piece
        found = [(text.index(stop), stop) for stop in stops if stop in text]
        if found:
            return min(found)
    return None


letters = st.text("ab☃", min_size=1, max_size=4)


class TestStopStrings:
    @given(
        pieces=st.lists(st.text("ab☃", min_size=1, max_size=3), min_size=1, max_size=20),
        stops=st.lists(letters, min_size=1, max_size=3),
        include=st.booleans(),
    )
    @quick
    def test_stop_strings_are_found_across_tokens_and_not_shown(
        self, byte_tokenizer, pieces, stops, include
    ):
        params = SamplingParams(stop=stops, include_stop_str_in_output=include)
        shown, stop = stream_until_stop(byte_tokenizer, pieces, params)
        found = search(pieces, stops)
        text = "".join(pieces)
        if found is None:
            assert (stop, "".join(shown)) == (None, text)
        else:
            at, which = found
            assert stop == which
            assert "".join(shown) == text[: at + (len(which) if include else 0)]

    @given(
        pieces=st.lists(st.sampled_from(["a", "b", "☃"]), min_size=1, max_size=20),
        stop=letters,
        min_tokens=st.integers(1, 8),
    )
    @quick
    def test_stop_strings_before_min_tokens_are_plain_text(
        self, byte_tokenizer, pieces, stop, min_tokens
    ):
        """A stop string that is complete before `min_tokens` is plain text."""
        params = SamplingParams(stop=[stop], min_tokens=min_tokens, max_tokens=100)
        shown, met = stream_until_stop(byte_tokenizer, pieces, params)
        text = ""
        count = 0
        for piece in pieces:
            before, text = text, text + piece
            count += len(tokenizer_of_bytes().encode(piece))
            if count >= min_tokens and text.endswith(stop):
                assert met == stop
                assert "".join(shown) == text.removesuffix(stop)
                assert len(before) < len(text)
                break
        else:
            assert met is None
            assert "".join(shown) == text

    def test_possible_stop_strings_are_held_back(self, byte_tokenizer):
        params = SamplingParams(stop=["ababc"])
        shown, stop = stream_until_stop(byte_tokenizer, list("xababababz"), params)
        assert stop is None
        assert shown == ["x", "", "", "", "", "ab", "", "ab", "", "ababz"]

    def test_stop_strings_end_answers_of_an_engine(self, checkpoint):
        """The stop strings are parts of the unconstrained answer."""
        llm = LLM(str(checkpoint("llama3-gqa")), device="cpu", max_num_seqs=4)
        params = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
        (free,) = llm.generate("The sea", SamplingParams(**params))[0].outputs
        for start, size in ((0, 1), (5, 3), (20, 6)):
            stop = free.text[start : start + size]
            at = free.text.index(stop)
            (answer,) = llm.generate(
                "The sea", SamplingParams(stop=[stop, "not generated"], **params)
            )[0].outputs
            assert answer.text == free.text[:at]
            assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
            assert answer.token_ids == free.token_ids[: len(answer.token_ids)]
            assert len(answer.token_ids) < 40
            deltas = list(llm.stream("The sea", SamplingParams(stop=stop, **params)))
            assert "".join(delta.text for delta in deltas) == answer.text
            assert deltas[-1].stop_reason == stop
            assert engines.scheduler(llm).num_unfinished == 0


def test_a_stop_string_before_min_tokens_ends_nothing_later():
    """A held start of a longer stop string must not count when that fails."""
    from tests import checkpoints
    from toolkit.engine.front.output_processor import IncrementalDetokenizer

    folder_tokenizer = checkpoints.make_tokenizer()

    class Letters:
        def byte_table(self, skip: bool) -> dict[int, bytes]:
            return {token: folder_tokenizer.decode([token]).encode() for token in range(256)}

        def text_table(self, skip: bool) -> dict[int, str | None]:
            return {token: text.decode() for token, text in self.byte_table(skip).items()}

    state = IncrementalDetokenizer(Letters(), SamplingParams(stop=["ab", "abcd"], min_tokens=3))
    pieces = [state.add(folder_tokenizer.encode(letter), False) for letter in "abxab"]
    assert "".join(text for text, _ in pieces) == "abx"
    assert [stop for _, stop in pieces] == [None, None, None, None, "ab"]
