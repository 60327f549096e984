"""The live requests that have a grammar, and the masks of what their next tokens may be."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from toolkit.sampling.grammar import GrammarCompiler, GrammarState, MaskFiller, Masks, TokenTable
from toolkit.scheduler import Request
from toolkit.text.tokenizer import Tokenizer

SHORT = 0.002
"""Seconds that an engine with nothing else to do waits for a compilation before it looks for news."""


class Constraints:
    """Grammars are compiled in threads; a request whose grammar is not compiled yet is not in line to be scheduled.

    A step costs nothing for the requests that wait for a compilation: they are heard of when it has ended.
    """

    def __init__(self, read_tokenizer: Callable[[], Tokenizer | None], vocab_size: int) -> None:
        self._compiler = GrammarCompiler(
            lambda end_ids: token_table(read_tokenizer(), vocab_size, end_ids)
        )
        self._filler = MaskFiller(vocab_size)
        self._num_compiling = 0
        """Requests that wait for a compilation, or for somebody to hear of its end."""
        self._compiled: deque[Request] = deque()
        """Those whose compilation has ended; threads add to it."""
        self._news = threading.Event()
        self._failed: dict[Request, str] = {}

    def add(self, request: Request) -> None:
        """Begins to compile the grammar of a request, which comes with `take_compiled` when that is done."""
        asked = request.params.structured_outputs
        compiled = self._compiler.compile(request.spec.grammar, sorted(request.spec.eos_token_ids))
        request.grammar = GrammarState(
            compiled,
            min_tokens=request.params.min_tokens,
            end_ids=sorted(request.ending_token_ids),
            reasoning=None if asked is None else asked.reasoning,
        )
        self._num_compiling += 1
        compiled.add_done_callback(lambda _: self._note(request))

    def _note(self, request: Request) -> None:
        self._compiled.append(request)
        self._news.set()

    def take_compiled(self) -> list[Request]:
        """Requests whose grammars have been compiled since the last call. What could not be compiled is with the failed."""
        done = []
        while self._compiled:
            request = self._compiled.popleft()
            self._num_compiling -= 1
            assert request.grammar is not None
            if (failure := request.grammar.failure) is not None:
                self._failed[request] = failure
            else:
                done.append(request)
        return done

    def masks(self, requests: Sequence[Request]) -> Masks:
        """What each may have next, after all tokens that are known of it. Those that have ended may have anything."""
        states = []
        for request in requests:
            assert request.grammar is not None
            if not request.is_finished:
                request.grammar.follow(request.output_token_ids)
            states.append(None if request.is_finished else request.grammar)
        masks = self._filler.fill(states)
        for request, state in zip(requests, states, strict=True):
            if state is not None and state.error is not None:
                self._failed[request] = state.error
        return masks

    def take_failed(self) -> list[tuple[Request, str]]:
        """Requests whose grammar cannot be followed, or not any further, and why: those that are new."""
        failed, self._failed = self._failed, {}
        return [
            (request, failure) for request, failure in failed.items() if not request.is_finished
        ]

    def wait(self) -> None:
        """Waits a little, when there is nothing but compilations to wait for."""
        self._news.clear()
        if self._num_compiling and not self._compiled:
            self._news.wait(SHORT)


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
    for text in (
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
    )
)
