"""The residual stream of one model step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit.layers.linear import Linear
from toolkit.layers.norm import Join

if TYPE_CHECKING:
    from toolkit.weights.weight import Rows


class Stream:
    """The residual, and products that are not added to it yet: the next read adds them.

    So a read may fuse the last product, the sum, the norm of the sum, and the product that reads
    the norm."""

    def __init__(self, x: torch.Tensor, num_reads: int) -> None:
        """x: [num_tokens, hidden], may be changed. `num_reads`: at most so many reads follow."""
        self.residual = x
        self._num_reads = num_reads
        self._products: list[tuple[Linear | None, Rows]] = []
        self._square_sums: list[torch.Tensor] = []  # for fused norms, one per read

    def add(self, product: Linear | None, x: Rows) -> None:
        """Add product(x), or x if there is no product, by the next read."""
        self._products.append((product, x))

    def keep(self, tokens: torch.Tensor) -> None:
        """Keep only these tokens of the residual. Products have them already."""
        self.residual = self.residual[tokens]

    def read(self, join: Join, into: Linear | None = None) -> list[Rows]:
        """Add the products to the residual. Return its norms, or itself if `join` has none.

        `into`: the product that alone reads the only norm. It may be `Unscaled` or `Rounded`."""
        products, self._products = self._products, []
        rounds = self._rounds(join, into)
        if not products:
            norms, _ = join(self.residual, None, rounds=rounds)
        elif len(products) == 1 and self._fuses(join, *products[0], into):
            product, x = products[0]
            assert product is not None
            assert isinstance(x, torch.Tensor)
            sums = self._next_square_sums(x)
            return [product.add_norm(x, self.residual, join.arguments[0], sums)]
        else:
            first, *others = (_complete(product, x) for product, x in products)
            for other in others[1:]:
                first = first + other
            norms, self.residual = join(first, self.residual, *others[:1], rounds=rounds)
        return [*norms] or [self.residual]

    def _rounds(self, join: Join, into: Linear | None) -> bool:
        is_only = len(join.arguments) == 1
        return is_only and into is not None and into.weight.reads_rounded(len(self.residual))

    @staticmethod
    def _fuses(join: Join, product: Linear | None, x: Rows, into: Linear | None) -> bool:
        return (
            product is not None
            and into is not None
            and join.is_plain
            and not join.arguments[0].is_centered
            and product.can_fuse_norms(x)
            and into.can_fuse_norms(x)
        )

    def _next_square_sums(self, x: torch.Tensor) -> torch.Tensor:
        """Return fp64 zeros [len(x)]. They are zeroed once per model step."""
        if not self._square_sums:
            # Kernels are compiled for buffers aligned to 16 bytes: an even number of float64.
            shape = self._num_reads, len(x) + len(x) % 2
            zeros = torch.zeros(shape, dtype=torch.float64, device=x.device)
            self._square_sums = list(zeros.unbind())
        return self._square_sums.pop()[: len(x)]


def _complete(product: Linear | None, x: Rows) -> torch.Tensor:
    rows = x if product is None else product(x)
    assert isinstance(rows, torch.Tensor), "rows without a product are complete"
    return rows
