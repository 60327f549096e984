"""Warm-up uses rows and blocks without a request, and must leave no trace in them."""

from __future__ import annotations

from tests import engines
from toolkit import LLM, SamplingParams
from toolkit.worker.startup.warm_up import WarmUp


def test_warm_up_changes_no_answer(checkpoint):
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [[1, 2, 3], list(range(50))]

    def answers(llm: LLM) -> list[list[int]]:
        return [list(r.outputs[0].token_ids) for r in llm.generate(prompts, params, use_tqdm=False)]

    folder = str(checkpoint("qwen3"))
    cold, warm = (LLM(folder, device="cpu", max_num_seqs=8, block_size=4) for _ in range(2))
    worker = engines.worker(warm)
    WarmUp(worker.runner, worker.info, 8).run()
    assert answers(warm) == answers(cold)
