"""Steps that are replayed give what they give when Python calls every kernel (`tests/models/test_parity.py` holds both against
Transformers).
"""

from __future__ import annotations

import random

import pytest
import torch

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
    """What an engine computes on the way to its answers."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.llm, self.num_runs = llm, 0
        self.logits: list[torch.Tensor] = []
        model, run = llm._core.executor._worker.runner.model, Program.run
        compute = model.logits

        def counted(program: Program) -> None:
            self.num_runs += 1
            run(program)

        monkeypatch.setattr(
            model, "logits", lambda hidden: self.logits.append(compute(hidden)) or self.logits[-1]
        )
        monkeypatch.setattr(Program, "run", counted)

    def answers(self) -> tuple[list[list[int]], list[torch.Tensor], int]:
        """(tokens, logits of each step, how many steps were replayed)"""
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
def test_a_replayed_step_computes_the_same(name, settings, checkpoint, monkeypatch):
    llm = LLM(str(checkpoint(name)), device="cpu", enable_prefix_caching=False, **settings)
    steps = Steps(llm, monkeypatch)
    with monkeypatch.context() as inside:
        inside.setattr(replay, "MOST_TOKENS", 0)
        expected, expected_logits, num_runs = steps.answers()
    assert num_runs == 0
    for _ in range(2):
        tokens, logits, num_runs = steps.answers()
        # Four requests begin together; every step after the first is of next tokens alone.
        assert num_runs == max(LENGTHS) - 1
        assert tokens == expected
        assert all(map(torch.equal, logits, expected_logits))


@pytest.mark.parametrize(
    "settings", [{"attention_backend": "torch"}, {"kv_cache_dtype": "fp8"}], ids=str
)
def test_what_pytorch_computes_in_part_is_not_replayed(settings, checkpoint, monkeypatch):
    steps = Steps(LLM(str(checkpoint("gpt2")), device="cpu", **settings), monkeypatch)
    tokens, _, num_runs = steps.answers()
    assert num_runs == 0
    assert [len(answer) for answer in tokens] == LENGTHS


def test_no_more_requests_than_there_is_a_use_for(checkpoint, monkeypatch):
    monkeypatch.setattr(replay, "MOST_TOKENS", 2)
    steps = Steps(LLM(str(checkpoint("gpt2")), device="cpu"), monkeypatch)
    _, _, num_runs = steps.answers()
    assert num_runs == sorted(LENGTHS)[-1] - sorted(LENGTHS)[-3], "steps of the last two requests"
