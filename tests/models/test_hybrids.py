"""Decoders with gated delta nets: long contexts, chunks, ranks, and slots that are used again."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import checkpoints, engines
from tests.models import random_states
from tests.models.conftest import Case
from tests.models.random_states import SETTINGS
from tests.references import Reference
from toolkit import LLM, SamplingParams
from toolkit.config import CacheConfig, EngineConfig
from toolkit.errors import EngineError, OutOfMemoryError
from toolkit.hardware.devices import find_device
from toolkit.inventory.checkpoint import read_folder
from toolkit.inventory.estimate import estimate
from toolkit.kernels.table import TritonKernels
from toolkit.models.memory import MemoryLayout, Part, RowMemory, TokenMemory
from toolkit.units import GIB
from toolkit.worker.kv_cache import RowStates
from toolkit.worker.startup import cache_problem

pytestmark = pytest.mark.usefixtures("forked_processes")
LENGTHS = 63, 64, 65, 130, 301
COUNT = 6
MODES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 2},
    "chunks of 13": {"max_num_batched_tokens": 13, "max_num_seqs": 1},
    "chunks of 64": {"max_num_batched_tokens": 64, "async_scheduling": True},
    "chunks of 65": {"max_num_batched_tokens": 65, "max_num_seqs": 3},
    "two ranks": {"tensor_parallel_size": 2, "max_num_batched_tokens": 128},
    "two stages": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 128},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
TIGHT = {
    "num_gpu_blocks_override": 40,
    "block_size": 4,
    "max_model_len": 120,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 64,
}
"""Few blocks: requests are preempted."""


@pytest.fixture(scope="module")
def model() -> Reference:
    return random_states.hybrid()


@pytest.fixture(scope="module")
def folder(model: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(model, tmp_path_factory.mktemp("hybrid"))


def answers(llm: LLM, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    given = [{"prompt_token_ids": one} for one in prompts]
    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | settings
    )
    found = llm.generate(given, params, use_tqdm=False)
    return [list(one.token_ids) for request in found for one in request.outputs]


def growing_requests() -> list[random_states.Request]:
    """Return requests with prompts of 10 to 35 tokens and answers of 40."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    return [([(7 * i * i + 5 * n) % 250 for i in range(10 + 5 * n)], params) for n in range(6)]


def count_preempted(llm: LLM) -> tuple[Callable[[], float], Callable[[], int]]:
    """Return functions that count the requests that are preempted, and swapped, from now on.

    Each request that is swapped in has its blocks and its state."""
    scheduler, steps = engines.scheduler(llm), []
    schedule = scheduler.schedule

    def scheduling() -> Any:
        step = schedule()
        if step is not None:
            assert bool(step.swap_out) == bool(step.state_swap_out)
            assert bool(step.swap_in) == bool(step.state_swap_in)
            steps.append(len(step.state_swap_in))
        return step

    scheduler.schedule = scheduling
    return engines.count_stats(llm, "num_preemptions"), lambda: sum(steps)


@pytest.mark.parametrize("mode", MODES)
def test_answers_equal_transformers(model, folder, mode):
    """Cold, and again in slots that other requests have used."""
    prompts = model.prompts(LENGTHS, COUNT, checkpoints.VOCAB)
    expected = [checkpoints.greedy(model, one, COUNT) for one in prompts]
    llm = LLM(str(folder), **SETTINGS | MODES[mode])
    assert answers(llm, prompts) == expected
    assert answers(llm, prompts[:1]) == expected[:1]
    assert answers(llm, prompts[::-1]) == expected[::-1]
    llm.shutdown()


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("hybrid", {"async_scheduling": True}),
        ("hybrid", {"tensor_parallel_size": 2, "async_scheduling": True}),
        ("lfm2", {}),
        ("lfm2", {"pipeline_parallel_size": 2}),  # the second stage has no blocks
    ],
    ids=str,
)
def test_preempted_requests_continue_from_swapped_states(checkpoint, folder, name, mode):
    """The host has room for all that are preempted: none is computed again."""
    requests = growing_requests()
    folder = folder if name == "hybrid" else checkpoint(name)
    expected = random_states.answers_alone(folder, requests)
    llm = LLM(str(folder), **SETTINGS, **TIGHT, **mode, swap_space=0.01)
    num_preempted, num_swapped = count_preempted(llm)
    assert random_states.answers(llm, requests) == expected
    llm.shutdown()
    assert num_swapped() == num_preempted() > 3


def test_requests_without_room_on_the_host_are_recomputed(checkpoint, monkeypatch):
    requests, folder = growing_requests(), checkpoint("lfm2")
    monkeypatch.setattr(cache_problem, "REQUEST_SHARE", 0.005)
    llm = LLM(str(folder), **SETTINGS, **TIGHT, swap_space=0.0004)
    num_preempted, num_swapped = count_preempted(llm)
    assert random_states.answers(llm, requests) == random_states.answers_alone(folder, requests)
    assert llm.info.num_host_slots == 1
    assert num_preempted() > num_swapped() > 0
    llm.shutdown()


def test_states_that_are_not_copied_back_are_noticed(checkpoint, monkeypatch):
    """In tests, slots that a step reads are full of NaN until they are written."""
    monkeypatch.setattr(RowStates, "copy_in", lambda states, pairs: None)
    llm = LLM(str(checkpoint("lfm2")), **SETTINGS, **TIGHT, swap_space=0.01)
    with pytest.raises(EngineError, match="not finite"):
        random_states.answers(llm, growing_requests())
    llm.shutdown()


@pytest.mark.parametrize("name", ["qwen3.5", "lfm2"])
def test_gpu_kernels_answer_like_transformers(checkpoint, rerun_graphs, monkeypatch, name):
    """Prompts in chunks next to decoding, a tail of one token, and padded steps of one token."""
    monkeypatch.setattr("toolkit.models.recurrent.kernels_for", lambda device: TritonKernels())
    case = Case(name, checkpoint(name))
    limits = {"max_num_batched_tokens": 49, "max_num_seqs": 3, "attention_backend": "torch"}
    llm = case.engine(**SETTINGS | limits)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    for prompts in (case.prompts[3::2], case.prompts[4:5], case.prompts[:2]):
        given = [{"prompt_token_ids": one} for one in prompts]
        case.assert_greedy(llm.generate(given, params, use_tqdm=False), num_tokens=3)
    assert len(engines.graphs(llm)) > 0
    llm.shutdown()


def test_several_answers_start_from_one_state(model, folder):
    prompts = model.prompts(LENGTHS, COUNT, checkpoints.VOCAB)[1:4]
    expected = [checkpoints.greedy(model, one, COUNT) for one in prompts for _ in range(3)]
    llm = LLM(str(folder), **SETTINGS, max_num_seqs=5, max_num_batched_tokens=40)
    assert answers(llm, prompts, n=3) == expected
    first, again = (answers(llm, prompts, n=2, temperature=1.0, seed=4) for _ in range(2))
    assert first == again
    assert first[0] != first[1]
    llm.shutdown()


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5-moe"])
def test_experts_are_one_tensor_or_several(checkpoint: Callable[[str], Path], tmp_path, name):
    """Transformers writes a tensor for each expert, and publishers one for all of a layer."""
    folder = checkpoint(name)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    stacked = {key: one for key, one in tensors.items() if ".experts." not in key}
    for layer in {key.partition(".experts.")[0] for key in tensors if ".experts." in key}:
        gate, up, down = (
            torch.stack([tensors[f"{layer}.experts.{i}.{part}_proj.weight"] for i in range(6)])
            for part in ("gate", "up", "down")
        )
        stacked[f"{layer}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        stacked[f"{layer}.experts.down_proj"] = down
    save_file(stacked, tmp_path / "model.safetensors", {"format": "pt"})
    prompts = [[5, 6, 7], list(range(70))]
    first, second = (answers(LLM(str(one), **SETTINGS), prompts) for one in (folder, tmp_path))
    assert first == second


def test_norms_of_olmo_have_published_names_or_those_of_transformers(checkpoint, tmp_path):
    folder = checkpoint("olmo-hybrid")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    renamed = {
        name.replace("feedforward_layer_norm", "post_attention_layernorm")
        if name.startswith("model.layers.1.")  # has attention
        else name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    assert "model.layers.1.post_attention_layernorm.weight" in renamed
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    first, second = (answers(LLM(str(one), **SETTINGS), [[5, 6]]) for one in (folder, tmp_path))
    assert first == second


def test_layers_that_only_draft_are_not_read(model, folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"mtp.fc.weight": torch.ones(3, 4)},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    first, second = (answers(LLM(str(one), **SETTINGS), [[5, 6]]) for one in (folder, tmp_path))
    assert first == second


def test_warm_equals_cold_at_every_length(model, folder):
    """Prompts that repeat, that share a beginning, and that go on after an answer."""
    text = model.prompts(LENGTHS, COUNT, checkpoints.VOCAB)[-1]
    settings = SETTINGS | {"max_num_batched_tokens": 500, "max_num_seqs": 32}
    cold = LLM(str(folder), **settings, enable_prefix_caching=False)
    warm = LLM(str(folder), **settings)
    prompts = [text[:length] for length in range(66, 130)]
    others = [[*one, 5, 6, 7] for one in prompts]
    expected = answers(cold, prompts, max_tokens=66)
    assert answers(warm, prompts, max_tokens=66) == expected
    assert answers(warm, prompts[::3], max_tokens=66) == expected[::3]
    assert answers(warm, others) == answers(cold, others)
    turns = [[*one, *answer, *text[:3]] for one, answer in zip(prompts, expected, strict=True)]
    assert answers(warm, turns) == answers(cold, turns)
    cold.shutdown()
    warm.shutdown()


def test_cached_tokens_are_those_of_snapshots(folder):
    def cached(prompts: list[list[int]]) -> list[int]:
        given = [{"prompt_token_ids": one} for one in prompts]
        return [one.num_cached_tokens for one in llm.generate(given, GREEDY, use_tqdm=False)]

    llm = LLM(str(folder), **SETTINGS)
    system = [(7 * i * i + 3) % 250 for i in range(150)]
    first, second, third = ([*system, k, *range(80)] for k in (251, 252, 253))
    assert cached([first]) == [0]
    assert cached([first]) == [192]  # of 231 tokens
    assert cached([second]) == [0]  # its blocks are cached, and no state at 128
    assert cached([third]) == [128]  # that is where `second` parted from `first`
    assert cached([second]) == [192]
    [answer] = answers(llm, [first], max_tokens=100)
    assert cached([[*first, *answer, 3, 4]]) == [320]  # of 331: the answer passed it
    llm.reset_prefix_cache()
    assert cached([first]) == [0]
    llm.shutdown()


def test_fewer_requests_run_where_states_leave_no_room(model, folder, monkeypatch, caplog):
    prompts = model.prompts(LENGTHS, COUNT, checkpoints.VOCAB)
    monkeypatch.setattr(cache_problem, "REQUEST_SHARE", 1e-9)
    llm = LLM(str(folder), **SETTINGS, max_num_seqs=4, state_cache_gib=0.0, swap_space=0.001)
    scheduler, running = engines.scheduler(llm), []
    schedule = scheduler.schedule
    monkeypatch.setattr(
        scheduler, "schedule", lambda: [schedule(), running.append(len(scheduler.running))][0]
    )
    assert answers(llm, prompts) == [checkpoints.greedy(model, one, COUNT) for one in prompts]
    assert max(running) == 1
    assert "at most 1 requests run at once, not 4 (--max-num-seqs): the state" in caplog.text
    assert "--swap-space 0.001 has no room for the state of a request" in caplog.text
    llm.shutdown()


def test_states_in_bfloat16_take_half_the_memory_and_change_little(model, folder):
    [prompt] = model.prompts(LENGTHS, COUNT, checkpoints.VOCAB)[-1:]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = []
    for name in ("auto", "bfloat16"):
        llm = LLM(str(folder), **SETTINGS, mamba_ssm_cache_dtype=name, max_num_batched_tokens=7)
        [result] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        given = zip(prompt[1:], result.prompt_logprobs[1:], strict=True)
        found.append(torch.tensor([one[token].logprob for token, one in given]))
        llm.shutdown()
    exact, rounded = found
    assert 1e-5 < float((exact - rounded).abs().median()) < 0.01
    windows, states = Part(3, 20), Part(2, 64, in_float32=True)
    wide, narrow = (
        MemoryLayout.of([RowMemory((windows, states))], 16, 2, 2, name).row_bytes
        for name in ("float32", "bfloat16")
    )
    assert (wide, narrow) == (120 + 512, 120 + 256)


def test_a_type_of_states_that_changes_nothing_is_reported(checkpoint, caplog):
    for name in ("lfm2", "qwen3.5", "gpt2"):
        llm = LLM(str(checkpoint(name)), **SETTINGS, mamba_ssm_cache_dtype="bfloat16")
        llm.shutdown()
        reported = "--mamba-ssm-cache-dtype bfloat16 changes nothing" in caplog.text
        assert reported == (name != "qwen3.5")
        caplog.clear()


def test_states_of_requests_come_before_blocks_and_snapshots():
    row, token = RowMemory((Part(2, 512, in_float32=True),)), TokenMemory.of_keys(1, 8)
    hybrid, plain = (
        MemoryLayout.of(layers, block_size=16, itemsize=2, row_itemsize=2)
        for layers in ([row, token], [token])
    )
    config = CacheConfig(swap_space=0.0)
    limits = {"max_num_seqs": 10, "max_model_len": 64, "on_gpu": True}
    roomy, short = (
        cache_problem.count_parts(config, hybrid, room=room, **limits) for room in (1 << 20, 40960)
    )
    assert (hybrid.row_bytes, hybrid.block_bytes) == (4096, 512)
    assert roomy.requests == 10
    assert roomy.blocks == int(((1 << 20) - 11 * 4096) * 0.75) // 512
    assert (short.requests, short.blocks) == (4, (40960 - 5 * 4096) * 3 // 4 // 512)
    for counts in (roomy, short):
        used = (counts.requests + 1 + counts.snapshots) * 4096 + counts.blocks * 512
        assert used <= (1 << 20 if counts is roomy else 40960)
    stage = cache_problem.count_parts(config, plain, room=40960, **limits)
    assert (stage.requests, stage.snapshots) == (10, 80 * 16 // 64)  # it limits no other stage


@pytest.mark.parametrize(
    ("layers", "swap_space", "host_slots", "host_blocks"),
    [
        ("rows and tokens", 100_000, 10, (100_000 - 10 * 4096) // 512),  # --max-num-seqs
        ("rows and tokens", 20_000, 2, (20_000 - 2 * 4096) // 512),  # half of the swap space
        ("rows and tokens", 8000, 0, 8000 // 512),
        ("rows and tokens", 0, 0, 0),
        ("tokens", 8000, 10, 8000 // 512),  # a stage without states limits no other
        ("rows", 20_000, 2, 10 * 4),  # a stage without blocks, too
        ("rows", 0, 0, 0),
    ],
)
def test_swap_space_has_states_and_blocks(layers, swap_space, host_slots, host_blocks):
    rows, tokens = RowMemory((Part(2, 512, in_float32=True),)), TokenMemory.of_keys(1, 8)
    memory = [rows] * ("rows" in layers) + [tokens] * ("tokens" in layers)
    layout = MemoryLayout.of(memory, block_size=16, itemsize=2, row_itemsize=2)
    counts = cache_problem.count_parts(
        CacheConfig(swap_space=swap_space / GIB),
        layout,
        room=1 << 20,
        max_num_seqs=10,
        max_model_len=64,
        on_gpu=False,
    )
    assert (counts.host_slots, counts.host_blocks) == (host_slots, host_blocks)


def test_swap_space_that_does_not_fit_is_refused_alike(checkpoint, capsys):
    """`tk serve --dry-run` counts states as a start does."""
    folder = checkpoint("lfm2")
    settings = SETTINGS | {"swap_space": 2.0**19, "max_num_seqs": 10**9}
    with pytest.raises(OutOfMemoryError) as refused:
        LLM(str(folder), **settings)
    config = EngineConfig.from_settings(settings)
    found = estimate(read_folder(folder, "lfm2"), config, find_device("cpu"))
    assert found.lack is not None
    assert re.sub(r" \(.*free\)", "", found.lack) == re.sub(r" \(.*free\)", "", str(refused.value))


def test_random_requests_equal_those_alone(folder):
    """Preempted ones are recomputed in the first half, and partly swapped in the second.

    The second half has drafts, most of which are right."""
    requests = random_states.random_requests(300, seed=3)
    expected = random_states.answers_alone(folder, requests)
    guessing = random_states.with_predictions(requests[150:], expected[150:])
    found = []
    for limits, some in (
        (random_states.SMALL, requests[:150]),
        (random_states.SWAP | random_states.DRAFTS, guessing),
    ):
        llm = LLM(str(folder), **SETTINGS, **limits)
        num_preempted, num_swapped = count_preempted(llm)
        num_hits = engines.count_stats(llm, "prefix_cache_hits")
        with random_states.predictions_are_ids():
            found += random_states.answers(llm, some)
        llm.shutdown()
        assert num_hits() > 2500
        if limits is random_states.SMALL:
            assert num_preempted() > 25
            assert not num_swapped()
        else:
            assert num_preempted() - 10 > num_swapped() > 10
    assert found == expected


async def test_clients_that_leave_and_a_killed_core_change_no_answer(folder, forked_processes):
    requests = random_states.random_requests(40, seed=4)
    expected = random_states.answers_alone(folder, requests)
    requests = random_states.with_predictions(requests, expected)
    limits = random_states.SWAP | random_states.DRAFTS
    with random_states.predictions_are_ids():
        found = await random_states.answers_of_clients(
            folder, requests, limits, kill_every=30, seed=4
        )
    assert all(found)
    assert found == [one[: len(own)] for one, own in zip(expected, found, strict=True)]
    assert any(len(own) < len(one) for one, own in zip(expected, found, strict=True))
