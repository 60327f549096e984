"""Cases of `join` that the tests of all its versions share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from toolkit.kernels.reference import Norm

EPS = 1e-5


class Join(NamedTuple):
    """Arguments of `join`, in words: norms are "rms", "layer" or "biased" (a layer norm).

    "wide": the norm's parameters are in fp32."""

    residual: bool = True
    norms: tuple[str, ...] = ("rms",)
    other: bool = False
    post: str = ""
    scale: float = 1.0
    factor: bool = False

    def __str__(self) -> str:
        words = {"residual": self.residual, "other": self.other, f"post {self.post}": self.post}
        words |= {"factor": self.factor}
        named = [word for word, is_on in words.items() if is_on]
        return " and ".join([*self.norms, *named, f"{self.scale:g}"])


JOINS = [
    Join(),
    Join(norms=("biased",)),
    Join(residual=False, norms=("rms wide",)),
    Join(residual=False, norms=("biased",)),
    Join(norms=("layer",), scale=0.3),
    Join(norms=("layer wide", "rms"), other=True),
    Join(norms=("biased", "biased wide")),
    Join(norms=("rms wide",), post="rms wide"),
    Join(norms=("rms", "rms"), post="biased", other=True, scale=-2.0),
    Join(norms=()),
    Join(norms=(), post="layer", scale=0.5),
    Join(post="rms", factor=True),
]


def make_norm(kind: str, size: int, dtype: torch.dtype, device: torch.device) -> Norm | None:
    if not kind:
        return None
    name, is_wide = kind.split()[0], kind.endswith("wide")
    weight, bias = (torch.randn(2, size) + 0.5).to(torch.float32 if is_wide else dtype).to(device)
    return Norm(weight, bias if name == "biased" else None, EPS, name != "rms")


def make_join(
    join: Join, num_tokens: int, size: int, dtype: torch.dtype, device: torch.device, mean: float
) -> tuple[tuple[Tensor, Tensor | None, list[Norm]], dict[str, Any]]:
    """Return the arguments of `join`. mean: of the rows."""
    torch.manual_seed(num_tokens * size)
    x, residual, other = (3 * torch.randn(3, num_tokens, size) + mean).to(dtype).to(device)
    norms = [norm for kind in join.norms if (norm := make_norm(kind, size, dtype, device))]
    options = {
        "other": other if join.other else None,
        "post": make_norm(join.post, size, dtype, device),
        "scale": join.scale,
        "factor": torch.full((1,), -0.75, dtype=dtype, device=device) if join.factor else None,
    }
    return (x, residual if join.residual else None, norms), options
