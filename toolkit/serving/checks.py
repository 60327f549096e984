"""Checks of a server's settings, before the model is loaded. A dry run does them, too."""

import dataclasses
import os
import re
from pathlib import Path

from toolkit import plugins
from toolkit.api.http.connections.listener import tls
from toolkit.api.http.plugins import FrontEndPlugins
from toolkit.config import EngineConfig, ServerConfig
from toolkit.config.engine import DEMO
from toolkit.engine.front.pictures import check_sources
from toolkit.errors import ConfigError
from toolkit.files import failure
from toolkit.hub import require_path
from toolkit.text.chat_template import load_template


def check_server_settings(
    engine: EngineConfig, config: ServerConfig
) -> tuple[ServerConfig, tuple[str, ...]]:
    """Return the settings with the keys of --api-key-file, and the model's names in the API.

    Raises ToolkitError for files, plug-ins and names that cannot be used."""
    if engine.model.model is not None:
        require_path(engine.model.model)
    config = _load_key_file(config)
    _require_key_of_vllm(config)
    tls(config)
    if engine.model.chat_template is not None:
        load_template(engine.model.chat_template)
    check_sources(engine.pictures)
    plugins.named(plugins.Group.LOGITS_PROCESSORS, engine.plugins.logits_processors)
    FrontEndPlugins.load(config, strict=engine.plugins.strict_plugins)
    names = tuple(dict.fromkeys(config.served_model_name or [default_name(engine.model.model)]))
    _require_own_names(engine, names)
    return config, names


def default_name(model: str | None) -> str:
    """Return the model's name in the API: that on the hub, or the last part of its path."""
    if model is None:
        return DEMO
    folder = Path(model).expanduser()
    if folder.is_file():
        return folder.stem  # a GGUF file
    if not folder.is_dir():
        return model
    path = os.path.abspath(folder)
    cached = re.search(r"/models--([^/]+)/snapshots/[^/]+$", path)
    return cached[1].replace("--", "/") if cached else os.path.basename(path) or model


def _require_own_names(engine: EngineConfig, names: tuple[str, ...]) -> None:
    """Raise ConfigError if an adapter has a name of the model, or is said to be for another."""
    others = engine.lora.base_names - {*names, engine.model.model}
    if others:
        raise ConfigError(
            f"--lora-modules: base_model_name is {min(others)!r}, and the model is {names[0]!r}.",
            param="lora_modules",
        )
    shared = next((name for name in engine.lora.adapters if name in names), None)
    if shared is not None:
        raise ConfigError(
            f"--lora-modules: the model is called {shared!r}, too. Choose another name, or see "
            f"--served-model-name.",
            param="lora_modules",
        )


def _load_key_file(config: ServerConfig) -> ServerConfig:
    """Add the keys of --api-key-file to the others. Raises ConfigError for a file without keys."""
    if config.api_key_file is None:
        return config
    try:
        text = Path(config.api_key_file).read_text("utf-8-sig")
        lines = [line.strip() for line in text.splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--api-key-file {config.api_key_file} cannot be read: {failure(error)}.",
            param="api_key_file",
        ) from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {config.api_key_file} has no key.", param="api_key_file")
    return dataclasses.replace(config, api_key=(*config.api_key, *keys))


def _require_key_of_vllm(config: ServerConfig) -> None:
    """Raise ConfigError for a server without keys if vLLM's variable has one: it would be open."""
    if os.environ.get("VLLM_API_KEY") and not (config.api_key or config.admin_key):
        raise ConfigError(
            "VLLM_API_KEY is set, and this server would need no key. Set TK_API_KEY instead, or "
            "unset VLLM_API_KEY.",
            param="api_key",
        )
