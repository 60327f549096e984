"""Products of many rows by the algorithm of cuBLAS that takes the least time where it runs.

cuBLAS has several algorithms for a product, and PyTorch takes the one that heuristics name first. Long products bring a GPU to its
power limit, and there another is up to a seventh faster. So while an engine starts, the products of its largest step are timed with
each (`choosing`), and what was found is kept beside the compiled kernels. Only those count that give the very same numbers as
PyTorch's: what was chosen shows in no result.

Source: NVIDIA's cuBLAS documentation, "Using the cuBLASLt API".
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_TOKENS = 4096
"""Rows of x from which the choice is worth its time."""
CANDIDATES = 12
GLANCE, LOOK, ROUNDS = 0.01, 0.04, 3
"""Seconds for which each candidate is timed: all of them first, and then, ROUNDS times, those that were NEAR the fastest. The second
is long enough for the power that a candidate takes to tell.
"""
PROCEDURE = 1
"""To be raised when these change, so that nothing counts that was kept before."""
NEAR, CLEARLY = 1.05, 0.99
"""Of the fastest one's time, and of that of PyTorch's choice, which another one's must be below."""
ALIGNMENT = 256
"""Bytes, of every address, as the heuristics take it."""
TYPES = {torch.float16: 2, torch.bfloat16: 14}
"""cudaDataType_t."""
FLOAT32, COMPUTE_FLOAT32, TRANSPOSED = 0, 68, 1
TRANSPOSE_A, MAX_WORKSPACE = 3, 1
"""Attributes of a product, and of what is asked of the heuristics."""

logger = logging.getLogger(__name__)

Product = Callable[[Tensor, Tensor, Tensor], object]
"""(x, W, out): out = x Wᵀ."""

_chosen: dict[tuple[object, ...], Product | None] = {}
"""None: PyTorch's own."""
_choosing = ContextVar("choosing", default=False)


@contextmanager
def choosing() -> Iterator[None]:
    """Products of `linear` inside choose their algorithm, if they have not yet."""
    token = _choosing.set(True)
    try:
        yield
    finally:
        _choosing.reset(token)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As F.linear, to the last bit; x: `[num_tokens, in]`, weight: `[out, in]`. With a bias it is that."""
    if bias is not None:
        return F.linear(x, weight, bias)
    key = (x.device, x.dtype, *x.shape, *weight.shape, weight.dtype)
    if _choosing.get() and key not in _chosen and _can_choose(x, weight):
        _chosen[key] = _choice(x, weight)
    product = _chosen.get(key)
    if product is None or not _aligned(x, weight):
        return F.linear(x, weight)
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    product(x, weight, out)
    return out


def _can_choose(x: Tensor, weight: Tensor) -> bool:
    many = x.is_cuda and x.dim() == 2 and len(x) >= LEAST_TOKENS
    return (
        many
        and x.dtype == weight.dtype
        and x.dtype in TYPES
        and _aligned(x, weight)
        and _library() is not None
    )


def _aligned(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)


def _choice(x: Tensor, weight: Tensor) -> Product | None:
    """What an earlier start kept, or else the fastest."""
    try:
        return _tried(_Kept(x, weight), x, weight)
    except RuntimeError as error:  # also where there is room for one product, and not for two
        why = str(error).partition("\n")[0]
        logger.info("%s: cuBLAS' algorithms could not be tried (%s)", _described(x, weight), why)
        return None


def _tried(kept: _Kept, x: Tensor, weight: Tensor) -> Product | None:
    # Numbers of this function's own: how much power a product takes depends on them.
    x = torch.empty_like(x).normal_(generator=torch.Generator(x.device).manual_seed(0))
    expected = F.linear(x, weight)
    if not (expected.isfinite().all() and expected.any()):
        return None  # such a weight does not tell one algorithm from another
    out = torch.empty_like(expected)
    plan = _Plan(x, weight)

    def is_exact(algorithm: bytes) -> bool:
        out.fill_(torch.nan)
        try:
            plan.multiply(algorithm, x, weight, out)
        except RuntimeError:  # kept by something else than this
            return False
        return torch.equal(out, expected)

    known = kept.read()
    if known is None or (known and not is_exact(known)):
        exact = filter(is_exact, plan.algorithms())
        known = _fastest({one: partial(plan.multiply, one) for one in exact}, x, weight, out)
        kept.write(known)
        found_one = "another algorithm of cuBLAS" if known else "no algorithm of cuBLAS"
        logger.info("%s: %s is faster than PyTorch's choice", _described(x, weight), found_one)
    return partial(plan.multiply, known) if known else None


def _fastest(found: Mapping[bytes, Product], x: Tensor, weight: Tensor, out: Tensor) -> bytes:
    """An algorithm, or b"" for PyTorch's choice."""
    products = {b"": _pytorchs, **found}
    _seconds(_pytorchs, LOOK, x, weight, out)  # the first ones find the GPU as the others do
    glances = {
        name: _seconds(product, GLANCE, x, weight, out) for name, product in products.items()
    }
    near = [name for name in products if not name or glances[name] < NEAR * min(glances.values())]
    rounds = [
        [_seconds(products[name], LOOK, x, weight, out) for name in near] for _ in range(ROUNDS)
    ]
    seconds = dict(zip(near, map(median, zip(*rounds, strict=True)), strict=True))
    seconds[b""] *= CLEARLY
    return min(near, key=seconds.__getitem__)


def _described(x: Tensor, weight: Tensor) -> str:
    return f"products of {len(x)} rows, {weight.shape[1]} by {len(weight)}"


def _pytorchs(x: Tensor, weight: Tensor, out: Tensor) -> None:
    torch.mm(x, weight.T, out=out)


def _seconds(product: Product, long: float, x: Tensor, weight: Tensor, out: Tensor) -> float:
    """Seconds of one run, of as many one after the other as take about `long` seconds."""
    runs = 1 + int(long / _timed(product, 1, x, weight, out))
    return _timed(product, runs, x, weight, out) / runs


def _timed(product: Product, runs: int, x: Tensor, weight: Tensor, out: Tensor) -> float:
    """Seconds of all `runs`."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(runs):
        product(x, weight, out)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


class _Kept:
    """The choice for a product, in Triton's cache: for this GPU, version of cuBLAS, type and shape."""

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        from triton.runtime.cache import get_cache_manager

        what = (
            __name__,
            PROCEDURE,
            _device_name(x),
            _version(),
            str(x.dtype),
            *x.shape,
            len(weight),
        )
        self._open = partial(get_cache_manager, hashlib.sha256(repr(what).encode()).hexdigest())

    def read(self) -> bytes | None:
        """None: nothing was kept, or nothing that can be read."""
        with suppress(OSError, ValueError):
            path = self._open().get_file("algorithm")
            if path is not None:
                algorithm = bytes.fromhex(Path(path).read_text())
                return algorithm if len(algorithm) in (0, ctypes.sizeof(_Algorithm)) else None
        return None

    def write(self, algorithm: bytes) -> None:
        with suppress(OSError):  # where there is no room for it, the next start chooses again
            self._open().put(algorithm.hex(), "algorithm", binary=False)


def _device_name(x: Tensor) -> str:
    return torch.cuda.get_device_name(x.device)


# ---- cuBLASLt


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@cache
def _library() -> Any:
    """The one that PyTorch has loaded; None where there is none."""
    version = (torch.version.cuda or "").split(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{version}")
    except OSError:
        return None


@cache
def _version() -> int:
    get = _library().cublasLtGetVersion
    get.restype = ctypes.c_size_t
    return int(get())


@cache
def _handle(_device: torch.device) -> ctypes.c_void_p:
    return _made(_library().cublasLtCreate)


class _Plan:
    """A product as cuBLASLt describes it. Columns come first there, so it computes outᵀ = W xᵀ of what it sees as Wᵀ and xᵀ."""

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        library, kind = _library(), TYPES[x.dtype]
        (num_tokens, size), num_out = x.shape, len(weight)
        self._handle = _handle(x.device)
        operation = _made(library.cublasLtMatmulDescCreate, COMPUTE_FLOAT32, FLOAT32)
        _set(
            library.cublasLtMatmulDescSetAttribute,
            operation,
            TRANSPOSE_A,
            ctypes.c_int32(TRANSPOSED),
        )
        a, b, c = (
            _made(
                library.cublasLtMatrixLayoutCreate,
                kind,
                *map(ctypes.c_uint64, (rows, columns, rows)),
            )
            for rows, columns in ((size, num_out), (size, num_tokens), (num_out, num_tokens))
        )
        self._product = operation, a, b, c

    def algorithms(self) -> list[bytes]:
        """What the heuristics name for it, the best by them first: a cublasLtMatmulAlgo_t each."""
        library, asked = _library(), _made(_library().cublasLtMatmulPreferenceCreate)
        _set(library.cublasLtMatmulPreferenceSetAttribute, asked, MAX_WORKSPACE, ctypes.c_uint64(0))
        named, count = (_Heuristic * CANDIDATES)(), ctypes.c_int()
        operation, a, b, c = self._product
        status = library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, operation, a, b, c, c, asked, CANDIDATES, named, ctypes.byref(count)
        )
        _check(library.cublasLtMatmulPreferenceDestroy(asked))
        return (
            []
            if status
            else [bytes(one.algorithm) for one in named[: count.value] if one.status == 0]
        )

    def multiply(self, algorithm: bytes, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """out = x Wᵀ, on the current stream. Raises RuntimeError where the algorithm does not fit."""
        operation, a, b, c = self._product
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        x_at, weight_at, out_at = (
            ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, weight, out)
        )
        stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
        _check(
            _library().cublasLtMatmul(
                self._handle,
                operation,
                ctypes.byref(one),
                weight_at,
                a,
                x_at,
                b,
                ctypes.byref(zero),
                out_at,
                c,
                out_at,
                c,
                ctypes.byref(_Algorithm.from_buffer_copy(algorithm)),
                None,
                ctypes.c_size_t(0),
                stream,
            )
        )


def _made(create: Any, *arguments: Any) -> ctypes.c_void_p:
    it = ctypes.c_void_p()
    _check(create(ctypes.byref(it), *arguments))
    return it


def _set(setter: Any, of: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _check(setter(of, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))))


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status}")
