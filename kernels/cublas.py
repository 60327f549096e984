"""Products of many rows by the cuBLAS algorithm that is fastest on this GPU.

cuBLAS has several algorithms for a product, and PyTorch uses the first that heuristics name. Long
products bring a GPU to its power limit, where another one is up to a seventh faster. So at
start-up the products of an engine's largest step are timed with each (`choosing`), and the choices
are stored with the compiled kernels. Only algorithms whose results equal PyTorch's bitwise count.

Source: NVIDIA's cuBLAS documentation, "Using the cuBLASLt API"."""

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

MIN_TOKENS = 4096  # least rows of x for which the choice is worth its time
CANDIDATES = 12
SHORT_SECONDS, LONG_SECONDS, ROUNDS = 0.01, 0.04, 3
"""Time for each candidate: first all of them briefly, then those NEAR the fastest, ROUNDS times.

The long time lets a candidate's power draw take effect."""
PROCEDURE = 1  # version of this procedure. Raise it to discard stored choices
NEAR, CLEARLY = 1.05, 0.99
"""Greatest times of a candidate: relative to the fastest, and to PyTorch's choice to replace it."""
ALIGNMENT = 256  # alignment of every address in bytes, as the heuristics assume
TYPES = {torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
FLOAT32, COMPUTE_FLOAT32, TRANSPOSED = 0, 68, 1
TRANSPOSE_A, MAX_WORKSPACE = 3, 1  # attributes of a product and of a query of the heuristics

logger = logging.getLogger(__name__)

Product = Callable[[Tensor, Tensor, Tensor], object]  # (x, W, out) -> None: out = x Wᵀ

_chosen: dict[tuple[object, ...], Product | None] = {}
"""By device, type and shape. None: PyTorch's choice."""
_choosing = ContextVar("choosing", default=False)


@contextmanager
def choosing() -> Iterator[None]:
    """Let products of `linear` inside choose their algorithm, if they have not yet."""
    token = _choosing.set(True)
    try:
        yield
    finally:
        _choosing.reset(token)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return F.linear, bitwise. x: `[num_tokens, in]`; weight: `[size, in]`.

    The result is `out` if that is given."""
    if out is not None:
        return (
            torch.mm(x, weight.T, out=out)
            if bias is None
            else torch.addmm(bias, x, weight.T, out=out)
        )
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
    is_large = x.is_cuda and x.dim() == 2 and len(x) >= MIN_TOKENS
    return (
        is_large
        and x.dtype == weight.dtype
        and x.dtype in TYPES
        and _aligned(x, weight)
        and _library() is not None
    )


def _aligned(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)


def _choice(x: Tensor, weight: Tensor) -> Product | None:
    """Return the stored choice, or else the fastest algorithm."""
    try:
        return _choose(_StoredChoice(x, weight), x, weight)
    except RuntimeError as error:  # such as too little memory for two products
        why = str(error).partition("\n")[0]
        logger.info("%s: cuBLAS algorithms could not be timed (%s)", _describe(x, weight), why)
        return None


def _choose(stored: _StoredChoice, x: Tensor, weight: Tensor) -> Product | None:
    # Random numbers: the power that a product draws depends on its operands.
    x = torch.empty_like(x).normal_(generator=torch.Generator(x.device).manual_seed(0))
    expected = F.linear(x, weight)
    if not (expected.isfinite().all() and expected.any()):
        return None  # algorithms cannot be compared with such a weight
    out = torch.empty_like(expected)
    plan = _Plan(x, weight)

    def is_exact(algorithm: bytes) -> bool:
        out.fill_(torch.nan)
        try:
            plan.multiply(algorithm, x, weight, out)
        except RuntimeError:  # a stored algorithm that does not fit
            return False
        return torch.equal(out, expected)

    known = stored.read()
    if known is None or (known and not is_exact(known)):
        exact = filter(is_exact, plan.algorithms())
        known = _fastest({one: partial(plan.multiply, one) for one in exact}, x, weight, out)
        stored.write(known)
        which = "another cuBLAS algorithm" if known else "no cuBLAS algorithm"
        logger.info("%s: %s is faster than PyTorch's choice", _describe(x, weight), which)
    return partial(plan.multiply, known) if known else None


def _fastest(found: Mapping[bytes, Product], x: Tensor, weight: Tensor, out: Tensor) -> bytes:
    """Return the fastest algorithm, or b"" for PyTorch's choice."""
    products = {b"": _pytorch_product, **found}
    # Warms the GPU up, so that the first candidate finds it like the others.
    _seconds(_pytorch_product, LONG_SECONDS, x, weight, out)
    brief = {
        name: _seconds(product, SHORT_SECONDS, x, weight, out) for name, product in products.items()
    }
    near = [name for name in products if not name or brief[name] < NEAR * min(brief.values())]
    rounds = [
        [_seconds(products[name], LONG_SECONDS, x, weight, out) for name in near]
        for _ in range(ROUNDS)
    ]
    seconds = dict(zip(near, map(median, zip(*rounds, strict=True)), strict=True))
    seconds[b""] *= CLEARLY
    return min(near, key=seconds.__getitem__)


def _describe(x: Tensor, weight: Tensor) -> str:
    return f"products of {len(x)} rows, {weight.shape[1]} by {len(weight)}"


def _pytorch_product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    torch.mm(x, weight.T, out=out)


def _seconds(product: Product, duration: float, x: Tensor, weight: Tensor, out: Tensor) -> float:
    """Return the seconds of one run, averaged over about `duration` seconds."""
    runs = 1 + int(duration / _time(product, 1, x, weight, out))
    return _time(product, runs, x, weight, out) / runs


def _time(product: Product, runs: int, x: Tensor, weight: Tensor, out: Tensor) -> float:
    """Return the seconds of all `runs`."""
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    begin.record()
    for _ in range(runs):
        product(x, weight, out)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


class _StoredChoice:
    """A choice in Triton's cache, by GPU, version of cuBLAS, type and shape."""

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        from triton.runtime.cache import get_cache_manager

        key = (
            __name__,
            PROCEDURE,
            _device_name(x),
            _version(),
            str(x.dtype),
            *x.shape,
            len(weight),
        )
        self._open = partial(get_cache_manager, hashlib.sha256(repr(key).encode()).hexdigest())

    def read(self) -> bytes | None:
        """Return the stored algorithm, b"" for PyTorch's, or None if none can be read."""
        with suppress(OSError, ValueError):
            path = self._open().get_file("algorithm")
            if path is not None:
                algorithm = bytes.fromhex(Path(path).read_text())
                return algorithm if len(algorithm) in (0, ctypes.sizeof(_Algorithm)) else None
        return None

    def write(self, algorithm: bytes) -> None:
        with suppress(OSError):  # such as a full disk: the next start chooses again
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
    """Return the library that PyTorch has loaded, or None."""
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
    return _create(_library().cublasLtCreate)


class _Plan:
    """A product described for cuBLASLt.

    cuBLASLt is column-major: it computes outᵀ = W xᵀ from what it reads as Wᵀ and xᵀ."""

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        library, kind = _library(), TYPES[x.dtype]
        (num_tokens, size), num_out = x.shape, len(weight)
        self._handle = _handle(x.device)
        operation = _create(library.cublasLtMatmulDescCreate, COMPUTE_FLOAT32, FLOAT32)
        _set(
            library.cublasLtMatmulDescSetAttribute,
            operation,
            TRANSPOSE_A,
            ctypes.c_int32(TRANSPOSED),
        )
        a, b, c = (
            _create(
                library.cublasLtMatrixLayoutCreate,
                kind,
                *map(ctypes.c_uint64, (rows, columns, rows)),
            )
            for rows, columns in ((size, num_out), (size, num_tokens), (num_out, num_tokens))
        )
        self._product = operation, a, b, c

    def algorithms(self) -> list[bytes]:
        """Return the heuristics' algorithms, best first: a cublasLtMatmulAlgo_t each."""
        library, preference = _library(), _create(_library().cublasLtMatmulPreferenceCreate)
        _set(
            library.cublasLtMatmulPreferenceSetAttribute,
            preference,
            MAX_WORKSPACE,
            ctypes.c_uint64(0),
        )
        named, count = (_Heuristic * CANDIDATES)(), ctypes.c_int()
        operation, a, b, c = self._product
        status = library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, operation, a, b, c, c, preference, CANDIDATES, named, ctypes.byref(count)
        )
        _check(library.cublasLtMatmulPreferenceDestroy(preference))
        return (
            []
            if status
            else [bytes(one.algorithm) for one in named[: count.value] if one.status == 0]
        )

    def multiply(self, algorithm: bytes, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Compute out = x Wᵀ on the current stream. Raises RuntimeError if the algorithm cannot."""
        operation, a, b, c = self._product
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        x_address, weight_address, out_address = (
            ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, weight, out)
        )
        stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
        _check(
            _library().cublasLtMatmul(
                self._handle,
                operation,
                ctypes.byref(one),
                weight_address,
                a,
                x_address,
                b,
                ctypes.byref(zero),
                out_address,
                c,
                out_address,
                c,
                ctypes.byref(_Algorithm.from_buffer_copy(algorithm)),
                None,
                ctypes.c_size_t(0),
                stream,
            )
        )


def _create(create: Any, *arguments: Any) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _check(create(ctypes.byref(handle), *arguments))
    return handle


def _set(setter: Any, handle: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _check(setter(handle, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))))


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status}")
