"""Check PyTorch and Triton in a separate process: `python -m toolkit.doctor.probe` prints JSON.

This keeps the doctor light, and alive if a broken library crashes its process."""

import json
import subprocess
import sys
from typing import Any

TIMEOUT = 120.0  # seconds; the first import of PyTorch from a cold disk is slow


class Probe:
    """The probe's process. It starts at once and runs in the background."""

    _facts: dict[str, Any] | None = None

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def facts(self) -> dict[str, Any]:
        """Wait for the facts. They are `{"error": ...}` if the process failed."""
        if self._facts is None:
            self._facts = self._wait(TIMEOUT)
        return self._facts

    def _wait(self, timeout: float) -> dict[str, Any]:
        try:
            out, err = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return {"error": f"importing PyTorch took more than {timeout:.0f} s"}
        try:
            facts: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        except (ValueError, IndexError):
            lines = err.strip().splitlines()
            return {
                "error": lines[-1]
                if lines
                else f"the process ended with code {self._process.returncode}"
            }
        return facts


def probe() -> dict[str, Any]:
    """Return versions, the GPU, and whether a matrix product and one of our kernels are correct."""
    import torch

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "available": torch.cuda.is_available(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch._C._has_mkldnn,
        "num_threads": torch.get_num_threads(),
    }
    if facts["available"]:
        facts["gpu"] = torch.cuda.get_device_name()
        facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
        facts["kernels"] = _error_of(_run_kernel)
    else:
        facts |= _cpu_kernels()
    device = "cuda" if facts["available"] else "cpu"
    facts["product"] = _error_of(lambda: _run_product(device))
    return facts


def _cpu_kernels() -> dict[str, Any]:
    """Return the instruction set of the C++ kernels, or why they do not run."""
    try:
        from toolkit.kernels import cpu
    except Exception as error:  # a library of another version
        return {"kernels": f"{type(error).__name__}: {error}"}
    return {"kernels": cpu.problem(), "variant": cpu.variant()}


def _run_product(device: str) -> None:
    import torch

    x = torch.arange(64 * 64, dtype=torch.float32, device=device).view(64, 64) / 4096
    expected = (x[:, :, None] * x[None, :, :]).sum(1)
    if not torch.allclose(x @ x, expected, rtol=1e-2):
        raise RuntimeError(f"a matrix product on {device} is wrong")


def _run_kernel() -> None:
    """Compile a kernel and compare it with plain PyTorch."""
    import torch

    from toolkit.kernels import reference
    from toolkit.kernels.triton.norm import join

    x = torch.linspace(-1, 1, 4096, device="cuda").view(4, 1024)
    norm = reference.Norm(torch.ones(1024, device="cuda"), None, 1e-6, False)
    (ours,), _ = join(x.clone(), None, [norm])
    if not torch.allclose(ours, reference.normalize(x, norm), atol=1e-4):
        raise RuntimeError("the results of a Triton kernel are wrong")


def _error_of(work: Any) -> str | None:
    """Return the error of a call in one line, or None."""
    try:
        work()
    except Exception as error:  # of a driver, a compiler or a library
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
    return None


if __name__ == "__main__":
    print(json.dumps(probe()))
