"""Products of many rows: the fastest algorithm, and the very numbers of PyTorch's."""

import pytest
import torch
import torch.nn.functional as F

from toolkit.kernels import cublas

SHAPES = [(4096, 512, 256), (8192, 1536, 1024), (5000, 384, 640)]
SLOW, FAST, WRONG, BROKEN = (bytes([n]) * 64 for n in range(1, 5))
MILLISECONDS = {FAST: 1.0, SLOW: 4.0}
PYTORCHS = 2.0
aligned = cublas._aligned


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch, tmp_path):
    monkeypatch.setattr(cublas, "_chosen", {})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


class Machine:
    """A GPU that has four algorithms, and what was asked of it."""

    def __init__(self, monkeypatch):
        self.named, self.timed, self.ran, self.fails_with = (
            [SLOW, WRONG, BROKEN, FAST],
            [],
            [],
            None,
        )
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(cublas, "_can_choose", lambda x, weight: True)
        monkeypatch.setattr(cublas, "_aligned", lambda *tensors: True)
        monkeypatch.setattr(cublas, "_device_name", lambda x: "a GPU")
        monkeypatch.setattr(cublas, "_version", lambda: 1)
        monkeypatch.setattr(cublas, "_Plan", self.plan)
        monkeypatch.setattr(cublas, "_timed", self.time)

    def plan(self, x, weight):
        return self

    def algorithms(self):
        if self.fails_with:
            raise self.fails_with
        return self.named

    def multiply(self, algorithm, x, weight, out):
        if algorithm == BROKEN:
            raise RuntimeError("cuBLASLt failed with status 7")
        self.ran.append(algorithm)
        torch.mm(x, weight.T, out=out)
        out *= 2 if algorithm == WRONG else 1

    def time(self, product, runs, x, weight, out):
        (name,) = getattr(product, "args", None) or [b""]
        self.timed.append(name)
        return runs * MILLISECONDS.get(name, PYTORCHS) / 1e3

    def restarted(self):
        self.monkeypatch.setattr(cublas, "_chosen", {})
        self.timed, self.ran = [], []


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def rows(num_tokens, size, dtype=torch.float32, device="cpu"):
    generator = torch.Generator(device).manual_seed(num_tokens + size)
    return torch.randn(num_tokens, size, generator=generator, dtype=dtype, device=device)


def product():
    x, weight = rows(4, 16), rows(8, 16)
    assert torch.equal(cublas.linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("bias", [None, torch.ones(8)])
def test_on_a_cpu_it_is_pytorch_s(bias):
    x, weight = rows(4096, 16), rows(8, 16)
    with cublas.choosing():
        assert torch.equal(cublas.linear(x, weight, bias), F.linear(x, weight, bias))


def test_the_fastest_that_gives_the_same_numbers_is_chosen_once(machine):
    product()
    assert not machine.timed, "outside of `choosing` nothing is tried"
    with cublas.choosing():
        product()
        assert set(machine.timed) == {b"", SLOW, FAST}
        machine.timed.clear()
        product()
    assert not machine.timed
    machine.ran.clear()
    product()
    assert machine.ran == [FAST]


def test_pytorch_s_own_stays_where_none_is_clearly_faster(machine, monkeypatch):
    monkeypatch.setitem(MILLISECONDS, FAST, PYTORCHS * 0.995)
    for _ in range(2):
        with cublas.choosing():
            product()
        machine.restarted()
        product()
        assert not machine.ran


def test_what_was_chosen_is_kept_for_the_next_start(machine):
    with cublas.choosing():
        product()
    machine.restarted()
    with cublas.choosing():
        product()
    assert not machine.timed
    assert set(machine.ran) == {FAST}


@pytest.mark.parametrize("text", ["", "zz", "00", BROKEN.hex(), WRONG.hex()])
def test_what_was_kept_counts_only_if_it_gives_the_same_numbers(machine, tmp_path, text):
    with cublas.choosing():
        product()
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    file.write_text(text)
    machine.restarted()
    with cublas.choosing():
        product()
    product()
    if text:
        assert machine.ran[-1] == FAST
        assert bytes.fromhex(file.read_text()) == FAST
    else:
        assert not machine.ran, "PyTorch's own was kept"


def test_where_nothing_can_be_kept_it_is_chosen_at_each_start(machine, tmp_path, monkeypatch):
    occupied = tmp_path / "file"
    occupied.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(occupied))
    for _ in range(2):
        machine.restarted()
        with cublas.choosing():
            product()
        assert machine.timed
        product()
        assert machine.ran[-1] == FAST


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("status 1")]
)
def test_where_nothing_can_be_tried_it_is_pytorch_s(machine, error):
    machine.fails_with = error
    with cublas.choosing():
        product()
    product()
    assert not machine.ran


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_a_weight_that_tells_no_algorithm_from_another_chooses_none(machine, tmp_path, value):
    with cublas.choosing():
        cublas.linear(rows(4, 16), torch.full((8, 16), value))
    assert not machine.timed
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], (
        "and keeps none for other weights"
    )


def test_among_those_that_are_near_more_than_one_look_decides(machine, monkeypatch):
    near = {b"": 2.0, SLOW: 1.2, FAST: 1.21, WRONG: 1.5}
    looks = {SLOW: [1.3, 1.3, 1.0], FAST: [1.2, 1.2, 9.0]}

    def seconds(product, long, x, weight, out):
        (name,) = getattr(product, "args", None) or [b""]
        looked.append(name)
        if long == cublas.GLANCE:
            return near[name]
        return looks[name].pop() if name in looks else near[name]

    looked = []
    monkeypatch.setattr(cublas, "_seconds", seconds)
    monkeypatch.setattr(machine, "named", [SLOW, FAST])
    with cublas.choosing():
        product()
    machine.ran.clear()
    product()
    assert machine.ran == [FAST]
    assert looked.count(SLOW) == looked.count(FAST) == 1 + cublas.ROUNDS


def test_far_ones_are_glanced_at_once(machine):
    with cublas.choosing():
        product()
    assert machine.timed.count(SLOW) < machine.timed.count(FAST)


def test_addresses_that_algorithms_do_not_take_are_pytorch_s(machine, monkeypatch):
    with cublas.choosing():
        product()
    monkeypatch.setattr(cublas, "_aligned", aligned)
    monkeypatch.setattr(cublas, "ALIGNMENT", 16)
    x, weight = rows(4, 16), rows(8, 16)
    shifted = torch.empty(65)[1:].view(4, 16).copy_(x)
    for tokens, ran in ((x, [FAST]), (shifted, []), (rows(16, 4).T, [])):
        machine.ran.clear()
        assert torch.equal(cublas.linear(tokens, weight), F.linear(tokens, weight))
        assert machine.ran == ran


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "out", "size"), SHAPES)
def test_on_a_gpu_the_numbers_are_pytorch_s(num_tokens, out, size, dtype, monkeypatch):
    x, weight = rows(num_tokens, size, dtype, "cuda"), rows(out, size, dtype, "cuda")
    expected = F.linear(x, weight)
    assert len(cublas._Plan(x, weight).algorithms()) > 1
    with cublas.choosing():
        assert torch.equal(cublas.linear(x, weight), expected)
    assert len(cublas._chosen) == 1
    # A row too few has another shape, and then the same shape at an address that algorithms do not take.
    assert torch.equal(cublas.linear(x[1:], weight), F.linear(x[1:], weight))
    shifted = torch.empty(x.numel() + 8, dtype=dtype, device="cuda")[8:].view_as(x).copy_(x)
    assert torch.equal(cublas.linear(shifted, weight), expected)
    # Another start finds it.
    monkeypatch.setattr(cublas, "_chosen", {})
    monkeypatch.setattr(cublas, "_fastest", lambda *_: pytest.fail("timed once more"))
    with cublas.choosing():
        assert torch.equal(cublas.linear(x, weight), expected)


@pytest.mark.gpu
def test_on_a_gpu_every_algorithm_can_be_captured(monkeypatch):
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
