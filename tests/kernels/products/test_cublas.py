"""Products of many rows use the fastest algorithm, and equal PyTorch's bitwise."""

import pytest
import torch
import torch.nn.functional as F

from toolkit.kernels import cublas

SHAPES = [(4096, 512, 256), (8192, 1536, 1024), (5000, 384, 640)]
SLOW, FAST, WRONG, BROKEN = (bytes([n]) * 64 for n in range(1, 5))
MILLISECONDS = {FAST: 1.0, SLOW: 4.0}
PYTORCH_MILLISECONDS = 2.0
aligned = cublas._aligned


@pytest.fixture(autouse=True)
def no_choices(monkeypatch, tmp_path):
    monkeypatch.setattr(cublas, "_chosen", {})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


class FakeGPU:
    """A GPU with four algorithms. Records which are timed and run."""

    def __init__(self, monkeypatch):
        self.candidates = [SLOW, WRONG, BROKEN, FAST]
        self.timed, self.ran, self.error = [], [], None
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(cublas, "_can_choose", lambda x, weight: True)
        monkeypatch.setattr(cublas, "_aligned", lambda *tensors: True)
        monkeypatch.setattr(cublas, "_device_name", lambda x: "a GPU")
        monkeypatch.setattr(cublas, "_version", lambda: 1)
        monkeypatch.setattr(cublas, "_Plan", self.plan)
        monkeypatch.setattr(cublas, "_time", self.time)

    def plan(self, x, weight):
        return self

    def algorithms(self):
        if self.error:
            raise self.error
        return self.candidates

    def multiply(self, algorithm, x, weight, out):
        if algorithm == BROKEN:
            raise RuntimeError("cuBLASLt failed with status 7")
        self.ran.append(algorithm)
        torch.mm(x, weight.T, out=out)
        out *= 2 if algorithm == WRONG else 1

    def time(self, product, runs, x, weight, out):
        (name,) = getattr(product, "args", None) or [b""]
        self.timed.append(name)
        return runs * MILLISECONDS.get(name, PYTORCH_MILLISECONDS) / 1e3

    def restart(self):
        self.monkeypatch.setattr(cublas, "_chosen", {})
        self.timed, self.ran = [], []


@pytest.fixture
def gpu(monkeypatch):
    return FakeGPU(monkeypatch)


def rows(num_tokens, size, dtype=torch.float32, device="cpu"):
    generator = torch.Generator(device).manual_seed(num_tokens + size)
    return torch.randn(num_tokens, size, generator=generator, dtype=dtype, device=device)


def check_product():
    x, weight = rows(4, 16), rows(8, 16)
    assert torch.equal(cublas.linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("bias", [None, torch.ones(8)])
def test_cpus_use_pytorch(bias):
    x, weight = rows(4096, 16), rows(8, 16)
    with cublas.choosing():
        assert torch.equal(cublas.linear(x, weight, bias), F.linear(x, weight, bias))


def test_the_fastest_exact_algorithm_is_chosen_once(gpu):
    check_product()
    assert not gpu.timed, "nothing is timed outside of `choosing`"
    with cublas.choosing():
        check_product()
        assert set(gpu.timed) == {b"", SLOW, FAST}
        gpu.timed.clear()
        check_product()
    assert not gpu.timed
    gpu.ran.clear()
    check_product()
    assert gpu.ran == [FAST]


def test_pytorchs_choice_stays_if_none_is_clearly_faster(gpu, monkeypatch):
    monkeypatch.setitem(MILLISECONDS, FAST, PYTORCH_MILLISECONDS * 0.995)
    for _ in range(2):
        with cublas.choosing():
            check_product()
        gpu.restart()
        check_product()
        assert not gpu.ran


def test_choices_are_stored_for_the_next_start(gpu):
    with cublas.choosing():
        check_product()
    gpu.restart()
    with cublas.choosing():
        check_product()
    assert not gpu.timed
    assert set(gpu.ran) == {FAST}


@pytest.mark.parametrize("text", ["", "zz", "00", BROKEN.hex(), WRONG.hex()])
def test_stored_choices_that_are_not_exact_are_replaced(gpu, tmp_path, text):
    with cublas.choosing():
        check_product()
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    file.write_text(text)
    gpu.restart()
    with cublas.choosing():
        check_product()
    check_product()
    if text:
        assert gpu.ran[-1] == FAST
        assert bytes.fromhex(file.read_text()) == FAST
    else:
        assert not gpu.ran, "PyTorch's choice was stored"


def test_choices_are_made_at_each_start_if_none_can_be_stored(gpu, tmp_path, monkeypatch):
    occupied = tmp_path / "file"
    occupied.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(occupied))
    for _ in range(2):
        gpu.restart()
        with cublas.choosing():
            check_product()
        assert gpu.timed
        check_product()
        assert gpu.ran[-1] == FAST


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("status 1")]
)
def test_pytorch_is_used_if_no_algorithm_can_be_timed(gpu, error):
    gpu.error = error
    with cublas.choosing():
        check_product()
    check_product()
    assert not gpu.ran


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_weights_that_hide_wrong_algorithms_choose_none(gpu, tmp_path, value):
    with cublas.choosing():
        cublas.linear(rows(4, 16), torch.full((8, 16), value))
    assert not gpu.timed
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "nothing is stored"


def test_near_candidates_are_timed_several_times(gpu, monkeypatch):
    brief = {b"": 2.0, SLOW: 1.2, FAST: 1.21, WRONG: 1.5}
    long = {SLOW: [1.3, 1.3, 1.0], FAST: [1.2, 1.2, 9.0]}

    def seconds(product, duration, x, weight, out):
        (name,) = getattr(product, "args", None) or [b""]
        timed.append(name)
        if duration == cublas.SHORT_SECONDS:
            return brief[name]
        return long[name].pop() if name in long else brief[name]

    timed = []
    monkeypatch.setattr(cublas, "_seconds", seconds)
    monkeypatch.setattr(gpu, "candidates", [SLOW, FAST])
    with cublas.choosing():
        check_product()
    gpu.ran.clear()
    check_product()
    assert gpu.ran == [FAST]
    assert timed.count(SLOW) == timed.count(FAST) == 1 + cublas.ROUNDS


def test_far_candidates_are_timed_briefly(gpu):
    with cublas.choosing():
        check_product()
    assert gpu.timed.count(SLOW) < gpu.timed.count(FAST)


def test_unaligned_addresses_use_pytorch(gpu, monkeypatch):
    with cublas.choosing():
        check_product()
    monkeypatch.setattr(cublas, "_aligned", aligned)
    monkeypatch.setattr(cublas, "ALIGNMENT", 16)
    x, weight = rows(4, 16), rows(8, 16)
    shifted = torch.empty(65)[1:].view(4, 16).copy_(x)
    for tokens, ran in ((x, [FAST]), (shifted, []), (rows(16, 4).T, [])):
        gpu.ran.clear()
        assert torch.equal(cublas.linear(tokens, weight), F.linear(tokens, weight))
        assert gpu.ran == ran


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "out", "size"), SHAPES)
def test_gpu_results_equal_pytorch(num_tokens, out, size, dtype, monkeypatch):
    x, weight = rows(num_tokens, size, dtype, "cuda"), rows(out, size, dtype, "cuda")
    expected = F.linear(x, weight)
    assert len(cublas._Plan(x, weight).algorithms()) > 1
    with cublas.choosing():
        assert torch.equal(cublas.linear(x, weight), expected)
    assert len(cublas._chosen) == 1
    # One row fewer is another shape. After that, the same shape at an unaligned address.
    assert torch.equal(cublas.linear(x[1:], weight), F.linear(x[1:], weight))
    shifted = torch.empty(x.numel() + 8, dtype=dtype, device="cuda")[8:].view_as(x).copy_(x)
    assert torch.equal(cublas.linear(shifted, weight), expected)
    # The next start finds the stored choice.
    monkeypatch.setattr(cublas, "_chosen", {})
    monkeypatch.setattr(cublas, "_fastest", lambda *_: pytest.fail("timed again"))
    with cublas.choosing():
        assert torch.equal(cublas.linear(x, weight), expected)


@pytest.mark.gpu
def test_gpu_algorithms_can_be_captured(monkeypatch):
    x, weight = rows(4096, 1024, torch.bfloat16, "cuda"), rows(2048, 1024, torch.bfloat16, "cuda")
    reference, plan = x.float() @ weight.float().T, cublas._Plan(x, weight)
    for algorithm in plan.algorithms():
        out = torch.empty(len(x), len(weight), dtype=x.dtype, device="cuda")
        plan.multiply(algorithm, x, weight, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan.multiply(algorithm, x, weight, out)
        out.zero_()
        graph.replay()
        assert (out.float() - reference).abs().max() < 0.01 * reference.abs().max()
