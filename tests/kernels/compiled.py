"""Compile kernels for a Hopper GPU on a machine without one.

The interpreter accepts programs that the compiler refuses. This is a script because Triton does not
compile in a process that interprets. Triton refuses programs before it writes PTX, and the shared
memory is known then, so only kernels with PTX of ours go on to the assembler.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton import compile, knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from toolkit.kernels.triton.all_reduce import _pushed_norm_kernel
from toolkit.kernels.triton.attention.attention_hopper import (
    SWIZZLED,
    SWIZZLED_FP8,
    hopper_prefill_kernel,
)
from toolkit.kernels.triton.attention.attention_kernels import (
    decode_kernel,
    merge_kernel,
    prefill_kernel,
)
from toolkit.kernels.triton.attention.rotary import _qk_norm_rope_write_kernel, _rotate_kernel
from toolkit.kernels.triton.attention.windows import _short_kernel
from toolkit.kernels.triton.embedding import _place_kernel
from toolkit.kernels.triton.experts import expert_kernels, expert_vectors, experts, routing
from toolkit.kernels.triton.experts.experts_hopper import hopper_experts_kernel
from toolkit.kernels.triton.norm import _join_kernel
from toolkit.kernels.triton.products import fp8, fp8_matmul, linear
from toolkit.kernels.triton.products.grouped import _grouped_kernel
from toolkit.kernels.triton.products.lora import _delta_kernel, _shrink_kernel
from toolkit.kernels.triton.products.matmul import _tile_kernel
from toolkit.kernels.triton.recurrent.chunks import (
    _gated_norm_kernel,
    _reads_kernel,
    _scan_kernel,
    _solve_kernel,
)
from toolkit.kernels.triton.recurrent.convolution import (
    _convolution_step_kernel,
    _convolve_kernel,
    _remember_kernel,
)
from toolkit.kernels.triton.recurrent.delta_net import _delta_step_kernel
from toolkit.kernels.triton.recurrent.verify import _verify_kernel
from toolkit.kernels.triton.sampling.drafts import _draft_inputs_kernel
from toolkit.kernels.triton.sampling.logprobs import _blocks_kernel, _records_kernel
from toolkit.kernels.triton.sampling.sampling import _choose_kernel, _statistics_kernel
from toolkit.kernels.triton.sampling.speech import _rules_kernel

TARGET = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 227 << 10
ASSEMBLED = frozenset(
    [
        "decode, all",
        "race of blocks, fp32",
        "router",
        "8 pairs of an expert, mxfp4",
        "8 pairs of an expert, integers",
        "experts on Hopper",
        "quantized activation",
        "one row, FP8",
        "FP8 blocks, warps",
        "int4, wide",
        "int4 with offsets",
        "int8 after a norm",
    ]
)
"""Compilations with `inline_asm_elementwise`: only the assembler reads its text."""


def without_assembler(
    backend: object = None, stages: dict[str, Any] | None = None, *_: object
) -> tuple[str, str] | None:
    """Leave out the last two stages. Without arguments, return its key in Triton's cache."""
    if stages is None:
        return "without assembler", "without assembler"

    def name_only(llir: str, metadata: dict[str, Any]) -> str:
        metadata["name"] = "not assembled"
        return ""

    stages["ptx"] = name_only
    stages["cubin"] = lambda ptx, metadata: b""
    return None


def compile_kernel(
    name: str,
    kernel,
    types: dict[str, str],
    constants: dict[str, object],
    warps: int,
    stages: int,
    source_type: type[ASTSource] = ASTSource,
) -> None:
    names = kernel.arg_names
    signature = {
        arg: "constexpr"
        if arg in constants
        else types.get(arg, "*bf16" if arg.endswith("_ptr") else "i32")
        for arg in names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, arg in enumerate(names)
        if signature[arg].startswith("*")
        or "stride" in arg
        or arg in ("in_features", "share", "size")
    }
    values = {(names.index(arg),): value for arg, value in constants.items()}
    source = source_type(kernel, signature, values, aligned)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": source_type is ASTSource}
    is_assembled = name in ASSEMBLED
    knobs.runtime.add_stages_inspection_hook = None if is_assembled else without_assembler
    compiled = compile(source, target=TARGET, options=options)
    assert compiled.metadata.shared <= MAX_SHARED_BYTES, (name, compiled.metadata.shared)
    print(name, compiled.metadata.shared, "bytes shared")


DECODE_TYPES = {
    "query_start_ptr": "*i32",
    "seq_len_ptr": "*i32",
    "table_ptr": "*i32",
    "row_ptr": "*i32",
    "order_ptr": "*i32",
    "part_ptr": "*fp32",
    "log_sum_ptr": "*fp32",
    "slot_ptr": "*i64",
    "sinks_ptr": "*fp32",
    "eps": "fp32",
    "inner_scale": "fp32",
    "outer_scale": "fp32",
    "kv_stride_block": "i64",
}
DECODE = {
    "BLOCK_SIZE": 16,
    "GROUP": 4,
    "HEAD_SIZE": 128,
    "HEAD_PAD": 128,
    "INDIRECT": True,
    "PDL": True,
    "ROWS": 16,
    "KEYS": 32,
    "SLIDING": False,
    "CHUNKED": False,
    "CAPPED": False,
    "QUERIES": 1,
    "READS": False,
}
JOIN_TYPES = dict.fromkeys(("scale", "eps", "eps_2", "post_eps"), "fp32")
JOIN = {
    "POST_CENTERED": True,
    "post_bias_ptr": None,
    "CENTERED": False,
    "bias_ptr": None,
    "row_scale_ptr": None,
    "CENTERED_2": True,
    "SIZE": 5000,
    "BLOCK": 8192,
    "SCALED": True,
    "PDL": True,
}
PUSHED_TYPES = {"eps": "fp32", "addresses_ptr": "*i64", "weight_ptr": "*i64", "bias_ptr": "*i64"}
PUSHED_TYPES |= dict.fromkeys(("x_ptr", "residual_ptr", "out_ptr", "calls_ptr"), "*i32")
PUSHED = {
    "TYPE": tl.bfloat16,
    "HALF": 2500,
    "RANK": 1,
    "SIZE": 3,
    "CENTERED": True,
    "PAIRS": 4096,
    "ROWS": 128,
    "WORDS": 4096,
    "PUSHED_OFFSET": 1 << 28,
    "PDL": True,
}
PLAIN = {"q_cos_sin_ptr": None, "CENTERED": False, "LAST": False, "PER_HEAD": False, "CLIP": 0.0}
PLAIN |= {"VALUES": False}
FULL = {"NORMED": True, "CENTERED": True, "LAST": False, "PER_HEAD": True, "CLIP": 8.0}
FULL |= {"VALUES": True}
WRITE = {
    "BLOCK_SIZE": 16,
    "Q_HEADS": 16,
    "KV_HEADS": 8,
    "FIRST": 0,
    "HEAD_SIZE": 80,
    "HALF": 20,
    "HALF_PAD": 32,
    "REST_PAD": 64,
    "ROWS": 16,
    "ROTATED": True,
    "PDL": True,
}
TILE_TYPES = {
    "part_ptr": "*fp32",
    "count_ptr": "*i32",
    "given_ptr": "*fp64",
    "found_ptr": "*fp64",
    "scale_ptr": "*fp32",
    "eps": "fp32",
}
ADAPTERS = dict.fromkeys(
    ("block_ptr", "bound_ptr", "row_part_ptr", "place_ptr", "used_ptr"), "*i32"
)
TILE_TYPES |= ADAPTERS
FACTORS = {"COLUMNS": 64, "WARPS": 4, "RANK": 16, "EVEN": True, "PDL": True}
TILE = {
    "COLUMNS": 128,
    "FETCHED": 256,
    "LINE": 64,
    "EVEN": True,
    "SCALED": False,
    "BLOCKED": False,
    "BIASED": False,
    "PDL": True,
}


def compile_tile(
    name: str,
    tokens: int,
    rows: int,
    stages: int,
    parts: int,
    splits: int,
    types: dict[str, str] = TILE_TYPES,
    **changes: object,
) -> None:
    shape = {"TOKENS": tokens, "ROWS": rows, "STAGES": stages, "PARTS": parts, "SPLITS": splits}
    plain = {"KIND": "", "GATED": False, "UNSCALED": False, "NORMED": False}
    plain |= {"LATE": False, "RANK": 0, "PARTED": False}
    compile_kernel(
        name,
        _tile_kernel,
        types,
        TILE | shape | plain | changes,
        4 if parts == 1 else parts,
        3,
    )


def compile_grouped(
    name: str, tokens: int, rows: int, stages: int, parts: int, splits: int, **changes: object
) -> None:
    shape = {"TOKENS": tokens, "ROWS": rows, "STAGES": stages, "PARTS": parts, "SPLITS": splits}
    weight = {"COLUMNS": 256, "GROUP": 128, "PLANES": 4, "SHIFTED": False}
    plain = {"KIND": "", "GATED": False, "UNSCALED": False, "NORMED": False, "LATE": False}
    rest = {"FETCHED": 2 * parts, "EVEN": True, "BIASED": False, "RANK": 0, "PARTED": False}
    constants = shape | weight | plain | rest | {"PDL": True} | changes
    types = TILE_TYPES | {"weight_ptr": "*u16", "scale_ptr": "*fp16"}
    compile_kernel(
        name, _grouped_kernel, types, constants, max(4, rows // 16) if parts == 1 else parts, 3
    )


def compile_adapters() -> None:
    types = ADAPTERS | {"share_ptr": "*fp32", "count_ptr": "*i32"}
    for tokens, splits in ((8, 32), (64, 16)):
        rows = {"TOKENS": tokens, "TILE": min(tokens, 16), "SPLITS": splits}
        shrink = FACTORS | rows | {"FETCHED": 256, "LINE": 64}
        compile_kernel(f"shrink, {tokens} tokens", _shrink_kernel, types, shrink, 4, 3)
    delta = {"TOKENS": 64, "TILE": 16, "ROWS": 256, "STAGES": 3, "RANK_PAD": 16}
    compile_kernel("delta", _delta_kernel, types, FACTORS | delta, 4, 3)
    end = {"KIND": "silu", "GATED": True, "RANK": 16, "PARTED": True, "PDL": True}
    types = ADAPTERS | {"scale_ptr": "*fp32"}
    row = {"COLUMNS": 2048, "EVEN": True, "BIASED": False}
    compile_kernel("one row", linear._vector_kernel, types, end | row | {"ROWS": 2}, 4, 3)
    types["weight_ptr"] = "*fp8e4nv"
    row |= {"ROWS": 4, "BLOCKED": False}
    compile_kernel("one row, FP8", fp8._vector_kernel, types, end | row, 4, 3)


def compile_fp8() -> None:
    """Compile products with FP8 weights that have a scale for each block."""
    fp8_type = {"weight_ptr": "*fp8e4nv"}
    rounded = {"out_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    blocks = {"BLOCKS": 32, "PDL": True}
    row = {"KIND": "gelu_tanh", "GATED": True, "SIZE_PAD": 16384, "PDL": True}
    compile_kernel("quantized activation", fp8._quantize_kernel, rounded, row, 16, 3)
    compile_kernel("quantize blocks", fp8_matmul._quantize_kernel, rounded, blocks, 8, 3)
    compile_kernel("two FP8 parts", fp8_matmul._split_kernel, rounded, blocks, 8, 3)
    row = {"ROWS": 4, "COLUMNS": 2048, "EVEN": True, "BLOCKED": True, "BIASED": False}
    end = {"KIND": "silu", "GATED": True, "RANK": 0, "PARTED": False, "PDL": True}
    types = TILE_TYPES | fp8_type
    compile_kernel("one row, FP8 blocks", fp8._vector_kernel, types, row | end, 4, 3)
    blocks = {"SCALED": True, "BLOCKED": True, "LINE": 128, "types": types}
    compile_tile("FP8 blocks, warps", 8, 16, 4, 2, 1, **blocks)
    compile_tile("FP8 blocks, odd columns", 64, 32, 8, 1, 1, EVEN=False, **blocks)
    compile_rounded("32 rows in FP8", 32, 64, 6, 4, 4)
    compile_rounded("64 rows in FP8, no blocks", 64, 64, 6, 4, 1, BLOCKED=False, RANK=16)
    compile_rounded("100 rows in FP8", 64, 128, 3, 4, 1, BIASED=True)
    gated = {"GATED": True, "KIND": "silu", "LATE": True}
    compile_rounded("many rows in FP8, gated", 128, 128, 4, 8, 1, **gated)


def compile_rounded(
    name: str, tokens: int, rows: int, stages: int, warps: int, splits: int, **changes: object
) -> None:
    shape = {"TOKENS": tokens, "ROWS": rows, "STAGES": stages, "SPLITS": splits, "FETCHED": 2}
    plain = {"EVEN": True, "BLOCKED": True, "BIASED": False}
    plain |= {"KIND": "", "GATED": False, "LATE": False}
    constants = shape | plain | {"RANK": 0, "PARTED": False, "PDL": True} | changes
    types = TILE_TYPES | dict.fromkeys(("x_ptr", "weight_ptr"), "*fp8e4nv")
    types["x_scale_ptr"] = "*fp32"
    compile_kernel(name, fp8_matmul._rounded_kernel, types, constants, warps, 3)


def compile_sampling() -> None:
    """Compile each kernel for one type of logits: they convert what they read to fp32."""
    ids = dict.fromkeys(("row_ptr", "position_ptr", "index_ptr", "token_ptr", "out_ptr"), "*i32")
    types = ids | {"logits_ptr": "*bf16", "float_ptr": "*fp32", "int_ptr": "*i64"}
    types["statistics_ptr"] = "*fp32"
    tile = {"PADDED": True, "BLOCKS": 16, "WIDTH": 256, "PDL": True}
    fp32 = types | {"logits_ptr": "*fp32"}
    compile_kernel("race of blocks, fp32", _statistics_kernel, fp32, tile, 4, 3)
    row = {"TRAILING_ZEROS": 16, "NUM_BLOCKS_PAD": 1024}
    compile_kernel("choice, bf16", _choose_kernel, types, tile | row, 8, 3)
    rules = {"BLOCK": 4096, "HISTORY": 64, "PDL": True}
    masks = types | {"suppressed_ptr": "*i1"}
    compile_kernel("rules of transcriptions, bf16", _rules_kernel, masks, rules, 8, 3)


def compile_hopper(
    name: str, block_size: int, group: int, dtype: str, cached: str | None = None
) -> None:
    layout, columns = (SWIZZLED, 64) if cached is None else (SWIZZLED_FP8, 128)
    page = f"tensordesc<{cached or dtype}[{min(64, block_size)}, {columns}],{layout.value!r}>"
    same = {f"{x}_ptr": f"*{dtype}" for x in ("q", "out")} | {"v_ptr": f"*{cached or dtype}"}
    types = DECODE_TYPES | same | {"counter_ptr": "*i32", "k_cache": page, "v_cache": page}
    shape = {"BLOCK_SIZE": block_size, "GROUP": group, "KV_HEADS": 8, "HEAD_SIZE": 128}
    constants = shape | {"INDIRECT": True, "TOKENS": 128 // group}
    compile_kernel(name, hopper_prefill_kernel, types, constants, 4, 3, GluonASTSource)


def compile_logprobs() -> None:
    types = {"token_ptr": "*i32", "key_ptr": "*i64", "sum_ptr": "*fp32", "record_ptr": "*i32"}
    width = {"WIDTH": 256}
    pad = {"NUM_BLOCKS_PAD": 1024}
    blocks = {"BLOCKS": 16, "PADDED": True}
    compile_kernel("log-probabilities, blocks", _blocks_kernel, types, width | blocks, 4, 3)
    compile_kernel("log-probabilities, records", _records_kernel, types, width | pad, 1, 3)


def compile_experts() -> None:
    integers = dict.fromkeys(("id_ptr", "table_ptr", "pair_ptr", "count_ptr"), "*i32")
    types = integers | {"slot_ptr": "*i64", "scale_ptr": "*fp32", "share_ptr": "*fp32"}
    router = {"CHOSEN": 8, "CHOSEN_PAD": 8, "SIZE_PAD": 32, "PADDED": True, "PDL": True}
    plain = {"GROUPS": 1, "GROUPS_PAD": 1, "CHOSEN_GROUPS": 1, "SIZE": 128, "SIZE_PAD": 128}
    plain |= {"SIGMOID": False, "SPARSE": False, "RENORMALIZE": True, "BIASED": False}
    groups = {"GROUPS": 6, "GROUPS_PAD": 8, "CHOSEN_GROUPS": 3, "SIZE": 20}
    groups |= {"SIGMOID": True, "SPARSE": False, "RENORMALIZE": True, "BIASED": True}
    sparse = plain | {"SPARSE": True, "RENORMALIZE": False}
    routed = types | {"weight_ptr": "*fp32", "factor_ptr": "*fp32", "scale": "fp32"}
    routers = {"router": plain, "router, groups": groups, "router, SparseMixer": sparse}
    for name, kind in routers.items():
        compile_kernel(name, routing._route_kernel, routed, router | kind, 1, 3)
    arranged = {"PAIRS": routing.PAIRS, "EXPERTS": 128, "PDL": True}
    compile_kernel("blocks of experts", routing._arrange_kernel, types, arranged, 8, 3)
    chosen = {"CHOSEN": 6, "CHOICES": 8, "PDL": True, "BIASED": False}
    compile_one_token_of_experts(types, chosen)
    tiles = types | {"x_scale_ptr": "*fp32"}
    # Each pair of a format, a size and a direction.
    for form, tokens, columns, is_down in (
        ("plain", 8, 128, True),
        ("plain", 128, 64, False),
        ("rows", 32, 128, False),
        ("rows", 128, 128, True),
        ("blocks", 8, 128, True),
        ("blocks", 64, 128, False),
        ("integers", 8, 256, False),
        ("integers", 64, 256, True),
        ("mxfp4", 8, 128, False),
        ("mxfp4", 128, 128, True),
    ):
        compile_tile_of_experts(tiles, chosen, form, tokens, columns, is_down)
    tiles |= {"weight_ptr": "*i16", "scale_ptr": "*i32"}
    gate = {"UP": True, "INTERLEAVED": True, "KIND": "", "LIMIT": 7.0, "ALPHA": 1.702}
    for end in (gate, gate | {"UP": False, "bias_ptr": None}):
        compile_kernel(
            "experts on Hopper",
            hopper_experts_kernel,
            tiles,
            {"CHOSEN": 6} | end,
            4,
            3,
            GluonASTSource,
        )
    constants = {"CHOSEN": 6, "CHOICES": 8, "PDL": True, "CHUNK": 1024}
    compile_kernel("sum of experts", expert_kernels.sum_kernel, types, constants, 4, 3)


def compile_one_token_of_experts(types: dict[str, str], chosen: dict[str, object]) -> None:
    for scaled in (False, True):
        weights = types | ({"weight_ptr": "*fp8e4nv"} if scaled else {})
        one = {"ROWS": 4 if scaled else 2, "SCALED": scaled, "BIASED": False, "PDL": True}
        up = one | {"KIND": "silu", "LIMIT": 0.0, "ALPHA": 0.0, "INTERLEAVED": False}
        up |= {"COLUMNS": 2048}
        kind = ", FP8" if scaled else ""
        compile_kernel(f"one token, up{kind}", expert_vectors.vector_up_kernel, weights, up, 4, 3)
        down = one | chosen | {"COLUMNS": 256}
        kernel = expert_vectors.vector_down_kernel
        compile_kernel(f"one token, down{kind}", kernel, weights, down, 4, 3)


def compile_tile_of_experts(
    types: dict[str, str],
    chosen: dict[str, object],
    form: str,
    tokens: int,
    columns: int,
    is_down: bool,
) -> None:
    numbers = {"plain": "*bf16", "integers": "*u16", "mxfp4": "*i16"}.get(form, "*fp8e4nv")
    scales = {"plain": "*bf16", "integers": "*fp16", "mxfp4": "*i32"}.get(form, "*fp32")
    is_few = tokens <= experts.FEW_PAIRS
    parts = (2 if is_few else 1) if form in ("rows", "blocks") else 0
    weights = types | {"weight_ptr": numbers, "scale_ptr": scales, "offset_ptr": "*fp32"}
    weights |= {"x_ptr": "*fp8e4nv"} if parts else {}
    words = {"integers": 64, "mxfp4": 32}.get(form, 0)
    rows = 64 if is_few else 256 if form == "plain" else 128
    warps, stages = (4, 4) if is_few or form == "blocks" else (8, 3)
    shape = {"TOKENS": tokens, "ROWS": rows, "COLUMNS": columns, "STAGES": stages}
    shape |= {"FEW": tokens == 8, "EVEN": form != "mxfp4", "PARTS": parts}
    shape |= {"FORMAT": form, "WORDS": words, "GROUP": 128, "SHIFTED": form == "integers"}
    up = {"KIND": "", "LIMIT": 7.0, "ALPHA": 1.702, "INTERLEAVED": form == "mxfp4"}
    kernel, rest = expert_kernels.up_kernel, up
    if is_down:
        kernel, rest = expert_kernels.down_kernel, {"FETCHED": 4, "LINE": 64}
    title = f"{tokens} pairs of an expert, {form}"
    compile_kernel(title, kernel, weights, chosen | shape | rest, warps, 3)


def compile_draft_inputs() -> None:
    names = ("end", "row", "length", "token", "table", "out_token", "out_position", "out_seq_len")
    types = dict.fromkeys((f"{name}_ptr" for name in (*names, "out_sample")), "*i32")
    types["out_slot_ptr"] = "*i64"
    sizes = {"AHEAD": 1, "BLOCK_SIZE": 16, "REQUESTS": 128}
    compile_kernel("inputs before drafts", _draft_inputs_kernel, types, sizes, 4, 3)


def compile_towers() -> None:
    heads = {"NUM_HEADS": 16, "HALF": 40, "HALF_BLOCK": 64}
    types = {"cos_sin_ptr": "*fp32", "start_ptr": "*i32", "index_ptr": "*i32", "scale": "fp32"}
    windows = heads | {"TOKENS": 64, "ROTATED": True}
    compile_kernel("attention in windows", _short_kernel, types, windows, 4, 3)
    compile_kernel("rotation", _rotate_kernel, types, heads | {"HEAD_BLOCK": 16}, 4, 3)
    rows = {"CHUNK": 4096, "ADDS": True}
    compile_kernel("rows of features", _place_kernel, types, rows, 4, 3)


def compile_recurrent() -> None:
    names = "start", "length", "read", "write", "keep", "kept", "begin", "written", "after"
    types = dict.fromkeys((f"{name}_ptr" for name in (*names, "chunk", "chunk_start")), "*i32")
    types |= dict.fromkeys(("decay_ptr", "time_ptr", "state_ptr", "total_ptr"), "*fp32")
    types["eps"] = "fp32"
    net = {"K_HEADS": 16, "GROUP": 2, "K_SIZE": 128, "V_SIZE": 128, "K_BLOCK": 128}
    inputs = {"ROWS": 10, "WIDTH": 4}
    step = net | inputs | {"RATE": 2.0, "V_BLOCK": 128, "PDL": True}
    compile_kernel("delta net, one token", _delta_step_kernel, types, step, 4, 3)
    step |= {"V_BLOCK": 64, "NORM_BLOCK": 128, "MOST": 4, "COUNT": 16, "EXACT": False}
    compile_kernel("delta net, drafts", _verify_kernel, types, step, 4, 1)
    most = {"MOST": 17, "COUNT": 64, "ROWS": 36}
    compile_kernel("delta net, most drafts", _verify_kernel, types, step | most, 8, 1)
    chunks = net | {"CHUNK": 64, "EXACT": False}
    compile_kernel("delta net, systems", _solve_kernel, types, chunks | {"RATE": 1.0}, 1, 3)
    matrices = types | {"read_ptr": "*bf16"}
    compile_kernel("delta net, reads", _reads_kernel, matrices, chunks, 4, 3)
    scan = chunks | {"V_BLOCK": 32, "MOST": 1}
    compile_kernel("delta net, states", _scan_kernel, types, scan, 4, 3)
    norm = {"V_HEADS": 32, "V_SIZE": 128, "V_BLOCK": 128, "CHUNK": 64}
    compile_kernel("delta net, gated norm", _gated_norm_kernel, types, norm, 4, 3)
    prompts = inputs | {"bias_ptr": None, "BLOCK": 128, "COUNT": 16, "GATED": False}
    prompts |= {"UNITS": 32, "HEAD": 128}
    compile_kernel("convolution, units", _convolve_kernel, types, prompts, 8, 3)
    prompts |= {"BLOCK": 64, "GATED": True, "UNITS": 0, "HEAD": 1}
    compile_kernel("convolution", _convolve_kernel, types, prompts, 4, 3)
    block = inputs | {"BLOCK": 64, "MOST": 4}
    one = block | {"bias_ptr": None, "PDL": True}
    compile_kernel("convolution, some tokens", _convolution_step_kernel, types, one, 1, 3)
    compile_kernel("last inputs", _remember_kernel, types, block | {"GATED": True}, 1, 3)


def main() -> None:
    fused = {"OWN": True, "SPLIT": False, "HALF": 64, "NORMED": True, "ORDERED": True}
    plain = PLAIN | {"sinks_ptr": None}
    full = FULL | {"SLIDING": True, "CAPPED": True, "HEAD_SIZE": 80, "HALF": 20}
    fp8 = DECODE_TYPES | dict.fromkeys(("k_ptr", "v_ptr"), "*fp8e4nv")
    compile_kernel("decode, all", decode_kernel, fp8, DECODE | fused | full | {"ROWS": 8}, 1, 3)
    compile_kernel(
        "norm, rotate and write", _qk_norm_rope_write_kernel, DECODE_TYPES, WRITE | FULL, 4, 3
    )
    split = {"OWN": False, "SPLIT": True, "HALF": 0, "NORMED": False, "ORDERED": False}
    compile_kernel("decode, split", decode_kernel, DECODE_TYPES, DECODE | plain | split, 2, 3)
    several = split | {"QUERIES": 5, "ROWS": 32, "SLIDING": True}
    most = several | {"QUERIES": 16, "GROUP": 8, "ROWS": 128, "CHUNKED": True}
    compile_kernel("decode, most drafts", decode_kernel, DECODE_TYPES, DECODE | plain | most, 8, 3)
    prompts = DECODE_TYPES | {"last_key_ptr": "*i32"}
    gemma = {"HEAD_SIZE": 256, "HEAD_PAD": 256, "GROUP": 2, "KV_HEADS": 4, "BLOCK_SIZE": 16}
    gemma |= {"TOKENS": 32, "ROWS": 64, "KEYS": 32, "SLIDING": True, "CAPPED": False}
    gemma |= {"CHUNKED": False, "INDIRECT": True, "sinks_ptr": None}
    compile_kernel("prompts both ways", prefill_kernel, prompts, gemma, 4, 3)
    large = {"HEAD_SIZE": 512, "HEAD_PAD": 512, "GROUP": 8}
    own = fused | large | {"KEYS": 16, "HALF": 256, "ORDERED": False}
    kinds = DECODE | plain | own | {"VALUES": True}
    compile_kernel("decode, heads of 512", decode_kernel, DECODE_TYPES, kinds, 4, 3)
    kinds |= {"READS": True, "SPLIT": True, "VALUES": False}
    compile_kernel("decode, queries alone", decode_kernel, DECODE_TYPES, kinds, 4, 3)
    gemma |= large | {"TOKENS": 4, "ROWS": 32, "SLIDING": False}
    compile_kernel("prompts, heads of 512", prefill_kernel, prompts, gemma, 8, 2)
    merge = {"HEAD_SIZE": 128, "HEAD_PAD": 128, "SPLITS_PAD": 16, "PDL": True, "QUERIES": 1}
    compile_kernel("merge", merge_kernel, DECODE_TYPES, merge, 4, 3)
    compile_hopper("prefill on Hopper", 16, 4, "bf16")
    compile_hopper("prefill on Hopper, large blocks", 128, 7, "fp16")
    compile_hopper("prefill on Hopper, FP8", 16, 4, "bf16", "fp8e4nv")
    compile_sampling()
    compile_draft_inputs()
    compile_towers()
    compile_recurrent()
    compile_kernel("join", _join_kernel, JOIN_TYPES, JOIN, 16, 3)
    rounded = JOIN_TYPES | {"out_ptr": "*fp8e4nv", "row_scale_ptr": "*fp32"}
    one = {name: value for name, value in JOIN.items() if name != "row_scale_ptr"}
    one |= dict.fromkeys(("weight_2_ptr", "bias_2_ptr", "out_2_ptr"))
    compile_kernel("rounded join", _join_kernel, rounded, one, 16, 3)
    compile_kernel("pushed sum and norm", _pushed_norm_kernel, PUSHED_TYPES, PUSHED, 16, 3)
    compile_tile("product before a norm, programs", 64, 64, 5, 1, 2, NORMED=True, LATE=True)
    compile_adapters()
    compile_experts()
    compile_logprobs()
    gated = {"GATED": True, "KIND": "silu", "LATE": True, "UNSCALED": True}
    compile_tile("gated product with adapters", 64, 128, 4, 1, 1, RANK=64, PARTED=True, **gated)
    warps = {"NORMED": True, "LATE": True, "RANK": 16}
    compile_tile("product with adapters before a norm, warps", 8, 16, 5, 2, 1, **warps)
    compile_grouped("int4, wide", 8, 64, 3, 2, 1, GATED=True, KIND="silu", LATE=True)
    compile_grouped("int4 before a norm", 8, 64, 3, 1, 8, NORMED=True, LATE=True)
    compile_grouped("int4 with offsets", 16, 16, 4, 4, 1, SHIFTED=True, EVEN=False, RANK=16)
    int8 = {"PLANES": 2, "COLUMNS": 128, "GROUP": 64}
    compile_grouped("int8 after a norm", 64, 64, 3, 1, 1, UNSCALED=True, **int8)
    compile_fp8()


if __name__ == "__main__":
    main()
