"""Sums over the GPUs of a group. The size of a sum decides which kernels compute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from toolkit.kernels.reference import Norm
from toolkit.kernels.triton import all_reduce as kernels
from toolkit.kernels.triton.all_reduce import Peers
from toolkit.kernels.triton.norm import join

Algorithm = Literal["pushed", "one-shot", "two-shot", "NCCL"]


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums by the algorithm that was fastest for their size. NCCL's are left to the caller.

    All ranks make the same calls, with tensors of the same sizes."""

    peers: Peers
    algorithms: tuple[tuple[int, Algorithm], ...] = ()
    """(most bytes of a sum, fastest algorithm), ascending. Larger sums use NCCL."""

    def algorithm(self, nbytes: int) -> Algorithm:
        return next((one for limit, one in self.algorithms if nbytes <= limit), "NCCL")

    def all_reduce(self, x: Tensor) -> Tensor | None:
        """Return the sum of all ranks' x, or None where NCCL is faster."""
        algorithm = self.algorithm(x.nbytes)
        two_shot = algorithm == "two-shot"
        if algorithm == "NCCL" or not kernels.fits(x, self.peers.size, two_shot):
            return None
        return kernels.all_reduce(x, self.peers, two_shot)

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, norm: Norm
    ) -> tuple[Tensor, Tensor] | None:
        """Return (norm(total), total) of all ranks' x plus residual, or None if not one kernel.

        x, residual: `[num_tokens, size]`. See `all_reduce.all_reduce_norm`."""
        algorithm = self.algorithm(x.nbytes)
        if algorithm == "pushed" and kernels.fits_push(x):
            return kernels.pushed_norm(x, residual, norm, self.peers)
        if algorithm in ("pushed", "one-shot") and kernels.fits_norm(x):
            return kernels.all_reduce_norm(x, residual, norm, self.peers)
        return None

    def candidates(
        self, nccl: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor, norm: Norm
    ) -> dict[Algorithm, Callable[[], object]]:
        """Return calls that compute the sum and the norm after it, to be timed.

        nccl: returns the sum of all ranks' x."""

        def then_norm(all_reduce: Callable[[Tensor], Tensor]) -> Callable[[], object]:
            return lambda: join(all_reduce(x), residual, [norm])

        rest = x, residual, norm, self.peers
        calls: dict[Algorithm, Callable[[], object]] = {"NCCL": then_norm(nccl)}
        if kernels.fits_push(x):
            calls["pushed"] = partial(kernels.pushed_norm, *rest)
        if kernels.fits_norm(x):
            calls["one-shot"] = partial(kernels.all_reduce_norm, *rest)
        if self.peers.size > 2 and kernels.fits(x, self.peers.size, two_shot=True):
            two_shot = partial(kernels.all_reduce, peers=self.peers, two_shot=True)
            calls["two-shot"] = then_norm(two_shot)
        return calls
