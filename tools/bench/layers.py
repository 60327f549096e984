"""What a decode step's layers cost, embedding, head and sampling left out: `python -m tools.bench.layers FOLDER`.

Each request has one new token behind a context in the cache; weights are random. On a GPU the layers are replayed as a CUDA graph, on a CPU
they are called, by as many threads as PyTorch has, which are not bound to cores as an engine's are. Prints microseconds for one layer, the
median of several rounds in which the numbers of requests take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from toolkit.attention import AttentionBatch, choose_backend
from toolkit.hardware.graph_capture import captured
from toolkit.kernels import cpu
from toolkit.models.build import build_model, choose_dtype, load_config
from toolkit.models.decoder import Decoder
from toolkit.weights.loader import load_weights
from toolkit.worker.kv_cache import KVCache

BLOCK_SIZE = 16
ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the layers of a decode step.")
    parser.add_argument("folder", type=Path, help="a model's folder; weights in it are not read")
    parser.add_argument("--requests", default="1,2,8,16,32,64", metavar="N,...")
    parser.add_argument("--context", type=int, default=250, metavar="TOKENS")
    parser.add_argument(
        "--layers", type=int, metavar="N", help="instead of as many as the model has"
    )
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    requests = [int(number) for number in given.requests.split(",")]
    # CUDA graphs are not captured on the default stream.
    on_gpu = torch.cuda.is_available()
    with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext():  # type: ignore[no-untyped-call]
        times = measure(given.folder, requests, given.context, given.layers, given.dtype)
    for number, seconds in times.items():
        print(f"{number:5} requests   {seconds * 1e6:8.2f} us a layer")


@torch.inference_mode()
def measure(
    folder: Path, requests: list[int], context: int, layers: int | None, dtype: str
) -> dict[int, float]:
    """Seconds of one layer, by the number of requests."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config: Any = load_config(folder)
    config.num_hidden_layers = layers or config.num_hidden_layers
    kind = choose_dtype(dtype, config, device)
    model = build_model(config, folder, device=device, dtype=kind, max_model_len=context + 1)
    assert isinstance(model, Decoder)
    load_weights(model, folder, "dummy")
    if device.type == "cpu":
        cpu.set_num_threads(torch.get_num_threads())
        model.pack_weights()
    shape = model.attention_layers()[0].shape
    backend, _ = choose_backend("auto", device, kind, shape.head_size, BLOCK_SIZE)
    blocks = context // BLOCK_SIZE + 1
    cache = KVCache(
        model,
        num_blocks=max(requests) * blocks,
        num_host_blocks=0,
        block_size=BLOCK_SIZE,
        dtype=kind,
        device=device,
    )
    cache.bind(model, backend)
    cache.blocks.normal_()
    runs = {number: _layers(model, _batch(number, context, device)) for number in requests}
    times: dict[int, list[float]] = {number: [] for number in requests}
    for _ in range(ROUNDS):
        for number, run in runs.items():
            run()
            times[number].append(_seconds(run, device) / config.num_hidden_layers)
    return {number: median(some) for number, some in times.items()}


def _batch(requests: int, context: int, device: torch.device) -> AttentionBatch:
    blocks = context // BLOCK_SIZE + 1
    lengths = torch.full((requests,), context + 1, dtype=torch.int32)
    rows = torch.arange(requests, dtype=torch.int32)
    table = torch.arange(requests * blocks, dtype=torch.int32).view(requests, blocks)
    slots = table[:, -1].long() * BLOCK_SIZE + context % BLOCK_SIZE
    return AttentionBatch(
        positions=(lengths.long() - 1).to(device),
        slot_mapping=slots.to(device),
        query_start_loc=torch.arange(requests + 1, dtype=torch.int32).to(device),
        seq_lens=lengths.to(device),
        rows=rows.to(device),
        block_table=table.to(device),
        max_query_len=1,
        max_seq_len=context + 1,
        query_lens=torch.ones(requests, dtype=torch.int32).numpy(),
        context_lens=lengths.numpy(),
        order=rows.to(device),
    )


def _layers(model: Decoder, batch: AttentionBatch) -> Callable[[], object]:
    parameter = next(model.parameters())
    hidden = torch.randn(len(batch.positions), model.norm.weight.numel()).to(parameter)

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
    """What the graph reads must stay, and stays as an argument."""
    graph.replay()


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    first = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
    run()
    last = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


if __name__ == "__main__":
    main()
