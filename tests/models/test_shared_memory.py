"""Gemma 4: layers that read the memory of earlier ones, and its folders with towers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import checkpoints, engines
from toolkit import LLM, SamplingParams
from toolkit.errors import InvalidRequestError
from toolkit.models.decoder import Taps

NAME = "gemma4"
LAST_WITH_MEMORY = 2
PROMPT = [(7 * i * i + 3) % 250 for i in range(40)]
CPU = {"device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(checkpoint) -> Path:
    return checkpoint(NAME)


def greedy(llm: LLM, **options: object) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, **options)
    (result,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    return list(result.outputs[0].token_ids)


def test_prompts_skip_layers_without_memory(folder, monkeypatch):
    """Unless log-probabilities of the prompt are wanted."""
    llm = LLM(str(folder), enable_prefix_caching=False, **CPU)
    model, lengths = engines.model(llm), []
    for step in (step for layer in model.layers for step in layer):

        def counted(stream, *args, own=step.forward):
            lengths[-1].append(len(stream.residual))
            own(stream, *args)

        monkeypatch.setattr(step, "forward", counted)
    embed = model._embed
    monkeypatch.setattr(model, "_embed", lambda *args: lengths.append([]) or embed(*args))
    expected = checkpoints.make_reference(NAME).greedy(PROMPT, 4)
    before = 3 * LAST_WITH_MEMORY + 1  # each layer has three steps
    assert greedy(llm) == expected
    assert lengths[0] == [len(PROMPT)] * before + [1] * (3 * 6 - before)
    lengths.clear()
    assert greedy(llm, prompt_logprobs=0) == expected
    assert lengths[0] == [len(PROMPT)] * 3 * 6


@pytest.mark.parametrize("layer", [LAST_WITH_MEMORY, LAST_WITH_MEMORY + 1, 5])
def test_drafters_read_all_tokens_of_any_layer(folder, layer):
    llm = LLM(str(folder), **CPU)
    taps = engines.model(llm).taps = Taps((layer,), output=False)
    assert greedy(llm)[:1] == checkpoints.make_reference(NAME).greedy(PROMPT, 1)
    assert len(taps._states[: len(PROMPT)].unique(dim=0)) == len(PROMPT)


def test_a_model_may_draft_for_itself(folder):
    """Its layers are two groups, and as a drafter one."""
    drafting = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
    llm = LLM(str(folder), speculative_config=drafting, **CPU)
    assert greedy(llm) == checkpoints.make_reference(NAME).greedy(PROMPT, 4)


def test_few_layers_have_those_that_share(folder):
    model = engines.model(LLM(str(folder), **CPU))
    layers = list(model.layers)
    with model.with_few_layers():
        assert [layers.index(one) for one in model._layers()] == [
            0,
            1,
            2,
            3,
            5,
        ]  # the first adds nothing before it


def test_experts_may_have_tensors_of_their_own(checkpoint, tmp_path):
    """Quantized checkpoints have such experts."""
    original = checkpoint("gemma4-moe")
    for file in original.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = {}
    for name, tensor in load_file(original / "model.safetensors").items():
        prefix, _, part = name.rpartition(".experts.")
        parts = {"down_proj": ["down_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}.get(part)
        if parts is None:
            tensors[name] = tensor
            continue
        for index, expert in enumerate(tensor):
            for own, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                tensors[f"{prefix}.experts.{index}.{own}.weight"] = rows.contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    whole, own = (greedy(LLM(str(folder), **CPU)) for folder in (original, tmp_path))
    assert whole == own


def test_published_folder_is_read_without_towers(folder, tmp_path):
    """Layers that share memory have keys and values there, which Transformers does not read."""
    config = json.loads((folder / "config.json").read_text())
    whole = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": config,
        "vision_config": {"model_type": "gemma4_vision"},
        "audio_config": {"model_type": "gemma4_audio"},
        "image_token_id": 260,
        "vision_soft_tokens_per_image": 280,
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_text((folder / name).read_text())
    tensors = {
        f"model.language_model.{name.removeprefix('model.')}": tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    unread = [
        "language_model.layers.4.self_attn." + part for part in ("k_proj", "v_proj", "k_norm")
    ]
    unread += ["vision_tower.patch_embedder.input_proj", "embed_vision.embedding_projection"]
    unread += ["audio_tower.output_proj", "embed_audio.embedding_projection"]
    tensors |= {f"model.{name}.weight": torch.ones(3) for name in unread}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    llm = LLM(str(tmp_path), **CPU)
    assert greedy(llm) == checkpoints.make_reference(NAME).greedy(PROMPT, 4)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(InvalidRequestError, match="reads text alone"):
        llm.chat([{"role": "user", "content": [picture]}])
