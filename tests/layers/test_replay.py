"""Replayed steps compute what Python's calls compute.

`tests/models/test_parity.py` compares both with Transformers.
"""

from __future__ import annotations

import random

import pytest
import torch

from tests import engines
from tests.checkpoints import VOCAB
from toolkit import LLM, SamplingParams
from toolkit.kernels import cpu
from toolkit.kernels.cpu.program import Program
from toolkit.layers import replay

if not cpu.available():
    pytest.skip(f"the CPU kernels: {cpu.problem()}", allow_module_level=True)

PROMPTS = [[random.Random(i).randrange(VOCAB) for _ in range(3 + 5 * i)] for i in range(4)]
LENGTHS = [9, 3, 14, 6]


class Steps:
    """The logits and the replays of an engine's steps."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.llm, self.num_runs = llm, 0
        self.logits: list[torch.Tensor] = []
        model, run = engines.model(llm), Program.run
        compute = model.logits

        def counted(program: Program) -> None:
            self.num_runs += 1
            run(program)

        monkeypatch.setattr(
            model, "logits", lambda *given: self.logits.append(compute(*given)) or self.logits[-1]
        )
        monkeypatch.setattr(Program, "run", counted)

    def answers(self) -> tuple[list[list[int]], list[torch.Tensor], int]:
        """Return (tokens, logits of each step, number of replayed steps)."""
        self.logits, self.num_runs = [], 0
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in LENGTHS]
        results = self.llm.generate(
            [{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False
        )
        return [list(result.outputs[0].token_ids) for result in results], self.logits, self.num_runs


@pytest.mark.parametrize(
    ("name", "settings"),
    [("gpt2", {}), ("qwen3", {"dtype": "bfloat16"}), ("llama3-gqa", {"quantization": "int8"})],
    ids=["gpt2", "qwen3 in bf16", "llama in int8"],
)
def test_replayed_steps_compute_the_same(name, settings, checkpoint, monkeypatch):
    llm = LLM(str(checkpoint(name)), device="cpu", enable_prefix_caching=False, **settings)
    steps = Steps(llm, monkeypatch)
    with monkeypatch.context() as inside:
        inside.setattr(replay, "MAX_TOKENS", 0)
        expected, expected_logits, num_runs = steps.answers()
    assert num_runs == 0
    for _ in range(2):
        tokens, logits, num_runs = steps.answers()
        # Four requests start together, and every step after the first is a decode step.
        assert num_runs == max(LENGTHS) - 1
        assert tokens == expected
        assert all(map(torch.equal, logits, expected_logits))


@pytest.mark.parametrize(
    "settings", [{"attention_backend": "torch"}, {"kv_cache_dtype": "fp8"}], ids=str
)
def test_steps_partly_in_pytorch_are_not_replayed(settings, checkpoint, monkeypatch):
    steps = Steps(LLM(str(checkpoint("gpt2")), device="cpu", **settings), monkeypatch)
    tokens, _, num_runs = steps.answers()
    assert num_runs == 0
    assert [len(answer) for answer in tokens] == LENGTHS


def test_steps_of_more_than_max_tokens_are_not_replayed(checkpoint, monkeypatch):
    monkeypatch.setattr(replay, "MAX_TOKENS", 2)
    steps = Steps(LLM(str(checkpoint("gpt2")), device="cpu"), monkeypatch)
    _, _, num_runs = steps.answers()
    assert num_runs == sorted(LENGTHS)[-1] - sorted(LENGTHS)[-3], "steps of the last two requests"
