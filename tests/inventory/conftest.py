"""`tk` with a local hub, in the test's process: new ones would import the same for each command."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_api
from huggingface_hub.utils import _cache_manager


@contextmanager
def hub_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Apply variables to the hub's library, which reads them only when it is imported."""
    endpoint, home = variables["HF_ENDPOINT"], Path(variables["HF_HOME"])
    offline = variables.get("HF_HUB_OFFLINE", "0") == "1"
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("HF_")]:
            patch.delenv(name)
        patch.setattr(hf_api.api, "endpoint", endpoint)
        patch.setattr(_cache_manager, "HF_HUB_CACHE", str(home / "hub"))
        for name, value in (
            ("ENDPOINT", endpoint),
            ("HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"),
            ("HF_HOME", str(home)),
            ("HF_HUB_CACHE", str(home / "hub")),
            ("HUGGINGFACE_HUB_CACHE", str(home / "hub")),
            ("HF_TOKEN_PATH", str(home / "token")),
            ("HF_XET_CACHE", str(home / "xet")),
            ("HF_HUB_OFFLINE", offline),
        ):
            assert hasattr(constants, name)
            patch.setattr(constants, name, value)
        yield


@pytest.fixture
def tk_with_hub(tk_here: Callable) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Function that runs `tk` with variables, of which some are the hub's library's."""

    def run(
        *arguments: str, cwd: Path, variables: Mapping[str, str], stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        with hub_variables(variables):
            return tk_here(*arguments, stdin=stdin, cwd=cwd, **variables)

    return run
