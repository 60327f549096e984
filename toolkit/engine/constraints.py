"""Grammars of live requests and the token masks of their next tokens."""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from toolkit.sampling.grammar import GrammarCompiler, GrammarState, MaskFiller, Masks, TokenTable
from toolkit.sampling.params import THINK_END, THINK_START
from toolkit.scheduler import Request
from toolkit.text.tokenizer import Tokenizer

WAIT_SECONDS = 0.002  # longest wait for a compilation, in seconds, if the engine has no other work


class Constraints:
    """Compiles grammars in threads, and queues each request once its grammar is compiled.

    Requests that wait for a compilation add no cost to a step: a callback reports its end."""

    def __init__(self, read_tokenizer: Callable[[], Tokenizer | None], vocab_size: int) -> None:
        self._compiler = GrammarCompiler(
            lambda end_ids, delimiters: token_table(
                read_tokenizer(), vocab_size, end_ids, DELIMITERS | delimiters
            )
        )
        self._filler = MaskFiller(vocab_size)
        self._num_compiling = 0
        """Requests whose compilation has not ended, or has not been handled by `pop_compiled`."""
        self._compiled: deque[Request] = deque()
        """Requests whose compilation has ended. Threads append to it."""
        self._compilation_ended = threading.Event()
        self._failed: dict[Request, str] = {}

    def add(self, request: Request) -> None:
        """Start to compile the request's grammar. `pop_compiled` returns the request afterwards."""
        asked = request.params.structured_outputs
        assert asked is not None, "a request with a grammar has asked for one"
        compiled = self._compiler.compile(
            request.spec.grammar,
            sorted(request.spec.eos_token_ids),
            frozenset(asked.delimiters) - DELIMITERS,
        )
        request.grammar = GrammarState(
            compiled,
            min_tokens=request.params.min_tokens,
            end_ids=sorted(request.ending_token_ids),
            reasoning=asked.reasoning,
            reasoning_marks=asked.reasoning_marks,
        )
        self._num_compiling += 1
        compiled.add_done_callback(lambda _: self._on_compiled(request))

    def _on_compiled(self, request: Request) -> None:
        self._compiled.append(request)
        self._compilation_ended.set()

    def pop_compiled(self) -> list[Request]:
        """Return requests compiled since the last call, without failures (see `pop_failed`)."""
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

    def masks(self, requests: Sequence[tuple[Request, list[int]]]) -> Masks:
        """Return masks of the tokens allowed next, and after each of the requests' drafts.

        Ended requests have no constraint."""
        states = []
        for request, drafts in requests:
            assert request.grammar is not None
            if not request.is_finished:
                request.grammar.follow(request.output_token_ids)
            states.append((None if request.is_finished else request.grammar, drafts))
        masks = self._filler.fill(states)
        for (request, _), (state, _) in zip(requests, states, strict=True):
            if state is not None and state.error is not None:
                self._failed[request] = state.error
        return masks

    def pop_failed(self) -> list[tuple[Request, str]]:
        """Return (request, reason) for grammars that failed since the last call."""
        failed, self._failed = self._failed, {}
        return [
            (request, failure) for request, failure in failed.items() if not request.is_finished
        ]

    def wait(self) -> None:
        """Wait up to WAIT_SECONDS for a compilation."""
        self._compilation_ended.clear()
        if self._num_compiling and not self._compiled:
            self._compilation_ended.wait(WAIT_SECONDS)


DELIMITERS = frozenset(
    (
        THINK_START,
        THINK_END,
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
    )
)
"""Tokens that delimit parts of an answer in the built-in formats."""


def token_table(
    tokenizer: Tokenizer | None,
    vocab_size: int,
    end_ids: Sequence[int],
    delimiters: frozenset[str] = DELIMITERS,
) -> TokenTable:
    """Return the model's tokens with the text that they add to an answer.

    `delimiters` count as text, even if the tokenizer marks them as special."""
    if tokenizer is None:
        raise ValueError("the model has no tokenizer")
    known = range(min(vocab_size, tokenizer.size))
    spellings = [tokenizer.token_bytes(id) for id in known] + [b""] * (vocab_size - len(known))
    texts = {one.encode() for one in delimiters}
    special = [id for id in known if tokenizer.is_special(id) and spellings[id] not in texts]
    return TokenTable(spellings, special, end_ids)
