"""Text that a grammar forces may be spelled by any tokens that the vocabulary has for it."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.sampling.grammar import CompiledGrammar, TokenTable, Vocabulary
from toolkit.sampling.structured_outputs import StructuredOutputsParams

WORDS = [b'{"', b"na", b"name", b'name"', b"me", b'":', b"<tool_call>", b"John", b"Jo", b"hn"]
SPELLINGS = [bytes([byte]) for byte in range(256)] + WORDS + [b""]
END = len(SPELLINGS) - 1
NAME = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("constraint", "before", "rest"),
    [
        ({"json": NAME}, [b'{"'], b'name"'),
        ({"json": NAME}, [b'{"', b"na"], b'me"'),
        ({"regex": "John"}, [], b"John"),
        ({"choice": ["John"]}, [b"Jo"], b"hn"),
        ({"grammar": 'start: "<tool_call>" "name"'}, [], b"<tool_call>"),
        ({"grammar": 'start: "<tool_call>" "name"'}, [b"<tool_call>"], b"name"),
        ({"grammar": 'root ::= "name" [0-9]'}, [], b"name"),
        ({"grammar": '%llguidance {}\nstart: "name"'}, [b"n"], b"ame"),
    ],
    ids=str,
)
def test_forced_text_has_all_its_tokens(constraint, before, rest):
    grammar = StructuredOutputsParams(**constraint).to_grammar()
    state = CompiledGrammar(Vocabulary(TokenTable(SPELLINGS, [END], [END])), grammar).start()
    assert state.consume_tokens([SPELLINGS.index(token) for token in before])
    mask = np.zeros(-(-len(SPELLINGS) // 32), np.int32)
    state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    allowed = {SPELLINGS[index] for index in np.flatnonzero(bits)}
    assert allowed == {token for token in SPELLINGS if token and rest.startswith(token)}
