"""Model names for shell completion, from this machine or from a server.

Runs without Typer and settings, so that it is fast. It never fails: an error would end up in the
user's prompt."""

import json
import os
from collections.abc import Sequence

TIMEOUT = 0.5  # seconds until a server must answer
DEFAULT_URL = "http://127.0.0.1:8000"
URL_FLAGS = ("--url", "--base-url")


def values(kind: str, words: Sequence[str]) -> list[str]:
    """Return the values of a word of this `kind` in the command line `words`.

    MODEL: models of this machine, or of the server that --url names. NAME: models of that server or
    of those that run here. SERVER: names of running servers' models. DOWNLOADED: models in the
    hub's cache."""
    url = _option(words, URL_FLAGS) or os.environ.get("TK_URL")
    if kind == "NAME" or (kind == "MODEL" and url):
        key = _option(words, ("--api-key",)) or os.environ.get("TK_API_KEY")
        from toolkit.client.choice import ready_servers

        urls = [url] if url else [one.url for one in ready_servers()] or [DEFAULT_URL]
        return list(dict.fromkeys(name for one in urls for name in served_models(one, key)))
    if kind == "SERVER":
        from toolkit.running import running_servers

        return list(dict.fromkeys(name for one in running_servers() for name in one.names))
    from toolkit.hub import cached_names, local_names

    names = {"MODEL": local_names, "DOWNLOADED": cached_names}
    return sorted(names[kind]()) if kind in names else []


def served_models(url: str, key: str | None) -> list[str]:
    """Return the models that a server lists; none if it does not answer."""
    from urllib.error import URLError
    from urllib.request import ProxyHandler, Request, build_opener

    root = url if "://" in url else f"http://{url}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = Request(root.rstrip("/").removesuffix("/v1") + "/v1/models", headers=headers)
        with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT) as answer:
            return [str(model["id"]) for model in json.load(answer)["data"]]
    except (URLError, OSError, ValueError, KeyError, TypeError):
        return []


def _option(words: Sequence[str], flags: Sequence[str]) -> str | None:
    """Return the value of the first of the flags, from `--flag value` or `--flag=value`."""
    for index, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name in flags and has_value:
            return value
        if name in flags and index + 1 < len(words):
            return words[index + 1]
    return None
