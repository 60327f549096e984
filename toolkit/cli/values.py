"""What completion scripts ask for while somebody types: names of models, from this machine or from a server.

It is answered before Typer or any setting is imported, and never fails: no answer is better than an error in a prompt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

PATIENCE = 0.5
"""Seconds that a server gets to answer."""
URL_FLAGS = ("--url", "--base-url")


def values(kind: str, words: Sequence[str]) -> list[str]:
    """Values for a word of some `kind`: MODEL is a model of this machine, or of the server that the `words` of the line
    name; NAME is a model of the server, the default one when none is named; DOWNLOADED is one in the hub's cache.
    """
    url = _option(words, URL_FLAGS) or os.environ.get("TK_URL")
    if kind == "NAME" or (kind == "MODEL" and url):
        key = _option(words, ("--api-key",)) or os.environ.get("TK_API_KEY")
        return served(url or "http://127.0.0.1:8000", key)
    from toolkit.models.hub import cached_names, local_names

    names = {"MODEL": local_names, "DOWNLOADED": cached_names}
    return sorted(names[kind]()) if kind in names else []


def served(url: str, key: str | None) -> list[str]:
    """Models that a server lists; none when it does not answer."""
    from urllib.error import URLError
    from urllib.request import ProxyHandler, Request, build_opener

    root = url if "://" in url else f"http://{url}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = Request(root.rstrip("/").removesuffix("/v1") + "/v1/models", headers=headers)
        with build_opener(ProxyHandler({})).open(request, timeout=PATIENCE) as answer:
            return [str(model["id"]) for model in json.load(answer)["data"]]
    except (URLError, OSError, ValueError, KeyError, TypeError):
        return []


def _option(words: Sequence[str], flags: Sequence[str]) -> str | None:
    """The value of one of the flags in a line, as `--flag value` or `--flag=value`."""
    for index, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name in flags and has_value:
            return value
        if name in flags and index + 1 < len(words):
            return words[index + 1]
    return None
