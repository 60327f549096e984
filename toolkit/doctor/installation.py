"""Checks of the installation: packages, settings, port, downloads, manual, completions."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from toolkit.config.sources import FILE_VARIABLE
from toolkit.doctor.finding import Finding
from toolkit.doctor.shipped import CHECKOUT, COMPLETIONS, completion_path, shipped
from toolkit.errors import ToolkitError, did_you_mean
from toolkit.logs import DEBUG
from toolkit.units import size

DISTRIBUTION = "tk-llm"


def check_installation(variables: list[str], host: str, port: int) -> Iterator[Finding]:
    """`variables`: those that settings have; `host`, `port`: where `tk serve` would listen."""
    yield _packages()
    if (CHECKOUT / "constraints.txt").is_file():
        yield _pins(CHECKOUT / "constraints.txt")
    yield _variables(os.environ, variables)
    yield _port(host, port)
    yield _downloads()
    yield _manual()
    yield _completions(Path(os.environ.get("SHELL", "")).name)


def requirements() -> list[Requirement]:
    """What the package asks for, extras aside."""
    parsed = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or []]
    return [one for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _packages() -> Finding:
    asked = requirements()
    wrong = []
    for one in asked:
        version = version_of(one.name)
        if version is None:
            wrong.append(f"{one.name} is missing")
        elif not one.specifier.contains(version, prereleases=True):
            wrong.append(f"{one.name} is {version}, and tk needs {one.specifier}")
    if wrong:
        return Finding("packages", "fail", "; ".join(wrong), "pip install --upgrade tk-llm")
    return Finding("packages", "pass", f"all {len(asked)} that tk needs")


def _pins(constraints: Path) -> Finding:
    """In a checkout: whether the versions are those that the tests run with."""
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
        text = f"versions other than the tested ones: {', '.join(others)}"
        return Finding(
            "versions", "warn", text, "pip install --constraint constraints.txt --editable ."
        )
    return Finding("versions", "pass", "those of constraints.txt")


def _variables(environment: Mapping[str, str], known: list[str]) -> Finding:
    """A variable that nothing reads is likely a misspelled one."""
    given = sorted(name for name in environment if name.startswith("TK_"))
    unknown = [name for name in given if name not in (*known, FILE_VARIABLE, DEBUG)]
    if unknown:
        fix = " ".join(did_you_mean(name, known).strip() for name in unknown).strip()
        return Finding(
            "variables",
            "warn",
            f"nothing reads {', '.join(unknown)}",
            fix or "tk man tk.toml lists them.",
        )
    return Finding("variables", "pass", f"{', '.join(given) or 'no TK_* variable'}")


def _port(host: str, port: int) -> Finding:
    name = f"{host}:{port}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if serves(host, port):
                return Finding("port", "pass", f"{name}: a server runs there, and is well")
            fix = "Another port: tk serve --port 8001."
            return Finding(
                "port", "warn", f"{name} cannot be had: {error.strerror}{_holder(port)}", fix
            )
    return Finding("port", "pass", f"{name} is free")


def serves(host: str, port: int) -> bool:
    """Whether a server there says that it is well."""
    from urllib.request import ProxyHandler, build_opener

    reached = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
        host, f"[{host}]" if ":" in host else host
    )
    try:
        with build_opener(ProxyHandler({})).open(
            f"http://{reached}:{port}/livez", timeout=2.0
        ) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def _holder(port: int) -> str:
    """Who listens there, where the system tells us."""
    import psutil

    try:
        for one in psutil.net_connections("tcp"):
            if (
                one.status == psutil.CONN_LISTEN
                and one.laddr
                and one.laddr.port == port
                and one.pid
            ):
                return f" ({psutil.Process(one.pid).name()}, process {one.pid})"
    except (psutil.Error, OSError):
        pass
    return ""


def _downloads() -> Finding:
    """What is in the hub's cache, and what was interrupted."""
    from huggingface_hub import constants

    from toolkit.inventory.find import cached

    repos = cached()
    text = f"{len(repos)} models, {size(sum(repo.size_on_disk for repo in repos))}"
    pieces = list(Path(constants.HF_HUB_CACHE).glob("models--*/blobs/*.incomplete"))
    if pieces:
        names = {path.parts[-3].removeprefix("models--").replace("--", "/") for path in pieces}
        fix = f"tk pull {' or '.join(sorted(names))} fetches the rest."
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
        return Finding(
            "completions",
            "pass",
            f"none for {shell or 'an unknown shell'}: bash, zsh and fish have them",
        )
    path = completion_path(shell)  # type: ignore[arg-type]  # one of FILES
    install = f"tk completion {shell} --install"
    if not path.is_file():
        return Finding("completions", "warn", f"not installed for {shell}", install)
    if _text(path) != _text(shipped("completions", COMPLETIONS[shell])):
        return Finding("completions", "warn", f"{path} is another version's", install)
    return Finding("completions", "pass", str(path))


def _text(path: Path) -> str:
    return re.sub(r"\s+$", "", path.read_text())
