"""Adapters that are read when requests need them, and dropped for others."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import psutil
import pytest

from tests import engines
from tests.lora.conftest import COUNT, CPU, PROMPT, Adapter, engine, generate, tokens
from toolkit import LLM, AsyncLLM, LoRARequest, SamplingParams
from toolkit.config import LoRAConfig
from toolkit.engine.front.adapters import AdapterRegistry
from toolkit.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    WorkersLostError,
)

pytestmark = pytest.mark.usefixtures("forked_processes")

NAMES = ("attention", "all", "patterns", "rslora")  # of one base model
PARAMS = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, detokenize=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_loras": 1, "max_cpu_loras": 1},
        {"max_loras": 2, "max_cpu_loras": 3, "max_num_batched_tokens": 7},
        {"max_loras": 1, "tensor_parallel_size": 2, "num_threads": 1, "max_cpu_loras": 2},
        {"max_loras": 2, "pipeline_parallel_size": 2, "num_threads": 1, "max_cpu_loras": 2},
    ],
    ids=str,
)
def test_more_adapters_than_fit_take_turns(adapter, checkpoint, settings):
    adapters: dict[str, Adapter] = {name: adapter(name) for name in NAMES}
    folders = {name: one.folder for name, one in adapters.items()}
    llm = engine(checkpoint("llama3-gqa"), folders, **settings)
    names = [*NAMES, "", *NAMES[::-1]]
    given = tokens(generate(llm, [PROMPT] * len(names), names))
    assert len(engines.kept_adapters(llm)) <= settings["max_cpu_loras"]
    llm.shutdown()
    expected = {name: one.greedy(PROMPT, COUNT) for name, one in adapters.items()}
    assert given[:4] == given[:4:-1] == [expected[name] for name in NAMES]
    assert given[4] not in given[:4]


def test_requests_bring_folders(adapter, checkpoint, tmp_path):
    """A changed file is another revision, and what it was read for is not mixed up."""
    first, second = adapter("attention"), adapter("all")
    folder = tmp_path / "mine"
    shutil.copytree(first.folder, folder)
    llm = LLM(str(checkpoint(first.base)), enable_lora=True, block_size=4, **CPU)
    request = LoRARequest("mine", 1, str(folder))
    prompts = [{"prompt_token_ids": PROMPT}]
    answers = [llm.generate(prompts, PARAMS, lora_request=request)[0]]
    replace(folder, second.folder)
    answers.append(llm.generate(prompts, PARAMS, lora_request=request)[0])
    answers.append(llm.generate(prompts, PARAMS, lora_request=LoRARequest("mine"))[0])
    assert tokens(answers) == [one.greedy(PROMPT, COUNT) for one in (first, second, second)]
    assert [one.num_cached_tokens for one in answers] == [0, 0, 8]
    deltas = list(llm.stream(prompts[0], PARAMS, lora_request=LoRARequest("mine")))
    assert [token for one in deltas for token in one.token_ids] == second.greedy(PROMPT, COUNT)
    replace(folder, first.folder)
    engines.forget_adapters(llm)
    with pytest.raises(EngineError, match=r"its files have changed since it was loaded"):
        llm.generate(prompts, PARAMS, lora_request=LoRARequest("mine"))
    missing = LoRARequest("none", 1, str(tmp_path / "none"))
    with pytest.raises(InvalidRequestError, match="there is no such folder"):
        llm.generate(prompts, PARAMS, lora_request=missing)
    with pytest.raises(EngineError, match=r"its rank is 99\. Start with --max-lora-rank 99"):
        llm.generate(prompts, PARAMS, lora_request=with_rank(folder, 99))
    base = llm.generate(prompts, PARAMS)[0]
    assert base.outputs[0].token_ids not in tokens(answers)
    llm.shutdown()


CHANGES = [(False, False, False), (True, False, False), (True, True, False)]  # ways to find it
CHANGES += [(False, False, True), (True, False, True)]


def test_changed_files_are_served_unless_operators_load_them(adapter, tmp_path):
    first, second = adapter("attention"), adapter("all")
    for is_runtime, is_loaded, is_module in CHANGES:
        folder = tmp_path / f"{is_runtime}{is_loaded}{is_module}" / "mine"
        shutil.copytree(first.folder, folder)
        config = LoRAConfig(
            lora_dir=str(folder.parent),
            lora_modules=(f"mine={folder}",) if is_module else (),
            allow_runtime_lora=is_runtime,
        )
        registry = AdapterRegistry(config)
        if is_loaded:
            registry.put(registry.find_at("mine", "mine"))
        before = registry.find("mine")
        assert registry.find("mine") == before
        replace(folder, second.folder)
        assert (registry.find("mine") == before) == (is_loaded or (is_runtime and is_module))
        shutil.rmtree(folder)
        assert registry.find("mine") is not None  # what was read is served on


def test_an_adapter_may_hold_the_tokenizer_of_its_base_only(adapter, checkpoint, tmp_path):
    one = adapter("attention")
    folder, base = tmp_path / "mine", checkpoint(one.base)
    shutil.copytree(one.folder, folder)
    content = json.loads((base / "tokenizer.json").read_text())
    content["padding"] = {"strategy": {"Fixed": 8}}  # changes no token
    (folder / "tokenizer.json").write_text(json.dumps(content, indent=1))
    llm = engine(base, {"mine": folder})
    assert tokens(generate(llm, [PROMPT], ["mine"])) == [one.greedy(PROMPT, COUNT)]
    llm.shutdown()
    content["added_tokens"].append({"id": 999, "content": "<new>"})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"its tokenizer\.json is not that of the base model"):
        engine(base, {"mine": folder})


def replace(folder: Path, other: Path) -> None:
    for file in other.iterdir():
        shutil.copy(file, folder)
        os.utime(folder / file.name)


def with_rank(folder: Path, rank: int) -> LoRARequest:
    other = folder.with_name(f"rank{rank}")
    shutil.copytree(folder, other)
    config = other / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 8', f'"r": {rank}'))
    return LoRARequest("high", 2, str(other))


def test_a_rank_that_dies_while_it_reads_is_noticed(adapter, checkpoint):
    one = adapter("attention")
    settings = {"enable_lora": True, "tensor_parallel_size": 2, "num_threads": 1}
    llm = LLM(str(checkpoint(one.base)), **CPU | settings)
    [pid] = engines.rank_pids(llm)
    rank = psutil.Process(pid)
    rank.suspend()
    killing = threading.Timer(0.5, rank.kill)
    killing.start()
    with pytest.raises(WorkersLostError, match="rank 1"):
        llm.generate(
            [{"prompt_token_ids": PROMPT}],
            PARAMS,
            lora_request=LoRARequest("mine", 1, str(one.folder)),
        )
    killing.join()
    llm.shutdown()


def test_adapters_must_be_enabled(adapter, checkpoint):
    one = adapter("attention")
    llm = LLM(str(checkpoint(one.base)), **CPU)
    with pytest.raises(InvalidRequestError, match="Set enable_lora=True"):
        generate(llm, [PROMPT], ["mine"])
    llm.shutdown()


async def test_loading_is_done_on_every_core_or_on_none(adapter, checkpoint, tmp_path, caplog):
    one, other = adapter("attention"), adapter("all")
    (tmp_path / "dir").mkdir()
    shutil.copytree(one.folder, tmp_path / "dir" / "good")
    shutil.copytree(one.folder, tmp_path / "outside")
    settings = {
        "lora_modules": [f"first={other.folder}"],
        "lora_dir": str(tmp_path / "dir"),
        "data_parallel_size": 2,
        "num_threads": 1,
        "kv_cache_memory": 0.05,
    }
    prompt = {"prompt_token_ids": PROMPT}
    async with AsyncLLM(str(checkpoint(one.base)), **CPU | settings) as llm:

        async def answer(name: str) -> list[int]:
            stream = await llm.submit(prompt, PARAMS, adapter=llm.adapters.find(name))
            return [token async for delta in stream for token in delta.token_ids]

        loaded = await llm.load_adapter("new", "good")
        assert llm.adapters.find("new") == loaded
        assert llm.adapters.names == ["first", "new", "good"]
        assert await answer("new") == await answer("good") == one.greedy(PROMPT, COUNT)
        assert await answer("first") == other.greedy(PROMPT, COUNT)
        prepared = await llm.prepare(prompt, PARAMS, adapter=loaded)
        replace(tmp_path / "dir" / "good", other.folder)
        loaded = await llm.load_adapter("new", "good")
        stream = llm.start_request(prepared.request)  # has the revision before
        given = [token async for delta in stream for token in delta.token_ids]
        assert given == one.greedy(PROMPT, COUNT)
        assert await answer("new") == other.greedy(PROMPT, COUNT)
        for path, says in (
            (tmp_path / "outside", "must be inside"),
            ("../outside", "must be inside"),
        ):
            with pytest.raises(InvalidRequestError, match=says):
                await llm.load_adapter("bad", str(path))
        with pytest.raises(ModelNotFoundError, match="there is no such folder"):
            await llm.load_adapter("bad", "absent")
        broken = tmp_path / "dir" / "broken"
        shutil.copytree(one.folder, broken)
        (broken / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
        with pytest.raises(InvalidRequestError, match="not a safetensors file"):
            await llm.load_adapter("new", "broken")
        assert llm.adapters.find("new") == loaded
        assert "broken" in llm.adapters.names
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="not a safetensors file"):
                await answer("broken")
        assert "broken" not in llm.adapters.names
        assert caplog.text.count("adapter 'broken'") == 1
        replace(broken, one.folder)
        assert await answer("broken") == one.greedy(PROMPT, COUNT)
        assert "broken" in llm.adapters.names
        streams = [
            await llm.submit(prompt, PARAMS, adapter=llm.adapters.find("new")) for _ in range(3)
        ]
        assert llm.unload_adapter("new") == loaded
        assert llm.adapters.find("new") is None
        assert llm.unload_adapter("new") is None
        for stream in streams:  # they keep the adapter that they began with
            given = [token async for delta in stream for token in delta.token_ids]
            assert given == other.greedy(PROMPT, COUNT)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_loras": 4, "max_cpu_loras": 2}, "less than --max-loras"),
        ({"lora_modules": ['{"name": "a"}']}, "no adapter in JSON.*missing required field `path`"),
        (
            {"lora_modules": ['{"name": "a", "path": "none"}']},
            "adapter 'a': There is no model none",
        ),
        ({"lora_modules": ["a=./none"]}, "there is no such folder"),
        ({"allow_runtime_lora": True}, "needs --lora-dir or --lora-modules"),
    ],
    ids=str,
)
def test_unusable_settings_are_refused(checkpoint, settings, says):
    with pytest.raises((ConfigError, CheckpointError, ModelNotFoundError), match=says):
        LLM(str(checkpoint("llama3-gqa")), **CPU | settings)
