"""Layers of a model whose tokens are freed together."""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers that read the same tokens: all, those near the one that reads, or a feature's.

    A page of the pool has the keys and values of some blocks of tokens, in all layers of one group.
    Pages of all groups have as many bytes. A request has all pages of its feature from its
    admission to its end; requests with the same feature share them."""

    window: int = 0  # tokens that a token reads, with itself; 0: all
    chunk: int = 0  # a token reads those of its chunk of so many tokens; 0: all
    blocks_per_page: int = 1
    feature: int = 0
    """Tokens of a feature that the request's own tokens read, such as a clip; 0: they read
    themselves."""

    @property
    def kept(self) -> str:
        """The tokens that are kept, in words."""
        if self.feature:
            return f"the {self.feature:,} tokens of a clip"
        if self.frees:
            kind = f"chunks of {self.chunk:,}" if self.chunk else f"windows of {self.window:,}"
            return f"{kind} tokens"
        return "all tokens"

    def kept_by(self, num_layers: int) -> str:
        """Say which tokens a number of layers keeps."""
        return (
            f"1 layer keeps {self.kept}"
            if num_layers == 1
            else f"{num_layers} layers keep {self.kept}"
        )

    @property
    def frees(self) -> bool:
        """True if tokens are freed while their request runs."""
        return self.window > 0 or self.chunk > 0

    def first_key(self, position: int) -> int:
        """Return the first token that the token at a position reads."""
        if self.chunk:
            return position // self.chunk * self.chunk
        return max(0, position - self.window + 1) if self.window else 0

    def most_pages(self, block_size: int, length: int, step: int) -> int:
        """Return the most pages of a sequence if `step` tokens at most are new or not known."""
        tokens = block_size * self.blocks_per_page
        whole = -(-(self.feature or length) // tokens)
        if not self.frees:
            return whole
        # Neither the first nor the last kept token need be at a page's edge.
        kept = (self.chunk or self.window - 1) + step
        return min(whole, -(-kept // tokens) + 1)


ONE_GROUP = (CacheGroup(),)
MOST_TOKENS = 2**31 - 1  # of a sequence


def first_columns(groups: Sequence[CacheGroup], block_size: int, max_model_len: int) -> list[int]:
    """Return the first column of each group's pages in a block table, and the number of all."""
    columns = [0]
    for group in groups:
        tokens = block_size * group.blocks_per_page
        columns.append(columns[-1] - (-(group.feature or max_model_len) // tokens))
    return columns


def longest_sequence(
    groups: Sequence[CacheGroup], block_size: int, num_pages: int, step: int
) -> int:
    """Return the tokens of the longest sequence that fits into pages. `step`: see `most_step`."""
    return bisect_left(
        range(MOST_TOKENS),
        True,
        key=lambda length: most_pages(groups, block_size, length + 1, step) > num_pages,
    )


def most_pages(groups: Sequence[CacheGroup], block_size: int, length: int, step: int) -> int:
    """Return the most pages of a sequence in all groups. `step`: see `most_step`."""
    return sum(group.most_pages(block_size, length, step) for group in groups)


def most_step(budget: int, most_drafts: int = 0, num_stages: int = 1) -> int:
    """Return the most tokens of a sequence that are computed at once, or not known yet.

    budget: tokens of a step. Up to two steps are in flight, or one for each stage."""
    return max(budget, (2 + num_stages) * (1 + most_drafts))
