"""Takes out of a text what is nobody else's business: keys, the user's and the machine's names, addresses."""

from __future__ import annotations

import getpass
import ipaddress
import re
import socket
from pathlib import Path

MASK = "***"
ADDRESS = "<address>"
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH|HEADER", re.IGNORECASE)
"""Of variables whose value is never told."""
_KEYS = re.compile(
    r"\b(?:hf|sk|gh[oprsu]|github_pat|xox[abp]|glpat|AKIA)[-_]?[A-Za-z0-9_-]{12,}|(?<=Bearer )\S+|\b[A-Za-z0-9+/_-]{40,}={0,2}(?![\w./-])"
)
"""What common keys look like, and anything random of forty characters or more that is no part of a path."""
_HOST = re.compile(r"(?<=://)([^/\s\"']+)")
_ADDRESS = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b|(?<![\w:])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?![\w:])"
)
_OURS = ("localhost", "huggingface.co")


def redact(text: str) -> str:
    """The text with ~ for the home folder and marks in the place of names, addresses and keys."""
    text = text.replace(str(Path.home()), "~")
    text = _HOST.sub(lambda match: _host(match[1]), text)
    text = _ADDRESS.sub(lambda match: _address(match[0]), text)
    text = _KEYS.sub(MASK, text)
    for name, mark in names():
        text = re.sub(rf"(?<![\w]){re.escape(name)}(?![\w])", mark, text, flags=re.IGNORECASE)
    return text


def value_of(name: str, value: str) -> str:
    """The value of a variable, redacted."""
    return MASK if SECRET_NAME.search(name) else redact(value)


def names() -> list[tuple[str, str]]:
    """(name, what stands for it) of the user and of the machine; root and localhost name nobody."""
    host = socket.gethostname()
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user number without a name
        user = ""
    found = [
        (user, "<user>"),
        (Path.home().name, "<user>"),
        (host, "<host>"),
        (host.partition(".")[0], "<host>"),
    ]
    return [(name, mark) for name, mark in found if name not in ("", "root", "localhost")]


def _host(place: str) -> str:
    """Of a URL: the port stays, and so do names that are everybody's."""
    host, colon, port = place.rpartition("@")[2].partition(":")
    kept = host in _OURS or (host.replace(".", "").isdecimal() and _address(host) == host)
    return f"{host if kept else '<host>'}{colon}{port if port.isdecimal() else ''}"


def _address(text: str) -> str:
    """A mark in the place of an address, unless every machine has it; what is none (12:34:56) stays."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return text
    return text if found.is_loopback or found.is_unspecified else ADDRESS
