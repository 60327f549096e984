"""Llama in plain PyTorch, over complete sequences and without a cache: what drafters are compared
with. `tests/models` compares our Llama with Transformers'."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def rotate(x: torch.Tensor, base: float) -> torch.Tensor:
    """Rotate `[positions, heads, size]` by the positions 0, 1, 2..."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(len(x)).float(), base ** (-torch.arange(half).float() / half))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention(
    x: torch.Tensor, tensors: Tensors, name: str, num_heads: int, base: float
) -> torch.Tensor:
    """Return the causal attention of a layer. Groups of query heads share keys and values."""
    q, k, v = (F.linear(x, tensors[f"{name}.self_attn.{part}_proj.weight"]) for part in "qkv")
    size = q.shape[1] // num_heads
    q, k, v = (one.view(len(x), -1, size) for one in (q, k, v))
    q, k = rotate(q, base), rotate(k, base)
    k, v = (one.repeat_interleave(num_heads // one.shape[1], 1) for one in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
    return F.linear(out, tensors[f"{name}.self_attn.o_proj.weight"])


def mlp(x: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
    gate, up = (F.linear(x, tensors[f"{name}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
    return F.linear(F.silu(gate) * up, tensors[f"{name}.mlp.down_proj.weight"])


class Target:
    """A model whose hidden states drafters read."""

    embedding: torch.Tensor

    def __init__(self) -> None:
        self._known: list[tuple[list[int], list[torch.Tensor]]] = []

    def states(self, tokens: list[int]) -> list[torch.Tensor]:
        """Return the hidden states `[tokens, hidden]` before each layer, and after the last norm.

        They are causal: a sequence that begins a longer one, asked for before, is not computed."""
        count = len(tokens)
        found = next((states for known, states in self._known if known[:count] == tokens), None)
        if found is None:
            found = self.compute(torch.tensor(tokens))
            self._known.append((list(tokens), found))
        return [one[:count] for one in found]

    def compute(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        raise NotImplementedError

    def head(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self.head(self.states(tokens)[-1])


class Llama(Target):
    """The model of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        config = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")
        self.num_layers, self.num_heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.base, self.epsilon = config["rope_parameters"]["rope_theta"], config["rms_norm_eps"]
        self.num_positions = config["max_position_embeddings"]
        self.embedding = self.tensors["model.embed_tokens.weight"]

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.tensors["lm_head.weight"])

    def compute(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        x = F.embedding(tokens, self.embedding)
        states = []
        for index in range(self.num_layers):
            states.append(x)
            name = f"model.layers.{index}"
            y = self._norm(x, f"{name}.input_layernorm")
            x = x + attention(y, self.tensors, name, self.num_heads, self.base)
            y = self._norm(x, f"{name}.post_attention_layernorm")
            x = x + mlp(y, self.tensors, name)
        return [*states, self._norm(x, "model.norm")]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return norm(x, self.tensors[f"{name}.weight"], self.epsilon)


def shrink_unlikely(folder: Path, likely: list[int]) -> Path:
    """Scale rows of a checkpoint's output head, so that few tokens are likely, and some drafts
    right."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = shrunk(tensors["lm_head.weight"], likely)
    save_file(tensors, file, {"format": "pt"})
    return folder


def shrunk(head: torch.Tensor, likely: list[int]) -> torch.Tensor:
    scale = torch.full((len(head), 1), 0.05)
    scale[likely] = 1.0
    return head * scale
