"""`tk verify`."""

import sys

import typer

from toolkit.cli.command import command
from toolkit.cli.root import app
from toolkit.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from toolkit.config.verify import VerifyConfig, VerifyEngineConfig


@command(app, "verify", ModelConfig, VerifyConfig, DeviceConfig, VerifyEngineConfig, ParallelConfig)
def verify(
    model: ModelConfig,
    config: VerifyConfig,
    device: DeviceConfig,
    engine: VerifyEngineConfig,
    parallel: ParallelConfig,
) -> None:
    """Check on this machine that a model is computed right.

    Compares log-probabilities of our kernels with those of plain PyTorch, of CUDA graphs (on a CPU:
    recorded steps) with those of single launches, of a batch with those of requests alone, of
    cached prefixes with those computed from the start, and of plain PyTorch with those of
    Transformers. The bounds are measured: they are what rounding does to this model.

    Exits with 1 if a comparison differs by more than rounding."""
    from toolkit.verify.report import report
    from toolkit.verify.run import verify as run

    settings = EngineConfig(
        model=model,
        device=device,
        cache=CacheConfig(
            block_size=engine.block_size,
            kv_cache_dtype=engine.kv_cache_dtype,
            enable_prefix_caching=engine.enable_prefix_caching,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            async_scheduling=engine.async_scheduling,
        ),
        parallel=parallel,
    )
    shows_progress = sys.stderr.isatty() and not config.json

    def progress(what: str) -> None:
        if shows_progress:
            print(f"  {what} …", file=sys.stderr, flush=True)

    raise typer.Exit(report(run(settings, progress), settings, as_json=config.json))
