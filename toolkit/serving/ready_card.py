"""The summary that is printed when the server is ready."""

import logging
import os
import shlex
import socket
import sys

from toolkit.config import ServerConfig
from toolkit.logs import writes_json
from toolkit.sampling.params import describe_sampling
from toolkit.serving.front import LoadedModel
from toolkit.units import count
from toolkit.version import __version__

logger = logging.getLogger(__name__)

MOST_NAMES = 8  # of adapters


def print_ready_card(
    model: LoadedModel, listener: socket.socket, config: ServerConfig, seconds: float
) -> None:
    """Print model, device, KV cache size, addresses and commands that work to stderr.

    A log in JSON gets them as one line."""
    url, network = client_url(listener, config), network_url(listener, config)
    title = f"tk {__version__} ready in {seconds:.1f} s"
    facts = _facts(model, config)
    curl = _curl(model, url, config)
    if writes_json():
        fields = {"seconds": round(seconds, 3), **facts, "URL": url, "curl": curl}
        fields |= {} if network is None else {"network": network}
        logger.info("%s at %s", title, url, extra={"fields": fields})
        return
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from toolkit.console import SafeConsole

    table = Table.grid(padding=(0, 2))
    for fact in facts.items():
        table.add_row(*fact)
    more = f"  (OpenAI API at {url}/v1, docs at {url}/docs)"
    table.add_row("URL", Text.assemble((url, "bold"), more))
    transcribes = model.facts.transcribes
    if config.web and config.uds is None and not transcribes:
        table.add_row("chat", f"open {url} in a browser")
    if network is not None:
        table.add_row("network", Text.assemble((network, "bold"), "  for other machines"))
    SafeConsole(stderr=True).print(Panel(table, title=title, title_align="left", expand=False))
    can_chat = model.info.generates and model.facts.has_chat_template and not transcribes
    commands = ["tk transcribe speech.wav"] if transcribes else ["tk chat"] if can_chat else []
    if config.api_key and not os.environ.get("TK_API_KEY"):
        commands = [f"TK_API_KEY=KEY {one}" for one in commands]
    commands = [] if config.uds is not None else commands
    print("Try:", *commands, curl, sep="\n", file=sys.stderr, flush=True)


def _facts(model: LoadedModel, config: ServerConfig) -> dict[str, str]:
    """Return the rows of the card above its URL."""
    info, name = model.info, model.setup.names[0]
    facts = {
        "model": f"{name} ({count(info.model_parameters)} parameters, {info.weight_type})",
        "device": f"{info.device}, attention: {info.attention_backend}",
    }
    if len(model.infos) > 1:
        number = len(model.infos)
        facts["engines"] = f"{number}, each with the complete model and its own KV cache"
    if info.chunks_prompts:
        capacity = sum(one.cache_tokens for one in model.infos)
        facts["KV cache"] = (
            f"{capacity:,} tokens: {capacity / info.max_model_len:.1f} requests of the full "
            f"{info.max_model_len:,}"
        )
    if info.hearing is not None:
        tokens = info.hearing.tokens
        known = f"{len(tokens.languages)} languages" if tokens.is_multilingual else "English alone"
        facts["sound"] = f"{info.hearing.seconds:g} s at once; {known}"
    elif info.generates:
        facts["sampling"] = f"{describe_sampling(model.facts.sampling)} (by default)"
    if info.pooling is not None:
        tasks = ", ".join(info.tasks)
        facts["tasks"] = f"{tasks}: texts of up to {info.max_model_len:,} tokens"
    if info.max_lora_rank:
        names = [one.name for one in info.adapters]
        listed = ", ".join(names[:MOST_NAMES]) or "none in memory yet"
        listed += f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        facts["adapters"] = f"{listed}; ranks of up to {info.max_lora_rank}"
    if config.uds is not None:
        facts["socket"] = config.uds
    return facts


def client_url(listener: socket.socket, config: ServerConfig) -> str:
    """Return the address for clients on this machine."""
    scheme = "http" if config.ssl_certfile is None else "https"
    if config.uds is not None:
        return f"{scheme}://localhost"
    host, port = listener.getsockname()[:2]
    shown_host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
        host, f"[{host}]" if ":" in host else host
    )
    return f"{scheme}://{shown_host}:{port}"


def network_url(listener: socket.socket, config: ServerConfig) -> str | None:
    """Return the address for clients on other machines, if the server listens on all networks.

    None also for a machine without a network."""
    if config.uds is not None or listener.getsockname()[0] not in ("0.0.0.0", "::"):
        return None
    # Documentation addresses (RFC 5737, 3849): connecting a datagram socket sends nothing.
    remote = "192.0.2.1" if listener.family == socket.AF_INET else "2001:db8::1"
    with socket.socket(listener.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((remote, 9))
        except OSError:  # no route
            return None
        host = probe.getsockname()[0]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def _curl(model: LoadedModel, url: str, config: ServerConfig) -> str:
    """Return a command in one line, to be pasted. KEY stands for a key that no variable has."""
    name = "$TK_API_KEY" if os.environ.get("TK_API_KEY") else "KEY"
    key = f' -H "Authorization: Bearer {name}"' if config.api_key else ""
    task = None if model.info.generates or model.info.pooling is None else model.info.pooling.task
    if task == "embed":
        path, body = "embeddings", '{"input": "The sea is calm."}'
    elif task == "score":
        path, body = "score", '{"text_1": "What is the sea like?", "text_2": "The sea is calm."}'
    elif task == "classify":
        path, body = "classify", '{"input": "The sea is calm."}'
    elif model.facts.has_chat_template:
        path, body = (
            "chat/completions",
            '{"messages": [{"role": "user", "content": "What is a KV cache?"}]}',
        )
    elif model.facts.has_tokenizer:
        path, body = "completions", '{"prompt": "The sea is", "max_tokens": 32}'
    else:
        path, body = "completions", '{"prompt": [1, 2, 3], "max_tokens": 32}'
    reach = f"--unix-socket {shlex.quote(config.uds)} " if config.uds is not None else ""
    if model.facts.transcribes:
        return f"curl {reach}{url}/v1/audio/transcriptions{key} -F file=@speech.wav"
    return f"curl {reach}{url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{body}'"
