"""Memory of drafters on a GPU: estimates equal what the GPU's runner keeps and captures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import engines
from tests.speculative.drafting import drafting_engine, save_llama
from tests.speculative.test_eagle import LAYERS, eagle3_tensors, eagle_tensors, write
from tests.worker.gpu_runners import Rerun
from toolkit import LLM
from toolkit.config import EngineConfig
from toolkit.inventory.checkpoint import read_folder
from toolkit.inventory.drafters import drafter_of
from toolkit.inventory.step_memory import StepMemory
from toolkit.worker.runner import Runner
from toolkit.worker.startup.warm_up import WarmUp

LIMITS = {"max_num_seqs": 3, "max_num_batched_tokens": 150, "max_model_len": 250, "block_size": 4}
MAKE: dict[str, Callable[[Path], Path]] = {
    "draft_model": lambda folder: save_llama(folder, num_hidden_layers=2, hidden_size=32),
    "eagle": lambda folder: write(folder, eagle_tensors(2, bias=True), num_hidden_layers=2),
    "eagle3": lambda folder: write(folder, eagle3_tensors("midlayer"), draft_vocab_size=86),
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


def start(model: Path, speculation: dict[str, object], **more: object) -> tuple[LLM, Runner]:
    settings = LIMITS | {"speculative_config": speculation, "attention_backend": "torch"} | more
    llm = drafting_engine(model, None, **settings)
    runner = engines.runner(llm)
    return llm, runner


def step_memory(model: Path, speculation: dict[str, object]) -> StepMemory:
    config = EngineConfig.from_settings(LIMITS | {"speculative_config": speculation})
    checkpoint = read_folder(model, "target")
    drafter = drafter_of(checkpoint, config)
    return StepMemory(
        checkpoint.config,
        config,
        type_bytes=4,
        on_gpu=True,
        max_model_len=LIMITS["max_model_len"],
        num_layers=LAYERS,
        drafting=drafter,
    )


def tensor_bytes(*owners: object) -> int:
    found = [value for owner in owners for value in vars(owner).values()]
    return sum(value.nbytes for value in found if isinstance(value, torch.Tensor))


def test_tables_of_tokens_and_predictions_are_counted(gpu_runner, target_folder):
    speculation = {"method": "ngram"}
    llm, runner = start(target_folder, speculation)
    state = runner.state
    kept = tensor_bytes(runner.drafter) + state.token_ids.nbytes + state._table.nbytes
    assert step_memory(target_folder, speculation).rows == pytest.approx(kept, rel=0.02)
    llm.shutdown()


@pytest.mark.parametrize("method", MAKE)
def test_hidden_states_of_drafters_are_counted(gpu_runner, tmp_path, target_folder, method):
    speculation = {"method": method, "model": str(MAKE[method](tmp_path / "drafter"))}
    llm, runner = start(target_folder, speculation)
    owners = [runner.drafter] + [runner.model.taps] * (method != "draft_model")
    counted = step_memory(target_folder, speculation).hidden_states
    assert counted == pytest.approx(tensor_bytes(*owners), rel=0.1)
    llm.shutdown()


class Captures:
    """Counts the bytes of graphs, whose cost is given by the module that captures them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, costs: dict[str, int]) -> None:
        self.taken = 0
        for module, cost in costs.items():
            monkeypatch.setattr(f"toolkit.worker.{module}.capture", self._capture(cost))
        monkeypatch.setattr("toolkit.worker.startup.warm_up.empty_cache", lambda: None)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (2**40 - self.taken, 2**40))

    def _capture(self, cost: int) -> Callable[..., Any]:
        def capture(run: Callable[[], Any], pool: object) -> tuple[Rerun, Any]:
            self.taken += cost
            return Rerun(run, None), torch.empty(0)

        return capture


@pytest.mark.parametrize("settings", [{}, {"enable_lora": True}], ids=["plain", "adapters"])
def test_all_graphs_of_a_drafter_are_counted(
    rerun_graphs, monkeypatch, tmp_path, target_folder, settings
):
    """Only some shapes have graphs of drafts."""
    speculation = {"method": "eagle", "model": str(MAKE["eagle"](tmp_path / "drafter"))}
    captures = Captures(monkeypatch, {"runner": 1000, "step_sampler": 1, "drafter": 10})
    llm, runner = start(target_folder, speculation, **settings)
    taken = captures.taken
    runner.close()
    assert WarmUp(runner, engines.worker(llm).info, 3).graph_bytes() == taken > 0
    llm.shutdown()
