"""Redact private data from text: keys, names of the user and the machine, addresses."""

import getpass
import ipaddress
import re
import socket
from pathlib import Path

MASK = "***"
ADDRESS = "<address>"
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH|HEADER", re.IGNORECASE)
"""Names of variables whose values are secret."""
_KEYS = re.compile(
    r"\b(?:hf|sk|gh[oprsu]|github_pat|xox[abp]|glpat|AKIA)[-_]?[A-Za-z0-9_-]{12,}"
    r"|(?<=Bearer )\S+|\b[A-Za-z0-9+/_-]{40,}={0,2}(?![\w./-])"
)  # common keys, and any word of 40 characters or more that is not part of a path
_HOST = re.compile(r"(?<=://)([^/\s\"']+)")
_ADDRESS = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b|(?<![\w:])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?![\w:])"
)
_OURS = ("localhost", "huggingface.co")


def redact(text: str) -> str:
    """Replace the home folder by ~, and names, addresses and keys by placeholders."""
    text = text.replace(str(Path.home()), "~")
    text = _HOST.sub(lambda match: _host(match[1]), text)
    text = _ADDRESS.sub(lambda match: _address(match[0]), text)
    text = _KEYS.sub(MASK, text)
    for name, placeholder in private_names():
        text = re.sub(
            rf"(?<![\w]){re.escape(name)}(?![\w])", placeholder, text, flags=re.IGNORECASE
        )
    return text


def redact_variable(name: str, value: str) -> str:
    """Redact the value of an environment variable."""
    return MASK if SECRET_NAME.search(name) else redact(value)


def private_names() -> list[tuple[str, str]]:
    """Return (name, placeholder) of the user and the machine, except root and localhost."""
    host = socket.gethostname()
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user id without a name
        user = ""
    found = [
        (user, "<user>"),
        (Path.home().name, "<user>"),
        (host, "<host>"),
        (host.partition(".")[0], "<host>"),
    ]
    return [one for one in found if one[0] not in ("", "root", "localhost")]


def _host(authority: str) -> str:
    """Redact the host of a URL. Ports and well-known names stay."""
    host, colon, port = authority.rpartition("@")[2].partition(":")
    kept = host in _OURS or (host.replace(".", "").isdecimal() and _address(host) == host)
    return f"{host if kept else '<host>'}{colon}{port if port.isdecimal() else ''}"


def _address(text: str) -> str:
    """Redact an IP address. Loopback stays, and text that is no address, such as 12:34:56."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return text
    return text if found.is_loopback or found.is_unspecified else ADDRESS
