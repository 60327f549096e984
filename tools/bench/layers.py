"""Time the layers of a decode step: `python -m tools.bench.layers FOLDER`.

Embedding, head and sampling are not included. Each request has one new token after a cached
context; weights are random. A GPU replays the layers as a CUDA graph. A CPU runs them on as many
threads as PyTorch has, which are not bound to cores, unlike an engine's. Prints the microseconds of
one layer: the median of several rounds that alternate between the numbers of requests."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from toolkit.attention import AttentionBatch, Backends, GroupTable
from toolkit.hardware.graph_capture import captured
from toolkit.kernels import cpu
from toolkit.models.build import build_model, choose_dtype, load_config
from toolkit.models.decoder import Decoder
from toolkit.models.memory import MemoryLayout
from toolkit.models.model import PagedAttention
from toolkit.weights.loading.loader import load_weights
from toolkit.worker.kv_cache import KVCache

BLOCK_SIZE = 16
ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the layers of a decode step.")
    parser.add_argument("folder", type=Path, help="model folder; weights are not read")
    parser.add_argument("--requests", default="1,2,8,16,32,64", metavar="N,...")
    parser.add_argument("--context", type=int, default=250, metavar="TOKENS")
    parser.add_argument(
        "--layers", type=int, metavar="N", help="number of layers; default: the model's"
    )
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    requests = [int(number) for number in args.requests.split(",")]
    # CUDA graphs cannot be captured on the default stream.
    on_gpu = torch.cuda.is_available()
    stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        times = measure(args.folder, requests, args.context, args.layers, args.dtype)
    for number, seconds in times.items():
        print(f"{number:5} requests   {seconds * 1e6:8.2f} us per layer")


@torch.inference_mode()
def measure(
    folder: Path, requests: list[int], context: int, layers: int | None, dtype: str
) -> dict[int, float]:
    """Return the seconds of one layer by number of requests."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config: Any = load_config(folder)
    config.num_hidden_layers = layers or config.num_hidden_layers
    kind = choose_dtype(dtype, config, device)
    model = build_model(config, device=device, dtype=kind, max_model_len=context + 1)
    assert isinstance(model, Decoder)
    load_weights(model, folder, "dummy")
    if device.type == "cpu":
        cpu.set_num_threads(torch.get_num_threads())
        model.pack_weights()
    layout = MemoryLayout.of(model.memory, BLOCK_SIZE, kind.itemsize, kind.itemsize)
    sizes = [one.parts[0].size for one in layout.of_tokens]
    backends = Backends("auto", device, kind, sizes, BLOCK_SIZE)
    blocks = context // BLOCK_SIZE + 1
    cache = KVCache(
        layout,
        num_pages=max(requests) * blocks,
        num_host_pages=0,
        dtype=kind,
        device=device,
    )
    cache.bind(model, backends)
    for keeper in model.keepers():
        if isinstance(keeper, PagedAttention):
            keeper.k_cache.normal_()
            keeper.v_cache.normal_()
    runs = {number: _layers(model, _batch(number, context, device)) for number in requests}
    times: dict[int, list[float]] = {number: [] for number in requests}
    for _ in range(ROUNDS):
        for number, run in runs.items():
            run()
            times[number].append(_seconds(run, device) / config.num_hidden_layers)
    return {number: median(seconds) for number, seconds in times.items()}


def _batch(requests: int, context: int, device: torch.device) -> AttentionBatch:
    blocks = context // BLOCK_SIZE + 1
    lengths = torch.full((requests,), context + 1, dtype=torch.int32)
    rows = torch.arange(requests, dtype=torch.int32)
    table = torch.arange(requests * blocks, dtype=torch.int32).view(requests, blocks)
    slots = table[:, -1].long() * BLOCK_SIZE + context % BLOCK_SIZE
    return AttentionBatch(
        positions=(lengths.long() - 1).to(device),
        tables=(GroupTable(table.to(device), slots.to(device)),),
        query_start_loc=torch.arange(requests + 1, dtype=torch.int32).to(device),
        seq_lens=lengths.to(device),
        rows=rows.to(device),
        max_query_len=1,
        max_seq_len=context + 1,
        order=rows.to(device),
    )


def _layers(model: Decoder, batch: AttentionBatch) -> Callable[[], object]:
    parameter = next(model.parameters())
    hidden = torch.randn(len(batch.positions), model.hidden_size).to(parameter)

    def call() -> None:
        model(batch.positions, batch, hidden.clone())

    call()
    if not parameter.is_cuda:
        return call
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
        call()
    return partial(_replay, graph, hidden, batch)


def _replay(graph: torch.cuda.CUDAGraph, _hidden: torch.Tensor, _step: AttentionBatch) -> None:
    """Replay the graph. The other arguments keep the tensors that it reads alive."""
    graph.replay()


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    first = _record_event()
    run()
    last = _record_event()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    recorded: torch.cuda.Event = torch.cuda.current_stream().record_event(event)
    return recorded


if __name__ == "__main__":
    main()
