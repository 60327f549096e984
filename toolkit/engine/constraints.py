"""The live requests that have a grammar, and the masks of what their next tokens may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait

from toolkit.engine.tokenizer import Tokenizer
from toolkit.sampling.grammar import GrammarCompiler, GrammarState, MaskFiller, Masks, TokenTable
from toolkit.scheduler import Request

SHORT = 0.002
"""Seconds that an engine with nothing else to do waits for a compilation before it looks for news."""


class Constraints:
    """Grammars are compiled in threads; a request whose grammar is not compiled yet is not scheduled."""

    def __init__(self, read_tokenizer: Callable[[], Tokenizer | None], vocab_size: int) -> None:
        self._compiler = GrammarCompiler(lambda end_ids: token_table(read_tokenizer(), vocab_size, end_ids))
        self._filler = MaskFiller(vocab_size)
        self._live: list[Request] = []

    def add(self, request: Request, grammar: str) -> None:
        """Begins to compile the grammar of a request that is about to be scheduled."""
        asked = request.params.structured_outputs
        request.grammar = GrammarState(
            self._compiler.compile(grammar, sorted(request.eos_token_ids)),
            min_tokens=request.params.min_tokens,
            end_ids=sorted(request.ending_token_ids),
            reasoning=None if asked is None else asked.reasoning,
        )
        self._live.append(request)

    def masks(self, requests: Sequence[Request]) -> Masks:
        """What each may have next, after all tokens that are known of it. Those that have ended may have anything."""
        states = []
        for request in requests:
            assert request.grammar is not None
            if not request.is_finished:
                request.grammar.follow(request.output_token_ids)
            states.append(None if request.is_finished else request.grammar)
        return self._filler.fill(states)

    def take_failed(self) -> list[tuple[Request, str]]:
        """Requests whose grammar cannot be followed any further, and why."""
        if not self._live:
            return []
        self._live = [request for request in self._live if not request.is_finished]
        failures = [
            (request, request.grammar.failure) for request in self._live if request.grammar is not None
        ]
        return [(request, failure) for request, failure in failures if failure is not None]

    def wait(self) -> None:
        """Waits a little, when there is nothing but compilations to wait for."""
        compiling = [
            r.grammar.compiled for r in self._live if r.grammar is not None and not r.grammar.is_compiled
        ]
        if compiling:
            wait(compiling, SHORT, FIRST_COMPLETED)


def token_table(tokenizer: Tokenizer | None, vocab_size: int, end_ids: Sequence[int]) -> TokenTable:
    """The model's tokens, with the text that they add to an answer. Those that mark parts of an answer (tool calls,
    reasoning) count as their text even where the tokenizer has them special.
    """
    if tokenizer is None:
        raise ValueError("the model has no tokenizer")
    known = range(min(vocab_size, tokenizer.size))
    spellings = [tokenizer.token_bytes(id) for id in known] + [b""] * (vocab_size - len(known))
    special = [id for id in known if tokenizer.is_special(id) and spellings[id] not in MARKS]
    return TokenTable(spellings, special, end_ids)


MARKS = frozenset(
    text.encode()
    for text in ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
)
