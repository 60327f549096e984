"""Grammars at work: which tokens may come next, one bit each.

A grammar is compiled once, off the engine's loop; every sequence follows its own copy, whose state is the sequence's
tokens: whatever is preempted or taken up again stays within its grammar.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from toolkit.sampling.structured_outputs import in_thread, limits

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

Masks = npt.NDArray[np.int32]
"""[n, ceil(vocab / 32)]: bit t % 32 of word t // 32 is set where token t may come."""
MAX_COMPILED = 64
"""Compiled grammars that are kept."""
MIN_PARALLEL = 8
"""Sequences from which threads are worth waking."""
THINK, END_OF_THINKING = b"<think>", b"</think>"


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What a grammar has to know of the vocabulary."""

    spellings: Sequence[bytes]
    """Of every token; nothing of those without text."""
    special_ids: Sequence[int]
    end_ids: Sequence[int]
    """Tokens that end an answer; there is one at least."""


class GrammarCompiler:
    """Compiles in threads; remembers the last grammars."""

    def __init__(self, read_tokens: Callable[[Sequence[int]], TokenTable]) -> None:
        """`read_tokens` is called once, in a thread, when the first grammar comes, with the tokens that end answers."""
        self._read_tokens = read_tokens
        self._vocabulary: Future[Vocabulary] | None = None
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()

    def compile(self, grammar: str, end_ids: Sequence[int]) -> Future[CompiledGrammar]:
        """Fails with ValueError where the grammar and these tokens do not go together."""
        if self._vocabulary is None:
            self._vocabulary = in_thread(lambda: Vocabulary(self._read_tokens(end_ids)))
        found = self._compiled.pop(grammar, None)
        if found is None:
            vocabulary = self._vocabulary  # the one before in the threads' queue
            found = in_thread(lambda: CompiledGrammar(vocabulary.result(), grammar))
        self._compiled[grammar] = found
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return found


class Vocabulary:
    """The tokens as llguidance holds them."""

    def __init__(self, table: TokenTable) -> None:
        self.table = table
        self.tokenizer = _tokenizer(table)
        known = np.array([bool(spelling) for spelling in table.spellings])
        known[list(table.end_ids)] = False
        self.unfinished = _packed(known)
        """Mask of all tokens but those that end the answer."""
        self.think_id = next((id for id, text in enumerate(table.spellings) if text == THINK), None)


class CompiledGrammar:
    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        from llguidance import LLMatcher

        self.vocabulary = vocabulary
        self._matcher = LLMatcher(vocabulary.tokenizer, grammar, limits=limits())
        self._matcher.compute_bitmask()  # the first one prepares for those that follow
        if self._matcher.is_error():
            raise ValueError(_reason(self._matcher))

    def start(self) -> LLMatcher:
        """A copy at its beginning."""
        return self._matcher.deep_copy()


class GrammarState:
    """Where one sequence is in its grammar."""

    def __init__(
        self,
        compiled: Future[CompiledGrammar],
        *,
        min_tokens: int = 0,
        end_ids: Sequence[int] = (),
        reasoning: Literal["begun", "possible"] | None = None,
    ) -> None:
        """`end_ids`: tokens that end the sequence, and may not before `min_tokens` while the grammar has others."""
        self.compiled = compiled
        self._min_tokens = min_tokens
        self._end_ids = list(end_ids)
        self._reasoning = reasoning
        self._thoughts = b""
        """The newest of the reasoning, as far as it may be a part of its end."""
        self._num_tokens = 0
        self._matcher: LLMatcher | None = None
        self.error: str | None = None

    @property
    def failure(self) -> str | None:
        """Why it cannot be followed, or any further."""
        if (
            self.error is None
            and self.compiled.done()
            and (error := self.compiled.exception()) is not None
        ):
            self.error = str(error)
        return self.error

    @property
    def matcher(self) -> LLMatcher:
        if self._matcher is None:
            self._matcher = self.compiled.result().start()
        return self._matcher

    @property
    def vocabulary(self) -> Vocabulary:
        return self.compiled.result().vocabulary

    @property
    def thinks(self) -> bool:
        """Whether it is within its reasoning."""
        return self._reasoning == "begun"

    def follow(self, token_ids: list[int]) -> None:
        """Takes in what is new of the sequence's tokens, which are all that it has so far."""
        new = token_ids[self._num_tokens :]
        self._num_tokens = len(token_ids)
        if self._reasoning is not None and new:
            new = self._after_reasoning(new)
        if new and not self.matcher.is_stopped() and not self.matcher.consume_tokens(new):
            self.error = _reason(self.matcher)

    def adjust(self, mask: npt.NDArray[np.int32]) -> None:
        """Makes the matcher's mask this sequence's: with reasoning, and without an end that comes too early."""
        if self._reasoning == "possible" and (think := self.vocabulary.think_id) is not None:
            mask.view(np.uint8)[think // 8] |= 1 << think % 8
        if self._num_tokens < self._min_tokens:
            shorter = mask.copy()
            for end in self._end_ids:
                shorter.view(np.uint8)[end // 8] &= ~(1 << end % 8) & 0xFF
            if shorter.any():
                mask[:] = shorter

    def fail(self) -> bool:
        """Whether the matcher has met a limit; then `failure` says which."""
        if self._matcher is not None and self._matcher.is_error():
            self.error = self.error or _reason(self._matcher)
        return self.error is not None

    def _after_reasoning(self, new: list[int]) -> list[int]:
        """Those of the new tokens that come after the reasoning."""
        if self._reasoning == "possible":
            if new[0] != self.vocabulary.think_id:
                self._reasoning = None
                return new
            self._reasoning = "begun"
            new = new[1:]
        for index, token in enumerate(new):
            self._thoughts += self.vocabulary.table.spellings[token]
            if END_OF_THINKING in self._thoughts:
                self._reasoning = None
                return new[index + 1 :]
            self._thoughts = self._thoughts[1 - len(END_OF_THINKING) :]
        return []


class MaskFiller:
    """Fills masks, those of several sequences in parallel."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._executor: LLExecutor | None = None

    def fill(self, states: Sequence[GrammarState | None]) -> Masks:
        """One row for each; None, and what has failed, may go on with any token."""
        live = [
            (i, state) for i, state in enumerate(states) if state is not None and not state.fail()
        ]
        masks = np.full((len(states), self._num_words), -1, np.int32)
        for i, state in live:
            if state.thinks:
                masks[i] = state.vocabulary.unfinished
        self._run([(state.matcher, i) for i, state in live if not state.thinks], masks)
        for i, state in live:
            if state.fail():
                masks[i] = -1
            elif not state.thinks:
                state.adjust(masks[i])
        return masks

    def _run(self, matchers: list[tuple[LLMatcher, int]], masks: Masks) -> None:
        if len(matchers) < MIN_PARALLEL:
            for matcher, i in matchers:
                row = masks[i]
                matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        size = masks.shape[1] * masks.itemsize
        self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, size, len(masks))


def _tokenizer(table: TokenTable) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(_Tokens(table), eos_token=list(table.end_ids))  # type: ignore[arg-type]  # what it reads of its wrapper


class _Tokens:
    """The tokens with the names that llguidance reads them by."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable) -> None:
        self.eos_token_id = table.end_ids[0]
        self.tokens = table.spellings
        self.special_token_ids = table.special_ids
        self._byte_ids = {text: id for id, text in enumerate(table.spellings) if len(text) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        """A tokenization, for parts that a grammar leaves no choice in: nobody asks for those here."""
        encoded = text if isinstance(text, bytes) else text.encode()
        return [
            self._byte_ids[encoded[i : i + 1]]
            for i in range(len(encoded))
            if encoded[i : i + 1] in self._byte_ids
        ]


def _packed(allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    bits = np.packbits(np.pad(allowed, (0, -len(allowed) % 32)), bitorder="little")
    return bits.view(np.int32)


def _reason(matcher: LLMatcher) -> str:
    lines = matcher.get_error().strip().splitlines()
    return f"the form of its answer cannot be followed: {lines[0] if lines else 'the cause is not known'}"
