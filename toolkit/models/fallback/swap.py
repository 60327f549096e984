"""Replace products and norms of a Transformers model by ours, where they compute the same."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toolkit.distributed import current_group
from toolkit.errors import ConfigError
from toolkit.layers import Join, Linear, Norm
from toolkit.layers.linear import Split
from toolkit.weights.source import Source

STYLES: dict[str, Split] = {
    "colwise": "out",
    "rowwise": "in",
    # These are computed by each rank alone.
    "colwise_rep": None,
    "colwise_gather_output": None,
    "rowwise_split_input": None,
    "replicated_with_grad_allreduce": None,
}
"""Splits of our products by the styles of Transformers' plans for tensor parallelism. All else
(embeddings, experts) is complete on each rank."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")


class WeightReadError(Exception):
    """The model reads a linear layer's weight itself. Its text is the pattern of such layers."""


class FlatLinear(nn.Module):
    """A product of rows with any leading dimensions, summed over the ranks."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    @property
    def weight(self) -> torch.Tensor:
        raise WeightReadError(_pattern(self.linear.sources[0].name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(_rows(x))
        if not self.linear.columns.is_full and not y.is_meta:
            y = self.linear.group.all_reduce(y)
        return y.view(*x.shape[:-1], y.shape[1])


class FlatNorm(nn.Module):
    """A norm of rows with any leading dimensions."""

    def __init__(self, norm: Norm, size: int) -> None:
        super().__init__()
        self.norm, self.join = norm, Join(size, [norm])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,), _ = self.join(_rows(x), None)
        rows: torch.Tensor = y
        return rows.view(x.shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def swap_products(model: PreTrainedModel, kept: set[str]) -> None:
    """Replace linear layers, but those that match a pattern of `kept`.

    Patterns of layers that are not in the default dtype are added to it.

    Raises ConfigError if the model cannot be split over the ranks of the current group."""
    plan = _Plan(model)
    for name, module in list(model.named_modules()):
        if type(module) not in (nn.Linear, Conv1D) or _pattern(name) in kept:
            continue
        if module.weight.dtype != torch.get_default_dtype():
            kept.add(_pattern(name))
            continue
        is_transposed = type(module) is Conv1D
        rows, columns = module.weight.T.shape if is_transposed else module.weight.shape
        linear = Linear(
            columns,
            rows,
            Source(name, transpose=is_transposed),
            bias=module.bias is not None,
            split=plan.split(name),
        )
        model.set_submodule(name, FlatLinear(linear))


def _pattern(name: str) -> str:
    """Return a module's name with `*` in the place of numbers, as in Transformers' plans."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


class _Plan:
    """A model's plan for tensor parallelism."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._size = current_group().size
        self._styles: Mapping[str, str] = {}
        if self._size == 1:
            return
        self._styles = dict(model.tp_plan or {})
        if not self._styles:
            raise _tp_error(self._size, "Transformers has no plan for splitting this model")
        text = model.config.get_text_config()
        for field in ("num_attention_heads", "num_key_value_heads"):
            count = getattr(text, field, None)
            if isinstance(count, int) and count % self._size:
                raise _tp_error(self._size, f"{field} is {count}")

    def split(self, name: str) -> Split:
        style = self._styles.get(_pattern(name), "colwise_rep")
        if style not in STYLES:
            raise _tp_error(self._size, f"its plan there splits {name} by {style}")
        return STYLES[style]


def _tp_error(size: int, why: str) -> ConfigError:
    return ConfigError(
        f"--tensor-parallel-size {size}: the model runs through Transformers, and {why}.",
        param="tensor_parallel_size",
    )


def swap_norms(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Replace norms by ours, if both agree on random numbers."""
    known: dict[tuple[object, ...], float | None] = {}
    for name, module in list(model.named_modules()):
        found = _norm_sizes(module)
        if found is None:
            continue
        size, eps, is_centered, has_bias = found
        key = type(module), size, eps, has_bias
        if key not in known:
            known[key] = _find_offset(module, _candidates(name, *found), size, eps, dtype, device)
        offset = known[key]
        if offset is not None:
            norm = Norm(name, size, eps, is_centered=is_centered, has_bias=has_bias, offset=offset)
            model.set_submodule(name, FlatNorm(norm, size))


def _norm_sizes(module: nn.Module) -> tuple[int, float, bool, bool] | None:
    """Return (size, eps, is centered, has a bias) of what may be a norm of rows."""
    parameters = dict(module.named_parameters(recurse=False))
    is_layer_norm = type(module) is nn.LayerNorm
    if not parameters.keys() <= {"weight", "bias"} or "weight" not in parameters:
        return None
    if next(module.children(), None) is not None or parameters["weight"].dim() != 1:
        return None
    if not is_layer_norm and "Norm" not in type(module).__name__:
        return None
    eps = next((v for n in _EPS if isinstance(v := getattr(module, n, None), float)), None)
    if eps is None or len(inspect.signature(module.forward).parameters) != 1:
        return None
    return len(parameters["weight"]), eps, is_layer_norm, "bias" in parameters


def _candidates(
    name: str, size: int, eps: float, is_centered: bool, has_bias: bool
) -> Iterator[tuple[float, Norm]]:
    for offset in (0.0, 1.0):
        yield (
            offset,
            Norm(name, size, eps, is_centered=is_centered, has_bias=has_bias, offset=offset),
        )


def _find_offset(
    module: nn.Module,
    candidates: Iterator[tuple[float, Norm]],
    size: int,
    eps: float,
    dtype: torch.dtype,
    device: torch.device,
) -> float | None:
    """Return the offset with which our norm agrees with theirs, or None.

    Both get the same random parameters and rows."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    own = {
        name: nn.Parameter(draw(size), requires_grad=False)
        for name, _ in module.named_parameters(recurse=False)
    }
    before = dict(module._parameters)
    rows = draw(7, size)
    rows[:3] *= eps**0.5  # so that eps counts
    try:
        module._parameters.update(own)
        expected = module(rows[None])[0]
    except RuntimeError:
        return None  # it expects more than rows
    finally:
        module._parameters.update(before)
    for offset, norm in candidates:
        norm.weight.copy_(own["weight"].float() + offset)
        if norm.bias is not None:
            norm.bias.copy_(own["bias"])
        found = FlatNorm(norm, size)(rows[None])[0]
        if found.dtype == expected.dtype and torch.allclose(
            found.float(), expected.float(), rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype]
        ):
            return offset
    return None
