"""Layers of experts: each token is multiplied by the weights of the few experts chosen for it.

Few tokens are bound by reading the weights of the chosen experts. One token is multiplied in
registers, by all of its experts at once. A few are one tile: each program takes an expert, and the
tokens that chose it. For more, `routing.arrange` lists blocks of tokens of one expert on the
device; programs past the last block return. Results do not depend on the order of programs: each
product of a token and an expert is stored, and a token's are summed in the order of its choices.

FP8 weights are multiplied as they are. Of few tokens x is split into two FP8 numbers, which are
bf16 exactly, of more it is quantized, as in `products.fp8_product`. For fp16 they are converted in
registers, as MXFP4 and integers always are. Many tokens with MXFP4 have their own kernel on Hopper
(`experts_hopper`).

A pair is a token and one of its experts: `token * num_chosen + choice`. Rows of the gated product
and of the one after it are in the order of pairs."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from toolkit.kernels import mxfp4
from toolkit.kernels.gates import Gate
from toolkit.kernels.reference import FP8_BLOCK, Stack

from ..activation import check_kind
from ..hopper import is_hopper
from ..pdl import supported
from ..products.fp8 import FP8, quantize
from ..products.fp8_matmul import quantize as quantize_blocks
from ..products.fp8_matmul import split
from ..products.matmul import shared_memory
from .expert_kernels import down_kernel, sum_kernel, up_kernel
from .expert_vectors import vector_down_kernel, vector_up_kernel
from .routing import Blocks, arrange

FEW_TOKENS = 16  # tokens up to which they are one tile, without blocks
MOST_PAIRS = 128  # of a block
FEW_PAIRS = 32  # pairs of a block up to which it is bound by reading the weights
ROW_CLASSES = (1, 8, FEW_TOKENS, 64, 256, 512, 1024, 2048, 4096)
"""The most tokens for which each kernel is chosen. Warm-up has steps of as many."""
LONG = 2048  # columns from which begin and end of a large tile take a small part of the time
VECTOR = 2048  # elements of a row that a program of one token multiplies at a time
CHUNK = 1024  # columns of a program that sums

Constants = dict[str, Any]  # constexpr arguments of a kernel, and its warps


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


class Chosen(NamedTuple):
    """The experts of each token."""

    ids: Tensor  # int32 [num_tokens, num_chosen]; -1: none
    weights: Tensor  # fp32, like ids


class Operand(NamedTuple):
    """The weight of one of a layer's two products, and what all its launches share."""

    stack: Stack
    num_rows: int
    columns: int
    form: Format
    arguments: tuple[Tensor | int, ...]  # of kernels: pointers and strides

    @classmethod
    def of(cls, stack: Stack, columns: int) -> Operand:
        form, values = format_of(stack, columns), stack.values
        # Others take the place of those that lack.
        numbers, scale, bias, offset = (values if one is None else one for one in stack)
        # Rows from an expert to the next one, and from a row's step to the next one.
        strides = values.shape[1], 0
        if form.words:
            strides = values.stride(0) // form.words, values.stride(1) // form.words
        arguments = (numbers, scale, offset, bias, *strides)
        return cls(stack, values.shape[-2], columns, form, arguments)

    @property
    def is_fp8(self) -> bool:
        return self.form.kind in ("rows", "blocks")

    @property
    def of_vectors(self) -> tuple[Tensor | int, ...]:
        """Arguments of the kernels of one token: numbers, scales and biases."""
        numbers, scale, _, bias, *_ = self.arguments
        return numbers, scale, bias


class Layer:
    """Computes the weighted sum of a token's experts: down(act(gate x) * up x).

    up: `2 * size` rows of `hidden`, gate's, then up's, or in turn if `interleaved`; down: `hidden`
    rows of `size`; all contiguous. They are checked and described once, not at each call."""

    def __init__(self, up: Stack, down: Stack, activation: Gate, interleaved: bool = False) -> None:
        """Raises ValueError for an unknown activation."""
        self._gate: Constants = {"INTERLEAVED": interleaved, "KIND": "", "LIMIT": 0.0, "ALPHA": 0.0}
        if isinstance(activation, str):
            check_kind(activation)
            self._gate["KIND"] = activation
        else:
            self._gate |= {"LIMIT": activation.limit, "ALPHA": activation.alpha}
        self._up = Operand.of(up, down.values.shape[-2])
        self._down = Operand.of(down, up.values.shape[-2] // 2)
        self._types: set[torch.dtype] = set()  # of x, that the weights fit
        self._is_vector = uses_vector(self._up, self._down)
        self._weights_suit_hopper = all(
            one.form.kind == "mxfp4"
            and one.columns % 16 == 0
            and one.stack.values.data_ptr() % 16 == 0
            for one in (self._up, self._down)
        )
        # Constexpr arguments of both products, by what else they depend on.
        self._of_vectors: dict[int, tuple[Constants, Constants]] = {}
        self._of_tiles: dict[object, tuple[Constants, Constants]] = {}

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, tiles: Tiles | None = None
    ) -> Tensor:
        """Return the sums in fp32, rounded to the type of x: `[num_tokens, hidden]`.

        x: `[num_tokens, hidden]`; ids: int32 `[num_tokens, num_chosen]`, each token's experts,
        which differ, or -1 for none; weights: fp32, like ids. All contiguous. A token without
        experts gets 0. Raises ValueError for other shapes and types, of the weights too."""
        chosen = Chosen(ids, weights)
        if x.dtype not in self._types:
            _check_weights(self._up, self._down, x.dtype)
            self._types.add(x.dtype)
        _check_rows(x, chosen, self._down.num_rows)
        out = torch.empty_like(x)
        if len(x) == 1 and tiles is None and self._is_vector:
            self._run_vector(x, chosen, out)
        elif len(x):
            best = tiles or best_tiles(len(x), ids.shape[1], self._up, self._down)
            on_hopper = tiles is None and self._suits_hopper(x, ids.shape[1], best)
            self._run_tiles(x, chosen, out, best, on_hopper)
        return out

    def _suits_hopper(self, x: Tensor, num_chosen: int, tiles: Tiles) -> bool:
        """Return True if `experts_hopper` supports the call: full blocks of experts in MXFP4.

        It copies 16 bytes at a time, of x from places that fit 32 bits."""
        return (
            self._weights_suit_hopper
            and tiles.up.tokens == MOST_PAIRS
            and is_hopper(x.device)
            and x.dtype == torch.bfloat16
            and len(x) * num_chosen * max(self._up.columns, self._down.columns) < 1 << 31
            and x.data_ptr() % 16 == 0
        )

    def _run_vector(self, x: Tensor, chosen: Chosen, out: Tensor) -> None:
        """Compute one token, whose down products are summed in registers."""
        up, down, num_chosen = self._up, self._down, chosen.ids.shape[1]
        constants = self._of_vectors.get(num_chosen)
        if constants is None:
            choices = triton.next_power_of_2(num_chosen)
            more: Constants = {"CHOSEN": num_chosen, "CHOICES": choices}
            constants = _vector_constants(up, 1), _vector_constants(down, choices) | more
            self._of_vectors[num_chosen] = constants
        of_up, of_down = constants
        size, hidden = down.columns, up.columns
        inner = torch.empty((num_chosen, size), dtype=x.dtype, device=x.device)
        pdl = supported(x.device)
        vector_up_kernel[(-(-size // of_up["ROWS"]), num_chosen)](
            x,
            *up.of_vectors,
            chosen.ids,
            inner,
            size,
            hidden,
            **of_up,
            **self._gate,
            PDL=pdl,
            launch_pdl=pdl,
        )
        vector_down_kernel[(-(-hidden // of_down["ROWS"]),)](
            inner,
            *down.of_vectors,
            *chosen,
            out,
            hidden,
            size,
            **of_down,
            PDL=pdl,
            launch_pdl=pdl,
        )

    def _run_tiles(
        self, x: Tensor, chosen: Chosen, out: Tensor, tiles: Tiles, on_hopper: bool
    ) -> None:
        """Compute several tokens."""
        ids = chosen.ids
        num_tokens, num_chosen = ids.shape
        size, hidden = self._down.columns, self._up.columns
        is_few, pdl = tiles.hold(num_tokens), supported(x.device)
        blocks = None if is_few else arrange(ids, len(self._up.stack.values), tiles.up.tokens)
        inner = torch.empty((num_tokens * num_chosen, size), dtype=x.dtype, device=x.device)
        parts = torch.empty((len(inner), hidden), dtype=x.dtype, device=x.device)
        if on_hopper and blocks is not None:
            self._multiply_on_hopper(x, chosen, blocks, inner, parts)
        else:
            self._multiply(x, chosen, blocks, inner, parts, tiles)
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

    def _multiply(
        self,
        x: Tensor,
        chosen: Chosen,
        blocks: Blocks | None,
        inner: Tensor,
        parts: Tensor,
        tiles: Tiles,
    ) -> None:
        """Compute `inner`, the gated products of pairs, and `parts`, what pairs add to tokens."""
        ids, (up, down) = chosen.ids, (self._up, self._down)
        num_experts, pdl = len(up.stack.values), supported(x.device)
        key = tiles, blocks is None, ids.shape[1], x.dtype
        constants = self._of_tiles.get(key)
        if constants is None:
            of_up, of_down = (
                _tile_constants(
                    tile, one, _num_parts(x, one, tiles), x, ids.shape[1], blocks is None
                )
                for tile, one in ((tiles.up, up), (tiles.down, down))
            )
            constants = of_up, of_down | _fetched(tiles.down, down.stack, pdl)
            self._of_tiles[key] = constants
        of_up, of_down = constants
        grid, place = _places(blocks, ids, num_experts, -(-2 * down.columns // tiles.up.rows))
        up_kernel[grid](
            *_rows(x, up, tiles),
            *up.arguments,
            *place,
            inner,
            down.columns,
            up.columns,
            **of_up,
            **self._gate,
            PDL=pdl,
            launch_pdl=pdl,
        )
        grid, place = _places(blocks, ids, num_experts, -(-up.columns // tiles.down.rows))
        down_kernel[grid](
            *_rows(inner, down, tiles),
            *down.arguments,
            *place,
            chosen.weights,
            parts,
            up.columns,
            down.columns,
            **of_down,
            PDL=pdl,
            launch_pdl=pdl,
        )

    def _multiply_on_hopper(
        self, x: Tensor, chosen: Chosen, blocks: Blocks, inner: Tensor, parts: Tensor
    ) -> None:
        """Compute `_multiply` by `experts_hopper`. Triton for other GPUs may lack its modules."""
        from . import experts_hopper as hopper

        num_tokens, num_chosen = chosen.ids.shape
        for source, operand, target in ((x, self._up, inner), (inner, self._down, parts)):
            numbers, scale, _, bias, *strides = operand.arguments
            num_tiles = -(-operand.num_rows // hopper.ROWS.value)
            hopper.hopper_experts_kernel[(len(blocks.table) * num_tiles,)](
                source,
                numbers,
                scale,
                None if operand.stack.bias is None else bias,
                *strides,
                blocks.table,
                blocks.pairs,
                num_tokens,
                num_tiles,
                chosen.weights,
                target,
                target.shape[1],
                operand.columns,
                CHOSEN=num_chosen,
                UP=operand is self._up,
                **self._gate,
                num_warps=hopper.WARPS.value,
            )


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


def uses_vector(up: Operand, down: Operand) -> bool:
    """Return True if one token is multiplied in registers: FP8 is read in aligned words.

    Integers and MXFP4 take less time on the tensor cores, and blocks hardly more."""
    kinds = {up.form.kind, down.form.kind}
    if kinds == {"rows"}:
        return all(one.columns % 16 == 0 for one in (up, down))
    return kinds == {"plain"}


def best_tiles(num_tokens: int, num_chosen: int, up: Operand, down: Operand) -> Tiles:
    """Return tiles for a number of tokens, the same within each of ROW_CLASSES.

    Blocks have room for twice the mean number of an expert's pairs, so that most experts have one
    block and their weights are read once; int4 for the mean number."""
    # More sums that are scaled, in a second set of registers, have no room or are slower.
    largest = 64 if {"integers", "blocks"} & {up.form.kind, down.form.kind} else MOST_PAIRS
    # Reading int4 twice takes less time than computing for pairs that do not exist.
    spare = 1 if up.form.bits == 4 else 2
    tokens = _best_pairs(num_tokens, num_chosen, len(up.stack.values), spare, largest)
    return Tiles(
        *(
            _best_tile(one.form.kind, one.stack.values.itemsize, one.columns, tokens, one is up)
            for one in (up, down)
        )
    )


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
def _best_tile(kind: str, itemsize: int, in_features: int, tokens: int, is_up: bool) -> Tile:
    if kind == "mxfp4":
        return _best_mxfp4_tile(tokens, is_up)
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


def _best_mxfp4_tile(tokens: int, is_up: bool) -> Tile:
    if tokens <= FEW_PAIRS:
        rows, stages = (128, 3) if is_up and tokens > 8 else (64, 4)
        return Tile(tokens, rows, mxfp4.STEP, stages, 4)
    if tokens == 64:
        return Tile(tokens, 128, mxfp4.STEP, 3, 4) if is_up else Tile(64, 256, mxfp4.STEP, 4, 8)
    return Tile(tokens, 256, mxfp4.STEP, 3, 8)


def _best_scaled_tile(kind: str, in_features: int, tokens: int) -> Tile:
    """Return a tile for sums that are scaled within the loop."""
    if tokens <= FEW_PAIRS:
        return Tile(tokens, 64, FP8_BLOCK, 4, 4)
    if kind == "blocks":
        return Tile(tokens, 128, FP8_BLOCK, 4, 4)
    if in_features < LONG:
        return Tile(tokens, 64, FP8_BLOCK, 3, 4)
    return Tile(tokens, 128, FP8_BLOCK, 3, 8)


def _check_rows(x: Tensor, chosen: Chosen, hidden: int) -> None:
    ids, weights = chosen
    if not (x.is_contiguous() and ids.is_contiguous() and weights.is_contiguous()):
        raise ValueError("x, ids and weights must be contiguous")
    if x.shape[1] != hidden:
        raise ValueError(f"x must be [num_tokens, {hidden}], not {list(x.shape)}")
    if ids.dtype != torch.int32 or weights.dtype != torch.float32 or ids.shape != weights.shape:
        raise ValueError(
            f"ids and weights must be int32 and fp32 of one shape, "
            f"not {ids.dtype} {list(ids.shape)} and {weights.dtype} {list(weights.shape)}"
        )
    if len(ids) != len(x):
        raise ValueError(f"ids of {len(ids)} tokens are not those of {len(x)} rows")


def _check_weights(up: Operand, down: Operand, dtype: torch.dtype) -> None:
    """Raise ValueError if weights do not fit each other, or x of this type."""
    num_experts = len(up.stack.values)
    _check_stack("up", up.stack, dtype, (num_experts, up.num_rows, up.columns))
    _check_stack("down", down.stack, dtype, (num_experts, down.num_rows, down.columns))


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


def _vector_constants(operand: Operand, choices: int) -> Constants:
    """Return the constant arguments that both kernels of one token have."""
    columns = max(16, triton.next_power_of_2(operand.columns))
    return {
        "ROWS": 4 if operand.is_fp8 else 2,
        "COLUMNS": min(VECTOR // choices, columns),
        "SCALED": operand.is_fp8,
        "BIASED": operand.stack.bias is not None,
        "num_warps": 4,
    }


def _num_parts(x: Tensor, operand: Operand, tiles: Tiles) -> int:
    """Return how many FP8 numbers stand for each of x; 0: x stays in 16 bits."""
    if not operand.is_fp8:
        return 0
    if tiles.quantizes_x:
        return 1
    if tiles.up.tokens <= 8:  # converting takes less time than splitting
        return 0
    return 2 if x.dtype == torch.bfloat16 else 0


def _tile_constants(
    tile: Tile, operand: Operand, parts: int, x: Tensor, num_chosen: int, is_few: bool
) -> Constants:
    """Return the constant arguments that the kernels of both products have."""
    values, form = operand.stack.values, operand.form
    columns = form.columns or tile.columns
    numbers = (form.words or columns) * tile.rows * values.itemsize
    step = columns * tile.tokens * (parts or x.itemsize) + numbers
    room = shared_memory(values.device)
    if form.kind == "mxfp4" and x.itemsize > 2:  # the converted numbers, and sums
        room -= (columns + tile.tokens) * tile.rows * x.itemsize
    return {
        "CHOSEN": num_chosen,
        "CHOICES": triton.next_power_of_2(num_chosen),
        "FEW": is_few,
        "TOKENS": tile.tokens,
        "ROWS": tile.rows,
        "COLUMNS": columns,
        "STAGES": max(1, min(tile.stages, room // step)),
        "EVEN": operand.columns % columns == 0,
        "FORMAT": form.kind,
        "WORDS": form.words,
        "GROUP": form.group,
        "SHIFTED": operand.stack.offset is not None,
        "PARTS": parts,
        "BIASED": operand.stack.bias is not None,
        "num_warps": tile.warps,
    }


def _fetched(tile: Tile, weight: Stack, pdl: bool) -> Constants:
    """Return the constant arguments for what a program reads early of each of its rows."""
    line = 128 // weight.values.itemsize  # elements of 128 bytes
    lines = 4 if weight.values.dim() == 4 else max(1, 2 * tile.columns // line)
    return {"FETCHED": lines if pdl else 0, "LINE": line}


def _rows(x: Tensor, operand: Operand, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Return rows of x as the operand's kernel takes them, and their scales, if there are any."""
    parts = _num_parts(x, operand, tiles)
    if parts == 0:
        return x, x
    if parts == 2:
        return split(x)
    return quantize(x) if operand.form.kind == "rows" else quantize_blocks(x)


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
