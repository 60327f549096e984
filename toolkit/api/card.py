"""The ready card: what start-up ends with."""

from __future__ import annotations

import sys

from toolkit import __version__
from toolkit.api.front import Served
from toolkit.config import ServerConfig


def ready_card(served: Served, name: str, host: str, port: int, config: ServerConfig, seconds: float) -> None:
    """Prints it on stderr: model, device, KV capacity, URL, and a curl line that works."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    info = served.info
    shown_host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{shown_host}:{port}"
    capacity = info.num_blocks * info.block_size
    table = Table.grid(padding=(0, 2))
    table.add_row("model", f"{name} ({_count(info.num_parameters)} parameters, {info.dtype})")
    table.add_row("device", f"{info.device}, attention: {info.attention_backend}")
    table.add_row(
        "KV cache",
        f"{capacity:,} tokens: {capacity / info.max_model_len:.1f} requests of the full {info.max_model_len:,}",
    )
    table.add_row("URL", f"[bold]{url}[/]  (OpenAI API at {url}/v1, docs at {url}/docs)")
    console = Console(stderr=True, highlight=False)
    console.print(
        Panel(table, title=f"tk {__version__} ready in {seconds:.1f} s", title_align="left", expand=False)
    )
    print(f"Try:\n{_curl(served, url, config)}", file=sys.stderr, flush=True)


def _curl(served: Served, url: str, config: ServerConfig) -> str:
    """A line to paste, without line breaks of its own."""
    key = " -H 'Authorization: Bearer '\"$TK_API_KEY\"" if config.api_key else ""
    if served.has_chat_template:
        path, body = "chat/completions", '{"messages": [{"role": "user", "content": "What is a KV cache?"}]}'
    elif served.has_tokenizer:
        path, body = "completions", '{"prompt": "The sea is", "max_tokens": 32}'
    else:
        path, body = "completions", '{"prompt": [1, 2, 3], "max_tokens": 32}'
    return f"curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{body}'"


def _count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
