"""Layers of experts: each token is multiplied by the weights of the few experts chosen for it.

Few tokens are bound by reading the weights of the chosen experts. One token is multiplied in
registers, by all of its experts at once. A few are one tile: each program takes an expert, and the
tokens that chose it. For more, `routing.arrange` lists blocks of tokens of one expert on the
device; programs past the last block return. Results do not depend on the order of programs: each
product of a token and an expert is stored, and a token's are summed in the order of its choices.

FP8 weights are converted in registers and x stays in 16 bits, unless blocks are large: then x is
quantized too, as in `products.fp8_product`. MXFP4 and integers are always converted.

A pair is a token and one of its experts: `token * num_chosen + choice`. Rows of the gated product
and of the one after it are in the order of pairs."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from toolkit.kernels import mxfp4
from toolkit.kernels.reference import FP8_BLOCK, Stack

from .activation import GATES, check_kind
from .expert_kernels import down_kernel, sum_kernel, up_kernel
from .expert_vectors import vector_down_kernel, vector_up_kernel
from .fp8 import FP8, quantize
from .fp8_matmul import quantize as quantize_blocks
from .fp8_matmul import split
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
    columns: int  # per step, unless the weight's format has its own steps
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
    """Rows of x. The scales of FP8 are fp32, one per row or per block of a row.

    In two parts (`split`) they are bf16, exactly."""

    values: Tensor
    scale: Tensor | None = None

    @property
    def parts(self) -> int:
        """FP8 numbers whose sum is a number of x; 0: x is in 16 bits."""
        return 0 if self.scale is None else self.values.dim() - 1

    @property
    def pointers(self) -> tuple[Tensor, Tensor]:
        return self.values, self.values if self.scale is None else self.scale


class Format(NamedTuple):
    """The form of a stored weight (`reference.Stack`)."""

    kind: str  # plain, rows (FP8), blocks (FP8), integers, mxfp4
    columns: int = 0  # of a step, if it is given
    words: int = 0  # of a row, in a step
    group: int = 0  # columns with one scale of integers

    @property
    def bits(self) -> int:
        """Bits of an integer; 0 for other formats."""
        return self.words * 16 // self.columns if self.kind == "integers" else 0


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
        tiles = tiles or best_tiles(len(x), ids.shape[1], (up, down), (x.shape[1], size))
        _run_tiles(x, chosen, up, down, gate, out, tiles)
    return out


def format_of(weight: Stack, columns: int) -> Format:
    """Return how a weight with so many columns is stored."""
    values, scale = weight.values, weight.scale
    if values.dtype == torch.int16:
        return Format("mxfp4", mxfp4.STEP, mxfp4.GROUP)
    if scale is not None and values.dtype == torch.uint16:
        steps, words = values.shape[1], values.shape[3]
        return Format("integers", columns // steps, words, columns // scale.shape[1])
    if scale is None:
        return Format("plain")
    return Format("rows") if scale.dim() == 2 else Format("blocks", FP8_BLOCK)


def uses_vector(up: Stack, down: Stack) -> bool:
    """Return True if one token is multiplied in registers: FP8 is read in aligned words."""
    if up.values.dtype != down.values.dtype:
        return False
    if up.scale is None or down.scale is None:
        return True
    is_fp8 = up.values.dtype == FP8 and up.scale.dim() == down.scale.dim() == 2
    return is_fp8 and all(one.values.shape[2] % 16 == 0 for one in (up, down))


def best_tiles(
    num_tokens: int, num_chosen: int, stacks: tuple[Stack, Stack], columns: tuple[int, int]
) -> Tiles:
    """Return tiles for a number of tokens, the same within each of ROW_CLASSES.

    stacks, columns: of up and of down. Blocks have room for twice the mean number of an expert's
    pairs, so that most experts have one block and their weights are read once; int4 for the mean
    number."""
    forms = [format_of(weight, count) for weight, count in zip(stacks, columns, strict=True)]
    # More sums that are scaled, in a second set of registers, have no room or are slower.
    largest = 64 if any(form.kind in ("integers", "blocks") for form in forms) else 128
    # Reading int4 twice takes less time than computing for pairs that do not exist.
    spare = 1 if forms[0].bits == 4 else 2
    tokens = _best_pairs(num_tokens, num_chosen, len(stacks[0].values), spare, largest)
    up, down = (
        _best_tile(form.kind, weight.values.itemsize, count, tokens)
        for form, weight, count in zip(forms, stacks, columns, strict=True)
    )
    return Tiles(up, down)


@cache
def _best_pairs(
    num_tokens: int, num_chosen: int, num_experts: int, spare: int, largest: int
) -> int:
    if num_tokens <= FEW_TOKENS:
        return 8 if num_tokens <= 8 else 16
    most = next((size for size in ROW_CLASSES if size >= num_tokens), 2 * ROW_CLASSES[-1])
    room = spare * most * num_chosen // num_experts
    return min(largest, max(16, 1 << max(0, room - 1).bit_length()))


@cache
def _best_tile(kind: str, itemsize: int, in_features: int, tokens: int) -> Tile:
    if kind == "mxfp4":
        return _best_mxfp4_tile(tokens)
    if kind in ("integers", "blocks"):
        return _best_scaled_tile(kind, in_features, tokens)
    if tokens <= FEW_PAIRS:
        return Tile(tokens, 64, 128, 4, 4)
    columns = 128 // itemsize
    if tokens == 64:
        return Tile(tokens, 128, columns, 4, 4)
    if in_features < LONG:  # two programs of a multiprocessor hide each other's begin and end
        return Tile(tokens, 128, columns, 3, 4 if itemsize == 1 else 8)
    return Tile(tokens, 256, columns, 4, 8)


def _best_mxfp4_tile(tokens: int) -> Tile:
    if tokens <= FEW_PAIRS:
        return Tile(tokens, 64, mxfp4.STEP, 4, 4)
    if tokens == 64:
        return Tile(tokens, 128, mxfp4.STEP, 3, 4)
    return Tile(tokens, 256, mxfp4.STEP, 4, 8)


def _best_scaled_tile(kind: str, in_features: int, tokens: int) -> Tile:
    """Return a tile for sums that are scaled within the loop."""
    if tokens <= FEW_PAIRS:
        return Tile(tokens, 64, FP8_BLOCK, 4, 4)
    if kind == "blocks":
        return Tile(tokens, 128, FP8_BLOCK, 4, 4)
    if in_features < LONG:
        return Tile(tokens, 64, FP8_BLOCK, 3, 4)
    return Tile(tokens, 128, FP8_BLOCK, 3, 8)


def _check(x: Tensor, chosen: Chosen, up: Stack, down: Stack) -> None:
    num_tokens, hidden = x.shape
    num_experts, rows = len(up.values), up.values.shape[-2]
    if not all(one.is_contiguous() for one in (x, *chosen)):
        raise ValueError("x, ids and weights must be contiguous")
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


def _check_stack(name: str, stack: Stack, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ValueError if a stack is not of this shape, or does not fit x of this type."""
    num_experts, rows, columns = shape
    values, scale, bias, offset = stack
    form = format_of(stack, columns)
    scale_type, scales = torch.float32, shape[:2]
    wanted = dtype if scale is None else FP8
    if form.kind == "mxfp4":
        steps = mxfp4.num_groups(columns) // mxfp4.GROUPS
        shape, wanted = (num_experts, steps, rows, mxfp4.GROUP), torch.int16
        scale_type, scales = torch.int32, (num_experts, steps, rows)
        if scale is None or dtype == torch.float16:
            raise ValueError("MXFP4 has scales, and needs bf16 or fp32 rows")
    elif scale is not None and form.kind == "integers":
        shape, wanted = (num_experts, columns // form.columns, rows, form.words), torch.uint16
        scale_type, scales = scale.dtype, (num_experts, columns // form.group, rows)
        if dtype == torch.float32:
            raise ValueError("integers need bf16 or fp16 rows")
        if offset is not None and offset.shape != scale.shape:
            raise ValueError(f"{name} has offsets {list(offset.shape)}, not {list(scale.shape)}")
    elif form.kind == "blocks":
        if rows % FP8_BLOCK:
            raise ValueError(f"{name} has {rows} rows, no multiple of a block of {FP8_BLOCK}")
        scales = num_experts, rows // FP8_BLOCK, -(-columns // FP8_BLOCK)
    if values.shape != shape or values.dtype != wanted:
        raise ValueError(
            f"{name} must be {wanted} {list(shape)}, not {values.dtype} {list(values.shape)}"
        )
    if scale is not None and (scale.dtype != scale_type or scale.shape != scales):
        raise ValueError(f"the scales of {name} must be {scale_type} {list(scales)}")
    if bias is not None and (bias.dtype != dtype or bias.shape != (num_experts, rows)):
        raise ValueError(f"the bias of {name} must be {dtype} {[num_experts, rows]}")
    tensors = [values, scale, offset]
    if form.kind == "integers":
        tensors = [one if one is None else one.transpose(0, 1) for one in tensors]
    if not all(one is None or one.is_contiguous() for one in (*tensors, bias)):
        raise ValueError(f"the tensors of {name} must be contiguous")


def _run_vector(x: Tensor, chosen: Chosen, up: Stack, down: Stack, gate: Gate, out: Tensor) -> None:
    """Compute `experts` of one token, whose down products are summed in registers."""
    num_chosen, hidden, size = chosen.ids.shape[1], x.shape[1], up.values.shape[-2] // 2
    is_scaled = up.scale is not None
    rows = 4 if is_scaled else 2
    choices = triton.next_power_of_2(num_chosen)
    inner = torch.empty((num_chosen, size), dtype=x.dtype, device=x.device)
    pdl = supported(x.device)
    of_up, of_down = (
        (values, scale, bias) for values, scale, _, bias in (_pointers(up), _pointers(down))
    )
    vector_up_kernel[(-(-size // rows), num_chosen)](
        x,
        *of_up,
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
        *of_down,
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
    blocks = None if is_few else arrange(ids, num_experts, tiles.up.tokens)
    inner = torch.empty((ids.numel(), size), dtype=x.dtype, device=x.device)
    parts = torch.empty((ids.numel(), hidden), dtype=x.dtype, device=x.device)
    pdl = supported(x.device)
    grid, place = _places(blocks, ids, num_experts, -(-2 * size // tiles.up.rows))
    rows = _rows(x, up, tiles)
    up_kernel[grid](
        *rows.pointers,
        *_pointers(up),
        *_strides(up, hidden),
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
    rows = _rows(inner, down, tiles)
    down_kernel[grid](
        *rows.pointers,
        *_pointers(down),
        *_strides(down, size),
        *place,
        chosen.weights,
        parts,
        hidden,
        size,
        **_constants(tiles.down, rows, down, size, num_chosen, is_few),
        **_fetched(tiles.down, down, pdl),
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


def _rows(x: Tensor, weight: Stack, tiles: Tiles) -> Rows:
    """Return rows of x as the weight's kernel takes them."""
    if weight.values.dtype != FP8 or weight.scale is None:
        return Rows(x)
    if not tiles.quantizes_x:  # the tensor cores take FP8 from shared memory, and convert nothing
        return Rows(*split(x)) if x.dtype == torch.bfloat16 else Rows(x)
    return Rows(*(quantize(x) if weight.scale.dim() == 2 else quantize_blocks(x)))


def _pointers(stack: Stack) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return values, scales, offsets and biases. Others take the place of those that lack."""
    values, scale, bias, offset = (stack.values if one is None else one for one in stack)
    return values, scale, offset, bias


def _strides(stack: Stack, columns: int) -> tuple[int, int]:
    """Return (rows from an expert to the next one, from a row's step to the next one)."""
    values, words = stack.values, format_of(stack, columns).words
    if not words:
        return values.shape[1], 0
    return values.stride(0) // words, values.stride(1) // words


def _fetched(tile: Tile, weight: Stack, pdl: bool) -> dict[str, int]:
    """Return the constexpr arguments for what a program reads early of each of its rows."""
    line = 128 // weight.values.itemsize  # elements of 128 bytes
    lines = 4 if weight.values.dim() == 4 else max(1, 2 * tile.columns // line)
    return {"FETCHED": lines if pdl else 0, "LINE": line}


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
) -> dict[str, int | bool | str]:
    """Return the constexpr arguments that the kernels of both products have."""
    values, form = weight.values, format_of(weight, in_features)
    columns = form.columns or tile.columns
    numbers = form.words or columns
    step = columns * tile.tokens * x.values.itemsize + numbers * tile.rows * values.itemsize
    return {
        "CHOSEN": num_chosen,
        "CHOICES": triton.next_power_of_2(num_chosen),
        "FEW": is_few,
        "TOKENS": tile.tokens,
        "ROWS": tile.rows,
        "COLUMNS": columns,
        "STAGES": max(1, min(tile.stages, shared_memory(values.device) // step)),
        "EVEN": in_features % columns == 0,
        "FORMAT": form.kind,
        "WORDS": form.words,
        "GROUP": form.group,
        "SHIFTED": weight.offset is not None,
        "PARTS": x.parts,
        "BIASED": weight.bias is not None,
    }
