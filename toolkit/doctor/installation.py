"""Checks of the installation: packages, settings, port, downloads, manual, completions."""

import os
import re
import socket
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from toolkit.config.sources import unknown_variables
from toolkit.doctor.finding import Finding
from toolkit.doctor.shipped import CHECKOUT, COMPLETIONS, completion_path, shipped
from toolkit.errors import ToolkitError
from toolkit.hardware.ports import bind_failure
from toolkit.units import size

DISTRIBUTION = "tk-llm"


def check_installation(variables: list[str], host: str, port: int) -> Iterator[Finding]:
    """Run the checks. `variables`: of all settings. `host`, `port`: of `tk serve`."""
    yield _packages()
    if (CHECKOUT / "constraints.txt").is_file():
        yield _versions(CHECKOUT / "constraints.txt")
    yield _variables(os.environ, variables)
    yield _port(host, port)
    yield _downloads()
    yield _manual()
    yield _completions(Path(os.environ.get("SHELL", "")).name)


def requirements() -> list[Requirement]:
    """Return the package's requirements, without extras."""
    parsed = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or []]
    return [one for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _packages() -> Finding:
    required = requirements()
    problems = []
    for one in required:
        version = version_of(one.name)
        if version is None:
            problems.append(f"{one.name} is missing")
        elif not one.specifier.contains(version, prereleases=True):
            problems.append(f"{one.name} is {version}, and tk needs {one.specifier}")
    if problems:
        return Finding("packages", "fail", "; ".join(problems), "pip install --upgrade tk-llm")
    return Finding("packages", "pass", f"all {len(required)} required packages")


def _versions(constraints: Path) -> Finding:
    """Compare the versions in a checkout with those that the tests use."""
    pins = dict(line.split("==") for line in constraints.read_text().split() if "==" in line)
    known = {one.name.lower().replace("_", "-") for one in requirements()}
    others = [
        f"{name} {version} (tested: {pin})"
        for name, pin in pins.items()
        if name.lower().replace("_", "-") in known
        and (version := version_of(name)) is not None
        and version.partition("+")[0] != pin
    ]
    if others:
        text = f"untested versions: {', '.join(others)}"
        fix = "pip install --constraint constraints.txt --editable ."
        return Finding("versions", "warn", text, fix)
    return Finding("versions", "pass", "as in constraints.txt")


def _variables(environment: Mapping[str, str], known: list[str]) -> Finding:
    """Find TK_* variables that no setting reads, likely misspelled."""
    present = sorted(name for name in environment if name.startswith("TK_"))
    if unknown := unknown_variables(known, environment):
        fix = " ".join(hint.strip() for hint in unknown.values()).strip()
        fix = fix or "See tk man tk.toml for all variables."
        return Finding("variables", "warn", f"unknown: {', '.join(unknown)}", fix)
    return Finding("variables", "pass", f"{', '.join(present) or 'no TK_* variable is set'}")


def _port(host: str, port: int) -> Finding:
    name = f"{host}:{port}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if is_serving(host, port):
                return Finding("port", "pass", f"{name}: a healthy server runs there")
            text = f"{name} is not available: {bind_failure(error, port)}"
            return Finding("port", "warn", text, "Use another port: tk serve --port 8001.")
    return Finding("port", "pass", f"{name} is free")


def is_serving(host: str, port: int) -> bool:
    """Return whether a healthy server listens there."""
    from urllib.request import ProxyHandler, build_opener

    address = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
        host, f"[{host}]" if ":" in host else host
    )
    try:
        with build_opener(ProxyHandler({})).open(
            f"http://{address}:{port}/livez", timeout=2.0
        ) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):
        return False


def _downloads() -> Finding:
    """Count the models in the hub's cache, and find interrupted downloads."""
    from huggingface_hub import constants

    from toolkit.inventory.find import cached_repos

    repos = cached_repos()
    text = f"{len(repos)} models, {size(sum(repo.size_on_disk for repo in repos))}"
    partial = list(Path(constants.HF_HUB_CACHE).glob("models--*/blobs/*.incomplete"))
    if partial:
        names = {path.parts[-3].removeprefix("models--").replace("--", "/") for path in partial}
        fix = f"tk pull {' or '.join(sorted(names))} resumes it."
        return Finding("downloads", "warn", f"{text}; interrupted: {', '.join(sorted(names))}", fix)
    return Finding("downloads", "pass", text)


def _manual() -> Finding:
    try:
        page = shipped("man", "tk.1")
    except ToolkitError as error:
        return Finding("manual", "warn", error.message, "pip install --force-reinstall tk-llm")
    return Finding("manual", "pass", f"tk man reads {page.parent}")


def _completions(shell: str) -> Finding:
    if shell not in COMPLETIONS:
        text = f"none for {shell or 'an unknown shell'}; available for bash, zsh and fish"
        return Finding("completions", "pass", text)
    path = completion_path(shell)  # type: ignore[arg-type]  # a key of COMPLETIONS
    install = f"tk completion {shell} --install"
    if not path.is_file():
        return Finding("completions", "warn", f"not installed for {shell}", install)
    if _text(path) != _text(shipped("completions", COMPLETIONS[shell])):
        return Finding("completions", "warn", f"{path} is from another version", install)
    return Finding("completions", "pass", str(path))


def _text(path: Path) -> str:
    return re.sub(r"\s+$", "", path.read_text())
