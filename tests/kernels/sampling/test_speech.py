"""Rules of transcriptions: the reference against Transformers' processors, kernels against it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from toolkit.kernels import reference
from toolkit.kernels.cpu import speech
from toolkit.kernels.reference import SpeechRules

VOCAB = 150
IDS = {
    "end": 100,
    "start": 101,
    "no_timestamps": 109,
    "first_timestamp": 110,
    "last_initial_timestamp": 120,
}
SUPPRESSED, FIRST_SUPPRESSED = [1, 5, 7, 101, 107], [3, 100]
PROMPTS = {
    "timestamps": [101, 102, 105],
    "previous": [106, 9, 8, 111, 101, 102, 105],
    "no timestamps": [101, 102, 105, 109],
    "language": [101],
    "language after text": [106, 9, 101],
}
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def speech_rules(triton):
    from toolkit.kernels.triton.sampling.speech import speech_rules

    return speech_rules


def rules(device: torch.device, vocab: int = VOCAB, **changes: int) -> SpeechRules:
    return SpeechRules.make(SUPPRESSED, FIRST_SUPPRESSED, vocab, device, **(IDS | changes))


@dataclass
class Step:
    """Rows of logits, and a state with one answer for each."""

    logits: Tensor
    rows: Tensor
    positions: Tensor
    token_ids: Tensor
    ints: Tensor

    def run(self, function, device: torch.device, of: SpeechRules) -> Tensor:
        """Return the logits after the rules, on the CPU."""
        logits = self.logits.to(device, copy=True)
        state = (one.to(device) for one in (self.rows, self.positions, self.token_ids, self.ints))
        function(logits, *state, of)
        return logits.cpu()


def answers(generator: torch.Generator, vocab: int = VOCAB) -> list[list[int]]:
    """Return the tokens of answers so far: usual ones, and any."""
    first = IDS["first_timestamp"]
    usual = [
        *([], [first], [first, 20], [first, 20, 21]),
        *([first, 20, first + 3], [first, 20, first + 3, first + 3]),
        *([first, 20, first + 3, first + 3, 30], [20], [20, 21], [first + 9, 20, first + 9]),
        [first, *range(10, 99), first + 4],
        [first, *[20] * 140],
    ]
    lengths = torch.randint(0, 9, (24,), generator=generator).tolist()
    random = [torch.randint(90, vocab, (n,), generator=generator).tolist() for n in lengths]
    return usual + random


def step(dtype: torch.dtype = torch.float32, vocab: int = VOCAB, likelier: float = 0.0) -> Step:
    """Return an entry for each answer to each prompt, and one without a position.

    likelier: added to the logits of timestamps."""
    generator = torch.Generator().manual_seed(0)
    pairs = [(prompt, one) for prompt in PROMPTS.values() for one in answers(generator, vocab)]
    n = len(pairs) + 1
    rows = torch.randperm(n + 2, generator=generator)[:n].int()
    token_ids = torch.randint(0, vocab, (n + 2, 200), generator=generator).int()
    ints = torch.zeros(n + 2, 3, dtype=torch.int64)
    positions = torch.full((n,), -1, dtype=torch.int32)
    for entry, (prompt, answer) in enumerate(pairs):
        row, length = rows[entry], len(prompt) + len(answer)
        token_ids[row, :length] = torch.tensor(prompt + answer)
        ints[row, 2], positions[entry] = len(prompt), length
    logits = 3 * torch.randn(n, vocab, generator=generator)
    logits[:, IDS["first_timestamp"] :] += likelier
    return Step(logits.to(dtype), rows, positions, token_ids, ints)


def expected(step: Step, start: int = IDS["start"]) -> Tensor:
    """Return the logits after Transformers' processors, for prompts that do not end with start."""
    from transformers.generation.logits_process import (
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    settings = SimpleNamespace(
        no_timestamps_token_id=IDS["no_timestamps"],
        eos_token_id=IDS["end"],
        bos_token_id=IDS["end"],
        max_initial_timestamp_index=IDS["last_initial_timestamp"] - IDS["first_timestamp"],
    )
    results = step.logits.clone()
    for entry, (row, length) in enumerate(
        zip(step.rows.tolist(), step.positions.tolist(), strict=True)
    ):
        begin = int(step.ints[row, 2])
        last = int(step.token_ids[row, begin - 1])
        if length < 0 or last == start:
            continue
        ids, scores = step.token_ids[row, None, :length].long(), results[entry, None]
        processors = [
            SuppressTokensAtBeginLogitsProcessor(FIRST_SUPPRESSED, begin),
            SuppressTokensLogitsProcessor(SUPPRESSED),
        ]
        if last != IDS["no_timestamps"]:
            processors.append(WhisperTimeStampLogitsProcessor(settings, begin))
        for processor in processors:
            scores = processor(ids, scores)
        results[entry] = scores[0]
    return results


LIKELIER = [-6.0, -3.0, 0.0, 4.0]


@pytest.mark.parametrize("likelier", LIKELIER)
def test_reference_equals_transformers(likelier):
    example = step(likelier=likelier)
    found = example.run(reference.speech_rules, CPU, rules(CPU))
    assert torch.equal(found, expected(example))
    assert torch.isinf(found).any(1).float().mean() > 0.3


def test_prompts_of_models_for_english_alone_have_rules():
    example = step(likelier=-3.0)
    found = example.run(reference.speech_rules, CPU, rules(CPU, start=-1))
    assert torch.equal(found, expected(example, start=-1))


def test_prompts_that_ask_for_the_language_have_no_rules():
    example = step()
    found = example.run(reference.speech_rules, CPU, rules(CPU))
    begins = example.ints[example.rows.long(), 2]
    asks = example.token_ids[example.rows.long(), begins - 1] == IDS["start"]
    assert asks.sum() > 60
    assert torch.equal(found[asks], example.logits[asks])


def test_answers_begin_with_an_early_timestamp():
    example = step()
    found = example.run(reference.speech_rules, CPU, rules(CPU, last_initial_timestamp=112))
    allowed = found[0].isfinite().nonzero()[:, 0].tolist()
    assert allowed == [110, 111, 112]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("likelier", LIKELIER)
def test_rules_on_a_cpu_equal_reference(likelier, dtype):
    example = step(dtype, likelier=likelier)
    found = example.run(speech.speech_rules, CPU, rules(CPU))
    assert torch.equal(found, example.run(reference.speech_rules, CPU, rules(CPU)))


@pytest.mark.on_cpu("0.0-torch.float32", "-3.0-torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("likelier", LIKELIER)
def test_triton_equals_reference(speech_rules, device, likelier, dtype):
    example = step(dtype, likelier=likelier)
    of_reference = example.run(reference.speech_rules, CPU, rules(CPU))
    assert torch.equal(example.run(speech_rules, device, rules(device)), of_reference)


def test_large_vocabularies_and_strided_rows(speech_rules, device):
    vocab = 9001
    example = step(vocab=vocab, likelier=-4.0)
    of_reference = example.run(reference.speech_rules, CPU, rules(CPU, vocab))
    wide = torch.zeros(len(example.logits), vocab + 7)
    wide[:, :vocab] = example.logits
    wide = wide.to(device)
    state = (example.rows, example.positions, example.token_ids, example.ints)
    speech_rules(wide[:, :vocab], *(one.to(device) for one in state), rules(device, vocab))
    assert torch.equal(wide[:, :vocab].cpu(), of_reference)
    assert not wide[:, vocab:].any()


def test_no_rows_change_nothing(speech_rules, device):
    example = step()
    none = Step(
        example.logits[:0], example.rows[:0], example.positions[:0], example.token_ids, example.ints
    )
    for function in (speech_rules, reference.speech_rules):
        assert none.run(function, device, rules(device)).shape == (0, VOCAB)


@pytest.mark.gpu
def test_rules_follow_the_state_in_a_graph(speech_rules, device):
    """A captured call reads the tokens that are in the state when it is replayed."""
    example, of = step(), rules(device)
    logits = example.logits.to(device)
    state = [one.to(device) for one in (example.rows, example.positions, example.token_ids)]
    ints = example.ints.to(device)
    speech_rules(logits.clone(), *state, ints, of)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        speech_rules(logits, *state, ints, of)
    example.token_ids[example.rows[3].long(), int(example.positions[3]) - 1] = 111
    state[2].copy_(example.token_ids)
    logits.copy_(example.logits)
    graph.replay()
    assert torch.equal(logits.cpu(), example.run(reference.speech_rules, CPU, rules(CPU)))
