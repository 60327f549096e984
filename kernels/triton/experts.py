"""Layers of experts: each token is multiplied by the weights of the few experts chosen for it.

Few tokens are bound by reading the weights of the chosen experts. One token is multiplied in
registers, by all of its experts at once. A few are one tile: each program takes an expert, and the
tokens that chose it. For more, `routing.arrange` lists blocks of tokens of one expert on the
device; programs past the last block return. Results do not depend on the order of programs: each
product of a token and an expert is stored, and a token's are summed in the order of its choices.

FP8 weights are converted in registers and x stays in 16 bits, unless blocks are large: then x is
quantized too, as in `products.fp8_product`. MXFP4 is always converted.

A pair is a token and one of its experts: `token * num_chosen + choice`. Rows of the gated product
and of the one after it are in the order of pairs."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from toolkit.kernels import mxfp4
from toolkit.kernels.reference import Stack

from .activation import GATES, check_kind
from .expert_kernels import down_kernel, sum_kernel, up_kernel, vector_down_kernel, vector_up_kernel
from .fp8 import FP8, quantize
from .matmul import shared_memory
from .pdl import supported
from .routing import Blocks, arrange

FEW_TOKENS = 16  # tokens up to which they are one tile, without blocks
FEW_PAIRS = 32  # pairs of a block up to which it is bound by reading the weights
ROW_CLASSES = (1, 8, FEW_TOKENS, 64, 256, 512, 1024, 2048, 4096)
"""The most tokens for which each kernel is chosen. Warm-up has steps of as many."""
LONG = 2048  # columns from which begin and end of a large tile take a small part of the time
VECTOR = 2048  # elements of a row that a program of one token multiplies at a time
CHUNK = 1024  # columns of a program that sums


class Tile(NamedTuple):
    """The shape of one program's product."""

    tokens: int  # most pairs
    rows: int  # of the weight; gate's and up's together
    columns: int  # per step
    stages: int  # steps in flight, if shared memory allows
    warps: int


class Tiles(NamedTuple):
    """Tiles of the two products, of as many tokens."""

    up: Tile
    down: Tile

    @property
    def quantizes_x(self) -> bool:
        """True if x is quantized, where the weights are FP8."""
        return self.up.tokens > FEW_PAIRS

    def hold(self, num_tokens: int) -> bool:
        """Return True if all tokens are in one tile, without blocks."""
        return num_tokens <= min(self.up.tokens, FEW_TOKENS)


class Rows(NamedTuple):
    """Rows of x. The scale of FP8 is fp32, one per row."""

    values: Tensor
    scale: Tensor | None = None

    @property
    def pointers(self) -> tuple[Tensor, Tensor]:
        return self.values, self.values if self.scale is None else self.scale


class Gate(NamedTuple):
    """The function of gate and up, and where their rows are."""

    kind: str
    is_interleaved: bool  # rows of gate and up are in turn


class Chosen(NamedTuple):
    """The experts of each token."""

    ids: Tensor  # int32 [num_tokens, num_chosen]; -1: none
    weights: Tensor  # fp32, like ids


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Stack,
    down: Stack,
    activation: str,
    interleaved: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return the weighted sum of what each token's experts compute: down(act(gate x) * up x).

    x: `[num_tokens, hidden]`; ids: int32 `[num_tokens, num_chosen]`, each token's experts, which
    differ, or -1 for none; weights: fp32, like ids; up: `2 * size` rows of `hidden`, gate's, then
    up's, or in turn if `interleaved`; down: `hidden` rows of `size`. All contiguous. Sums are in
    fp32. A token without experts gets 0. Returns `[num_tokens, hidden]`.

    Raises ValueError for other shapes and types, and an unknown activation."""
    chosen, gate = Chosen(ids, weights), Gate(activation, interleaved)
    size = up.values.shape[-2] // 2
    _check(x, chosen, up, down)
    if activation not in GATES:
        check_kind(activation)
    out = torch.empty_like(x)
    if len(x) == 1 and tiles is None and uses_vector(up, down):
        _run_vector(x, chosen, up, down, gate, out)
    elif len(x):
        tiles = tiles or best_tiles(len(x), ids.shape[1], up, (x.shape[1], size))
        _run_tiles(x, chosen, up, down, gate, out, tiles)
    return out


def is_mxfp4(weight: Stack) -> bool:
    return weight.values.dtype == torch.int16


def uses_vector(up: Stack, down: Stack) -> bool:
    """Return True if one token is multiplied in registers: FP8 is read in aligned words."""
    if is_mxfp4(up):
        return False
    return up.scale is None or all(one.values.shape[2] % 16 == 0 for one in (up, down))


def best_tiles(num_tokens: int, num_chosen: int, up: Stack, columns: tuple[int, int]) -> Tiles:
    """Return tiles for a number of tokens, the same within each of ROW_CLASSES.

    columns: of up and of down. Blocks have room for twice the mean number of an expert's pairs, so
    that most experts have one block and their weights are read once."""
    if num_tokens <= FEW_TOKENS:
        tokens = 8 if num_tokens <= 8 else 16
    else:
        most = next((size for size in ROW_CLASSES if size >= num_tokens), 2 * ROW_CLASSES[-1])
        tokens = min(128, max(16, triton.next_power_of_2(2 * most * num_chosen // len(up.values))))
    choose = _best_mxfp4_tile if is_mxfp4(up) else partial(_best_tile, up.values.itemsize)
    return Tiles(*(choose(tokens, count) for count in columns))


def _best_tile(itemsize: int, tokens: int, in_features: int) -> Tile:
    if tokens <= FEW_PAIRS:
        return Tile(tokens, 64, 128, 4, 4)
    columns = 128 // itemsize
    if tokens == 64:
        return Tile(tokens, 128, columns, 4, 4)
    if in_features < LONG:  # two programs of a multiprocessor hide each other's begin and end
        return Tile(tokens, 128, columns, 3, 8)
    return Tile(tokens, 256, columns, 4, 8)


def _best_mxfp4_tile(tokens: int, in_features: int) -> Tile:
    if tokens <= FEW_PAIRS:
        return Tile(tokens, 64, mxfp4.STEP, 4, 4)
    if tokens == 64:
        return Tile(tokens, 128, mxfp4.STEP, 3, 4)
    return Tile(tokens, 256, mxfp4.STEP, 4, 8)


def _check(x: Tensor, chosen: Chosen, up: Stack, down: Stack) -> None:
    num_tokens, hidden = x.shape
    num_experts, rows = len(up.values), up.values.shape[-2]
    tensors = (x, *chosen, *up, *down)
    if not all(one.is_contiguous() for one in tensors if one is not None):
        raise ValueError("x, ids, weights, and the tensors of up and down must be contiguous")
    shapes = (num_experts, rows, hidden), (num_experts, hidden, rows // 2)
    for name, stack, shape in (("up", up, shapes[0]), ("down", down, shapes[1])):
        _check_stack(name, stack, x.dtype, shape)
    ids, weights = chosen
    if ids.dtype != torch.int32 or weights.dtype != torch.float32 or ids.shape != weights.shape:
        raise ValueError(
            f"ids and weights must be int32 and fp32 of one shape, "
            f"not {ids.dtype} {list(ids.shape)} and {weights.dtype} {list(weights.shape)}"
        )
    if len(ids) != num_tokens:
        raise ValueError(f"ids of {len(ids)} tokens are not those of {num_tokens} rows")
    if up.values.dtype != down.values.dtype:
        raise ValueError(f"up is {up.values.dtype}, and down {down.values.dtype}")


def _check_stack(name: str, stack: Stack, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ValueError if a stack is not of this shape, or does not fit x of this type."""
    num_experts, rows, columns = shape
    values, scale, bias = stack
    scale_type, scales = torch.float32, shape[:2]
    wanted = dtype if scale is None else FP8
    if is_mxfp4(stack):
        steps = mxfp4.num_groups(columns) // mxfp4.GROUPS
        shape, wanted = (num_experts, steps, rows, mxfp4.GROUP), torch.int16
        scale_type, scales = torch.int32, (num_experts, steps, rows)
        if scale is None or dtype == torch.float16:
            raise ValueError("MXFP4 has scales, and needs bf16 or fp32 rows")
    if values.shape != shape or values.dtype != wanted:
        raise ValueError(
            f"{name} must be {wanted} {list(shape)}, not {values.dtype} {list(values.shape)}"
        )
    if scale is not None and (scale.dtype != scale_type or scale.shape != scales):
        raise ValueError(f"the scales of {name} must be {scale_type} {list(scales)}")
    if bias is not None and (bias.dtype != dtype or bias.shape != (num_experts, rows)):
        raise ValueError(f"the bias of {name} must be {dtype} {[num_experts, rows]}")


def _run_vector(x: Tensor, chosen: Chosen, up: Stack, down: Stack, gate: Gate, out: Tensor) -> None:
    """Compute `experts` of one token, whose down products are summed in registers."""
    num_chosen, hidden, size = chosen.ids.shape[1], x.shape[1], up.values.shape[-2] // 2
    is_scaled = up.scale is not None
    rows = 4 if is_scaled else 2
    choices = triton.next_power_of_2(num_chosen)
    inner = torch.empty((num_chosen, size), dtype=x.dtype, device=x.device)
    pdl = supported(x.device)
    vector_up_kernel[(-(-size // rows), num_chosen)](
        x,
        *_pointers(up),
        chosen.ids,
        inner,
        size,
        hidden,
        ROWS=rows,
        COLUMNS=min(VECTOR, max(16, triton.next_power_of_2(hidden))),
        SCALED=is_scaled,
        BIASED=up.bias is not None,
        INTERLEAVED=gate.is_interleaved,
        KIND=gate.kind,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
    vector_down_kernel[(-(-hidden // rows),)](
        inner,
        *_pointers(down),
        *chosen,
        out,
        hidden,
        size,
        ROWS=rows,
        COLUMNS=min(VECTOR // choices, max(16, triton.next_power_of_2(size))),
        CHOSEN=num_chosen,
        CHOICES=choices,
        SCALED=is_scaled,
        BIASED=down.bias is not None,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )


def _run_tiles(
    x: Tensor,
    chosen: Chosen,
    up: Stack,
    down: Stack,
    gate: Gate,
    out: Tensor,
    tiles: Tiles,
) -> None:
    """Compute `experts` of several tokens."""
    ids = chosen.ids
    (num_tokens, num_chosen), num_experts = ids.shape, len(up.values)
    hidden, size = x.shape[1], up.values.shape[-2] // 2
    is_few = tiles.hold(num_tokens)
    is_quantized = up.values.dtype == FP8 and tiles.quantizes_x
    blocks = None if is_few else arrange(ids, num_experts, tiles.up.tokens)
    inner = torch.empty((ids.numel(), size), dtype=x.dtype, device=x.device)
    parts = torch.empty((ids.numel(), hidden), dtype=x.dtype, device=x.device)
    pdl = supported(x.device)
    grid, place = _places(blocks, ids, num_experts, -(-2 * size // tiles.up.rows))
    rows = Rows(*quantize(x)) if is_quantized else Rows(x)
    up_kernel[grid](
        *rows.pointers,
        *_pointers(up),
        *place,
        inner,
        size,
        hidden,
        **_constants(tiles.up, rows, up, hidden, num_chosen, is_few),
        INTERLEAVED=gate.is_interleaved,
        KIND=gate.kind,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=tiles.up.warps,
    )
    grid, place = _places(blocks, ids, num_experts, -(-hidden // tiles.down.rows))
    rows = Rows(*quantize(inner)) if is_quantized else Rows(inner)
    line = 128 // down.values.itemsize  # elements of 128 bytes
    down_kernel[grid](
        *rows.pointers,
        *_pointers(down),
        *place,
        chosen.weights,
        parts,
        hidden,
        size,
        **_constants(tiles.down, rows, down, size, num_chosen, is_few),
        FETCHED=max(2 * tiles.down.columns, line) if pdl else 0,
        LINE=line,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=tiles.down.warps,
    )
    sum_kernel[(num_tokens, -(-hidden // CHUNK))](
        parts,
        ids,
        out,
        hidden,
        CHOSEN=num_chosen,
        CHOICES=triton.next_power_of_2(num_chosen),
        CHUNK=CHUNK,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )


def _pointers(stack: Stack) -> tuple[Tensor, Tensor, Tensor]:
    values, scale, bias = stack
    return values, values if scale is None else scale, values if bias is None else bias


def _places(
    blocks: Blocks | None, ids: Tensor, num_experts: int, num_tiles: int
) -> tuple[tuple[int], tuple[Tensor | int, ...]]:
    """Return (grid, arguments of `_place`) of a product. Without blocks, experts are all or pairs.

    Then the programs of an expert are those of its first pair, if there are fewer pairs."""
    if blocks is not None:
        found = ids, blocks.table, blocks.pairs, len(ids), num_tiles, 0
        return (len(blocks.table) * num_tiles,), found
    found = ids, ids, ids, len(ids), num_tiles, int(num_experts < ids.numel())
    return (min(num_experts, ids.numel()) * num_tiles,), found


def _constants(
    tile: Tile, x: Rows, weight: Stack, in_features: int, num_chosen: int, is_few: bool
) -> dict[str, int | bool]:
    """Return the constexpr arguments that the kernels of both products have."""
    values = weight.values
    units = tile.columns // (4 if is_mxfp4(weight) else 1)
    step = tile.columns * tile.tokens * x.values.itemsize + units * tile.rows * values.itemsize
    return {
        "CHOSEN": num_chosen,
        "CHOICES": triton.next_power_of_2(num_chosen),
        "FEW": is_few,
        "TOKENS": tile.tokens,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "STAGES": max(1, min(tile.stages, shared_memory(values.device) // step)),
        "EVEN": in_features % tile.columns == 0,
        "SCALED": values.dtype == FP8,
        "QUANTIZED": x.scale is not None,
        "MXFP4": is_mxfp4(weight),
        "BIASED": weight.bias is not None,
    }
