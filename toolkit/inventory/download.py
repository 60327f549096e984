"""`tk pull`: download a model into the hub's cache, with huggingface_hub."""

from pathlib import Path

from toolkit import hub
from toolkit.errors import ConfigError, ModelNotFoundError
from toolkit.hub.progress import exit_on_ctrl_c
from toolkit.inventory.recommended import advice


def pull(name: str, revision: str | None) -> Path:
    """Download all files that `tk serve` needs, and return the model's folder, or its GGUF file.

    Cached files are kept, and broken connections resumed. Raises ModelNotFoundError if the hub
    does not answer, has no such model or denies access, and CheckpointError if the disk is full."""
    if hub.is_demo(name):
        raise ConfigError(f"{name} comes with tk: there is nothing to download.")
    if hub.is_path(name):
        raise ConfigError(
            f"tk pull takes the name of a model on the hub, such as org/model; got {name!r}."
            f"{hub.address_hint(name)}"
        )
    try:
        with exit_on_ctrl_c(name):
            return hub.fetch(name, revision, with_card=True)
    except hub.HubUnreachableError as unreachable:
        cached = hub.cached_snapshot(name, revision, with_weights=True)
        earlier = f" An earlier download is in {cached}." if cached is not None else ""
        raise ModelNotFoundError(
            f"{name} was not downloaded: {unreachable.message}. The hub is {_endpoint()} "
            f"(HF_ENDPOINT). Complete files are kept.{earlier}{hub.owner_hint(name)}{advice(name)}"
        ) from None
    except ModelNotFoundError as error:
        raise ModelNotFoundError(error.message + advice(name)) from None


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)
