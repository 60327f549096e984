"""`tk` with a local hub, in the test's process: new ones would import the same for each command."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.hub import hub_variables


@pytest.fixture
def tk_with_hub(tk_here: Callable) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Function that runs `tk` with variables, of which some are the hub's library's."""

    def run(
        *arguments: str, cwd: Path, variables: Mapping[str, str], stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        with hub_variables(variables):
            return tk_here(*arguments, stdin=stdin, cwd=cwd, **variables)

    return run
