"""Plug-ins that tests name in flags. Imports no torch, which would slow front ends down."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

import msgspec
from starlette.middleware.base import RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from toolkit.sampling.logits_processors import LogitsProcessor, Row

if TYPE_CHECKING:
    import torch


class Window(msgspec.Struct):
    no_repeat: int

    def __post_init__(self) -> None:
        if self.no_repeat < 1:
            raise ValueError("no_repeat must be at least 1")


class NoRepeat(LogitsProcessor[Window]):
    """Excludes the last tokens of the output, which it reads on the device."""

    def apply(self, logits: torch.Tensor, rows: Sequence[Row[Window]]) -> torch.Tensor:
        out = logits.clone()
        for index, row in enumerate(rows):
            last = row.output_token_ids[-row.arguments.no_repeat :].long()
            out[index].index_fill_(0, last, -inf)
        return out


class Flag(msgspec.Struct):
    unseen: bool


class Unseen(LogitsProcessor[Flag]):
    """Excludes all tokens of the output, which it collects on the host."""

    def apply(self, logits: torch.Tensor, rows: Sequence[Row[Flag]]) -> torch.Tensor:
        for index, row in enumerate(rows):
            if row.state is None:
                row.state = row.output_token_ids.tolist()
            elif row.num_output_tokens > len(row.state):
                row.state += row.output_token_ids[-1:].tolist()
            assert len(row.state) == row.num_output_tokens
            logits[index, row.state] = -inf
        return logits


class Boost(msgspec.Struct):
    boost: list[int]
    by: float = 1000.0


class Booster(LogitsProcessor[Boost]):
    """Makes tokens likely."""

    def apply(self, logits: torch.Tensor, rows: Sequence[Row[Boost]]) -> torch.Tensor:
        for index, row in enumerate(rows):
            logits[index, row.arguments.boost] += row.arguments.by
        return logits


class Position(msgspec.Struct):
    fail_at: int
    how: str = "raises"


class Failing(LogitsProcessor[Position]):
    """Fails at a position of the output."""

    def apply(self, logits: torch.Tensor, rows: Sequence[Row[Position]]) -> torch.Tensor:
        for index, row in enumerate(rows):
            if row.num_output_tokens == row.arguments.fail_at:
                if row.arguments.how == "shape":
                    return logits[:, 1:]
                if row.arguments.how == "nothing left":
                    logits[index].fill_(-inf)
                    return logits
                raise KeyError("no such rule")
        return logits


async def teapot(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Refuse requests with a header, and mark the answers to others."""
    if "x-coffee" in request.headers:
        return PlainTextResponse("I'm a teapot", 418)
    response = await call_next(request)
    response.headers["x-teapot"] = request.app.state.server.models[0].name
    return response
