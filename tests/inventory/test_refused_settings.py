"""`tk serve --dry-run` refuses settings as a start does, which refuses them first."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import edit_json
from tests.pooling.folders import bert, bert_tokenizer, save
from toolkit import LLM
from toolkit.cli.root import explain, tree
from toolkit.config import EngineConfig, ServerConfig
from toolkit.config.engine import MEMORY_VARIABLE
from toolkit.errors import ConfigError, OutOfMemoryError, ToolkitError
from toolkit.hardware.devices import find_device
from toolkit.inventory.card import show
from toolkit.inventory.dry_run import dry_run
from toolkit.serving.checks import check_server_settings
from toolkit.units import GIB

QUANTIZED = Path(__file__).parents[1] / "weights" / "quantized" / "gptq-4bit-g128"
ADAPTER = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}


def drafter_with(method: str, folder: str | None) -> dict[str, object]:
    model = {} if folder is None else {"model": folder}
    return {"speculative_config": {"method": method} | model}


def adapter(folder: str) -> dict[str, object]:
    return {"lora_modules": (f"one={folder}",)}


REFUSED: dict[str, tuple[Mapping[str, object], str]] = {
    "heads": ({"tensor_parallel_size": 3}, "4 attention heads .* Possible sizes: 1, 2, 4"),
    "stages": ({"pipeline_parallel_size": 3}, "the model has 2 layers"),
    "fp8": ({"quantization": "fp8"}, "fp8 needs an NVIDIA GPU"),
    "quantized": ({"model": str(QUANTIZED), "quantization": "int8"}, "are already quantized"),
    "experts": ({"enable_expert_parallel": True}, "has no experts"),
    "split experts": (
        {"enable_expert_parallel": True, "tensor_parallel_size": 2},
        r"has no experts that tk splits\. Leave it out\.$",
    ),
    "unknown to Transformers": ({"model": "unknown"}, "has no model_type 'zzz'"),
    "adapters": (
        {"model_impl": "transformers", "enable_lora": True},
        "--model-impl transformers cannot be combined with LoRA adapters",
    ),
    "cache": ({"model": "encoder", "kv_cache_dtype": "fp8"}, "is an encoder and has none"),
    "scorer": ({"model": "scorer", "pooling": "cls"}, "This one scores or classifies texts"),
    "flash": ({"attention_backend": "flash"}, "flash cannot run here: .* needs an NVIDIA GPU"),
    "other tokens": (drafter_with("draft_model", "other"), "has other tokens than"),
    "no drafter": (drafter_with("eagle", "./no"), "drafter of --speculative-config: There is no"),
    "no EAGLE": (drafter_with("eagle", "other"), "its layout is not that of EAGLE"),
    "no MTP": (drafter_with("mtp", None), "LlamaForCausalLM has no layer that drafts"),
    "no adapter": (adapter("./no"), "there is no such folder"),
    "no folder": ({"lora_dir": "./no"}, "--lora-dir ./no: there is no such folder"),
    "a file": ({"lora_dir": "cut/adapter_config.json"}, "it is not a folder"),
    "DoRA": (adapter("dora"), "it is a DoRA adapter"),
    "cut adapter": (adapter("cut"), "adapter_model.safetensors is cut short"),
    "absent adapter": (adapter("nosuch"), "adapter 'one': There is no model nosuch: .* is set"),
    "absent tokenizer": ({"tokenizer": "nosuch"}, "There is no model nosuch: .* is set"),
    "no processor": ({"logits_processors": ("no.such:One",)}, "Cannot use the plug-in no.such:One"),
    "foreign adapter": (adapter("foreign"), "to a weight of another shape"),
}


def save_adapter(folder: Path, columns: int, **changes: object) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER | changes))
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {}
    for layer in (0, 1):
        tensors[name.format(layer, "A")] = torch.zeros(2, columns)
        tensors[name.format(layer, "B")] = torch.zeros(columns, 2)
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the model `model`, a drafter of other tokens, and adapters."""
    folder, model = tmp_path_factory.mktemp("refused"), checkpoint("llama3-gqa")
    (folder / "model").symlink_to(model)
    (folder / "other").mkdir()
    for file in model.iterdir():
        (folder / "other" / file.name).write_bytes(file.read_bytes())
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]
    vocabulary["vocab"] |= {"a": vocabulary["vocab"]["b"], "b": vocabulary["vocab"]["a"]}
    edit_json(folder / "other" / "tokenizer.json", model=vocabulary)
    size = json.loads((model / "config.json").read_text())["hidden_size"]
    save(bert(), bert_tokenizer(), folder / "encoder")
    scorer = bert("BertForSequenceClassification", num_labels=1)
    save(scorer, bert_tokenizer(), folder / "scorer")
    (folder / "unknown").mkdir()
    for file in model.iterdir():
        (folder / "unknown" / file.name).symlink_to(file)
    content = json.loads((model / "config.json").read_text()) | {"model_type": "zzz"}
    (folder / "unknown" / "config.json").unlink()
    (folder / "unknown" / "config.json").write_text(json.dumps(content))
    save_adapter(folder / "good", size)
    save_adapter(folder / "dora", size, use_dora=True)
    save_adapter(folder / "foreign", size + 1)
    save_adapter(folder / "cut", size)
    weights = folder / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:99])
    return folder


def settings(**more: object) -> EngineConfig:
    return EngineConfig.from_settings({"model": "model", "device": "cpu"} | more)


def error_of(call: Callable[[], object]) -> tuple[type[ToolkitError], str]:
    with pytest.raises(ToolkitError) as raised:
        call()
    return raised.type, raised.value.message


@pytest.mark.parametrize("case", REFUSED)
def test_dry_run_refuses_what_a_start_refuses(
    folder: Path, case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    given, message = REFUSED[case]
    config = settings(**given)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ToolkitError, match=message):
        dry_run(config, as_json=False)
    assert not capsys.readouterr().out
    assert error_of(lambda: dry_run(config, as_json=False)) == error_of(lambda: LLM(config=config))


def test_show_knows_models_that_transformers_cannot_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    for name, verdict in (("unknown", "no: "), ("model", "yes ")):
        show(str(folder / name), None, as_json=False)
        [line] = re.findall(r"runs here +(.*)", capsys.readouterr().out)
        assert line.startswith(verdict)
    show(str(folder / "unknown"), None, as_json=False)
    assert "has no model_type 'zzz'" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_cache_memory": 2.0**19}, r"a KV cache of .* lower --kv-cache-memory\."),
        ({"num_gpu_blocks_override": 10**9}, r"cache of .* lower --num-gpu-blocks-override\."),
        ({"swap_space": 2.0**19}, r"for \S+ GiB of swap space .* lower --swap-space\."),
        ({"max_num_seqs": 10**9}, r"for the tokens of requests .* lower --max-num-seqs\."),
        ({"kv_cache_memory": 0.00001}, r"room for 32 tokens"),
    ],
    ids=str,
)
def test_dry_run_finds_the_lack_of_memory_of_a_start(
    folder: Path,
    given: dict[str, object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(folder)
    with pytest.raises(OutOfMemoryError, match=message) as raised:
        LLM(config=settings(**given))
    assert explain(raised.value) == dry_run(settings(**given), as_json=False) == 1
    printed = re.sub(r"[\d.]+ GiB of cpu", "", capsys.readouterr().err).splitlines()
    assert printed[0] == f"tk: {printed[1]}"


def test_engines_share_the_memory_for_their_caches(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    free = find_device("cpu").free / GIB
    assert dry_run(settings(kv_cache_memory=0.6 * free), as_json=False) == 0
    pair = settings(kv_cache_memory=0.6 * free, data_parallel_size=2)
    assert dry_run(pair, as_json=False) == 1
    monkeypatch.setenv(MEMORY_VARIABLE, str(2**20))  # as for each of several engines
    with pytest.raises(OutOfMemoryError, match=r"a KV cache of 10\.\d MiB"):
        LLM(config=settings(kv_cache_memory=0.01))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lora-modules model=good", "the model is called 'model', too"),
        ("--served-model-name x --lora-modules x=good", "the model is called 'x', too"),
        (
            """--lora-modules {"name":"a","path":"good","base_model_name":"other"}""",
            "base_model_name is 'other', and the model is 'model'",
        ),
        ("--chat-template no.jinja", "'no.jinja' cannot be read: No such file or directory."),
        ("--api-key-file no", "--api-key-file no cannot be read: No such file or directory."),
        ("--middleware no.such:one", "Cannot use the plug-in no.such:one"),
        ("--tool-call-parser no", "--tool-call-parser must be one of"),
    ],
    ids=str,
)
def test_dry_run_refuses_what_a_server_refuses(
    folder: Path, flags: str, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder)
    arguments = ["serve", "model", "--device", "cpu", *flags.split()]

    def run(*more: str) -> None:
        tree().main([*arguments, *more], prog_name="tk", standalone_mode=False)

    found = error_of(lambda: run("--dry-run"))
    assert found == error_of(run)
    assert message in found[1]


def test_servers_do_not_start_open_with_the_key_of_vllm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with pytest.raises(ConfigError, match="Set TK_API_KEY instead"):
        check_server_settings(EngineConfig(), ServerConfig())
    for given in ({"api_key": ("k",)}, {"admin_key": "k"}):
        check_server_settings(EngineConfig(), ServerConfig(**given))


def test_dry_run_accepts_what_a_start_downloads(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    asked: list[str] = []
    monkeypatch.setattr("huggingface_hub.model_info", asked.append)
    given = {"lora_modules": ["one=some/adapter"], "allow_runtime_lora": True}
    assert dry_run(settings(**given, tokenizer="some/model:Q4_K_M"), as_json=False) == 0
    assert asked == ["some/model", "some/adapter"]


def test_dry_run_accepts_what_a_start_accepts(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    given = {"quantization": "int8", "dtype": "bfloat16", "tensor_parallel_size": 2}
    more = adapter("good") | {"attention_backend": "cpu", "kv_cache_dtype": "fp8"}
    runtime = {"lora_modules": ("one=org/adapter",), "allow_runtime_lora": True}
    monkeypatch.setattr("toolkit.hub.require_on_hub", lambda name: None)
    long_steps = {"max_num_batched_tokens": 10**8}
    drafters = (drafter_with("draft_model", "model"), drafter_with("ngram", None))
    for one in (given, more, runtime, long_steps, *drafters):
        assert dry_run(settings(**one), as_json=False) == 0


@pytest.mark.parametrize("case", ["fp8", "flash", "no adapter", "no folder"])
def test_a_start_refuses_settings_before_it_reads_weights(
    folder: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / "model" / name).read_bytes())
    given, message = REFUSED[case]
    monkeypatch.chdir(folder)
    with pytest.raises(ToolkitError, match=message):
        LLM(config=settings(**given, model=str(tmp_path)))
