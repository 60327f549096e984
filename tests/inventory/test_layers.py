"""`tk show --layers`."""

from __future__ import annotations

import json

import pytest

from tests.models.architectures import ARCHITECTURES
from toolkit.inventory.checkpoint import read_folder
from toolkit.inventory.layers import lines_of
from toolkit.models.describe import Decoder

LLAMA = """\
x = model.embed_tokens[token]  # 262 tokens of 32 numbers
layers 0 to 1 (model.layers.N):
    x += attention(rms_norm(x, input_layernorm))
        attention: num_heads 4, num_kv_heads 2, head_size 8, scale 0.3536, rotation (rope_theta \
500000.0, rope_type default)
            self_attn.q_proj [32, 32]
            self_attn.k_proj [16, 32]
            self_attn.v_proj [16, 32]
            self_attn.o_proj [32, 32]
        keeps 2 x 8 and 2 x 8 numbers for each token
    x += mlp(rms_norm(x, post_attention_layernorm))
"""


def test_a_layer_of_llama_is_printed_line_by_line(checkpoint, tk_here):
    shown = tk_here("show", str(checkpoint("llama3-gqa")), "--layers").stdout
    assert shown.startswith(LLAMA)
    assert shown.endswith("logits = lm_head(rms_norm(x, model.norm))\n")
    both = json.loads(tk_here("show", str(checkpoint("llama3-gqa")), "--layers", "--json").stdout)
    assert both["layers"] == shown.splitlines()
    assert both["name"]


def test_layers_say_which_tokens_they_keep_and_whether_they_rotate(checkpoint):
    def lines(name: str, word: str) -> list[str]:
        found = lines_of(read_folder(checkpoint(name), name))
        return [line.strip() for line in found if line.strip().startswith(word)]

    kept = "keeps 2 x 32 and 2 x 32 numbers for each"
    first, _, unrotated = lines("llama4", "keeps")
    assert (first, unrotated) == (f"{kept} token of the newest chunk of 24", f"{kept} token")
    assert lines("gpt-oss", "keeps")[0] == f"{kept} of the newest 9 tokens"
    rotating, _, scaled = lines("llama4", "attention:")
    assert "rotation (" in rotating
    assert scaled.endswith("scale 0.1768, queries scaled by position")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_product_of_every_architecture_is_printed(checkpoint, name):
    found = read_folder(checkpoint(name), name)
    described, lines = found.description, lines_of(found)
    assert isinstance(described, Decoder)
    printed = {line.split()[0] for line in lines}
    expected, experts = set(), []
    for parameter in described.parameters():
        prefix = f"{described.layers_name}.{parameter.layer}."
        if parameter.kind in ("linear", "expert") and parameter.name.startswith(prefix):
            short = parameter.name.removeprefix(prefix).removesuffix(".weight")
            if parameter.kind == "linear":
                expected.add(short)
            else:
                experts.append(short)
    expected.update(experts[:1])  # the others may be counted only
    assert len(expected) > 1
    assert expected <= printed


def test_shared_memory_and_inputs_of_layers_are_printed(checkpoint):
    lines = lines_of(read_folder(checkpoint("gemma4"), "gemma4"))
    (last,) = (index for index, line in enumerate(lines) if line.startswith("layer 5 "))
    assert lines[2].startswith("inputs of layers = 0.7071")
    assert "        reads the memory of layer 2" in lines[last:]
    assert not any("keeps" in line for line in lines[last:])
    assert "    x *= layer_scalar" in lines[last:]


def test_a_model_without_a_description_has_one_line(tmp_path, tk_here):
    config = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "an encoder; tk has no description" in tk_here("show", str(tmp_path), "--layers").stdout
