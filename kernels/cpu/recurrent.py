"""Layers with a state for each request, in one kernel each: gated delta nets and gated short
convolutions. And gates of rows."""

from __future__ import annotations

import ctypes

import torch

from toolkit.kernels.cpu.library import FLOAT, POINTER, SIZE, Kernel, available

DTYPES = (torch.float32, torch.bfloat16)
_delta_net = Kernel("tk_delta_net", POINTER, POINTER, POINTER, POINTER)
_gated_convolution = Kernel("tk_gated_convolution", POINTER, POINTER, POINTER, POINTER)
_gate_rows = Kernel("tk_gate_rows", POINTER, POINTER, SIZE, SIZE, SIZE, SIZE)
_multiply_rows = Kernel("tk_multiply_rows", POINTER, POINTER, SIZE, SIZE, SIZE, SIZE)


def supports(inputs: torch.Tensor, states: torch.Tensor | None = None) -> bool:
    """Return True if there are kernels for these of a layer."""
    has_types = inputs.dtype in DTYPES and (states is None or states.dtype == torch.float32)
    return has_types and inputs.device.type == "cpu" and available()


class _Net(ctypes.Structure):
    """Mirror of `Net` in recurrent.cpp."""

    _fields_ = [  # ctypes wants a list
        *((name, POINTER) for name in ("kernel", "decay", "time", "norm", "inputs", "states")),
        *((name, SIZE) for name in ("k_heads", "v_heads", "k_size", "v_size")),
        *((name, SIZE) for name in ("width", "rows", "is_bf16")),
        ("eps", FLOAT),
        ("rate", FLOAT),
    ]


class _Convolution(ctypes.Structure):
    """Mirror of `Convolution` in recurrent.cpp."""

    _fields_ = [
        *((name, POINTER) for name in ("kernel", "bias", "inputs")),
        *((name, SIZE) for name in ("channels", "width", "rows", "is_bf16")),
    ]


class _Step(ctypes.Structure):
    """Mirror of `RecurrentStep` in recurrent.cpp."""

    _fields_ = [
        *((name, POINTER) for name in ("starts", "lengths", "reads", "writes", "keeps", "kept")),
        *((name, POINTER) for name in ("begins", "written")),
        ("num_reqs", SIZE),
    ]


class RecurrentStep:
    """A step's requests and the slots of their states, for all layers.

    starts: [num_reqs + 1], first token of each; lengths: with this step's tokens; the others as in
    `toolkit.attention.StateRows`, int32 [num_reqs]. Raises ValueError for others."""

    def __init__(
        self,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        reads: torch.Tensor,
        writes: torch.Tensor,
        keeps: torch.Tensor,
        kept: torch.Tensor,
        begins: torch.Tensor | None = None,
        written: torch.Tensor | None = None,
    ) -> None:
        tensors = (starts, lengths, reads, writes, keeps, kept, begins, written)
        given = [tensor for tensor in tensors if tensor is not None]
        counts = [len(tensor) for tensor in given]
        if counts != [counts[1] + 1, *[counts[1]] * (len(given) - 1)] or not all(
            tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in given
        ):
            raise ValueError(
                "a step's tensors must be int32, contiguous, and of one length but for the first, "
                f"not {counts} of {[tensor.dtype for tensor in given]}"
            )
        self._tensors = given  # keeps them alive: the structure has only their addresses
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        self._step = _Step(*addresses, counts[1])
        self.address = ctypes.addressof(self._step)


class DeltaNet:
    """A layer: `recurrent.delta_net`, which has the arguments.

    inputs: in fp32 or bfloat16, as the rows; states: fp32. Raises ValueError for others."""

    def __init__(
        self,
        kernel: torch.Tensor,
        a_log: torch.Tensor,
        time: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        rate: float,
        inputs: torch.Tensor,
        states: torch.Tensor,
        num_k_heads: int,
    ) -> None:
        _, v_heads, k_size, v_size = states.shape
        channels, width = kernel.shape
        if (
            inputs.dtype not in DTYPES
            or states.dtype != torch.float32
            or inputs.shape[1] < width
            or inputs.shape[2] != channels + 2 * v_heads
            or channels != 2 * num_k_heads * k_size + v_heads * v_size
            or not (inputs.is_contiguous() and states.is_contiguous())
        ):
            raise ValueError(
                f"inputs {list(inputs.shape)} in {inputs.dtype} and states "
                f"{list(states.shape)} in {states.dtype} are not those of {num_k_heads} heads of "
                f"keys and a convolution {list(kernel.shape)}"
            )
        self.dtype, self._values = inputs.dtype, v_heads * v_size
        self._columns = channels + self._values + 2 * v_heads
        given = kernel.T, -a_log.float().exp(), time, norm
        self._tensors = *(one.float().contiguous() for one in given), inputs, states
        self._net = _Net(
            *(tensor.data_ptr() for tensor in self._tensors),
            *(num_k_heads, v_heads, k_size, v_size, width, inputs.shape[1]),
            self.dtype == torch.bfloat16,
            eps,
            rate,
        )
        self._address = ctypes.addressof(self._net)

    def __call__(self, y: torch.Tensor, step: RecurrentStep) -> torch.Tensor:
        """Return [num_tokens, v_heads · v_size]. y: [num_tokens, q | k | v | z | b | a]."""
        if y.shape[1] != self._columns or y.dtype != self.dtype or not y.is_contiguous():
            raise ValueError(
                f"rows must have {self._columns} columns in {self.dtype}, contiguous, not "
                f"{list(y.shape)} in {y.dtype}"
            )
        out = torch.empty(len(y), self._values, dtype=y.dtype)
        _delta_net.run(self._address, step.address, y.data_ptr(), out.data_ptr())
        return out


class GatedConvolution:
    """A layer: `recurrent.gated_convolution`, which has the arguments.

    inputs: in fp32 or bfloat16, as the rows. Raises ValueError for others."""

    def __init__(
        self, kernel: torch.Tensor, bias: torch.Tensor | None, inputs: torch.Tensor
    ) -> None:
        channels, width = kernel.shape
        if (
            inputs.dtype not in DTYPES
            or inputs.shape[1] < width
            or inputs.shape[2] != channels
            or not inputs.is_contiguous()
        ):
            raise ValueError(
                f"inputs {list(inputs.shape)} in {inputs.dtype} are not those of a convolution "
                f"{list(kernel.shape)}"
            )
        self.dtype, self._channels = inputs.dtype, channels
        own_bias = None if bias is None else bias.float().contiguous()
        self._tensors = kernel.T.float().contiguous(), own_bias, inputs
        addresses = (None if one is None else one.data_ptr() for one in self._tensors)
        is_bf16 = self.dtype == torch.bfloat16
        self._net = _Convolution(*addresses, channels, width, inputs.shape[1], is_bf16)
        self._address = ctypes.addressof(self._net)

    def __call__(self, y: torch.Tensor, step: RecurrentStep) -> torch.Tensor:
        """Return [num_tokens, channels]. y: [num_tokens, b | c | x]."""
        if y.shape[1] != 3 * self._channels or y.dtype != self.dtype or not y.is_contiguous():
            raise ValueError(
                f"rows must have {3 * self._channels} columns in {self.dtype}, contiguous, not "
                f"{list(y.shape)} in {y.dtype}"
            )
        out = torch.empty(len(y), self._channels, dtype=y.dtype)
        _gated_convolution.run(self._address, step.address, y.data_ptr(), out.data_ptr())
        return out


def gate_rows(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiply x [rows, size] by sigmoid(gate), in place. Rows of `gate` may be apart."""
    _multiply(_gate_rows, x, gate)


def multiply_rows(x: torch.Tensor, y: torch.Tensor) -> None:
    """Multiply x [rows, size] by y, in place. Rows of `y` may be apart."""
    _multiply(_multiply_rows, x, y)


def _multiply(kernel: Kernel, x: torch.Tensor, gate: torch.Tensor) -> None:
    if x.dtype not in DTYPES or gate.dtype != x.dtype or gate.shape != x.shape:
        raise ValueError(f"rows and gates must be alike, not {list(x.shape)}, {list(gate.shape)}")
    if not x.is_contiguous() or gate.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    is_bf16 = x.dtype == torch.bfloat16
    kernel.run(x.data_ptr(), gate.data_ptr(), gate.stride(0), *x.shape, is_bf16)
