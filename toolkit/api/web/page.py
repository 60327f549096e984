"""GET /: the chat page for browsers, a line of text for other clients.

The page is one document. Its policy names the hashes of its own style and script, so a browser runs
nothing else, and lets it reach this server only."""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from toolkit.api.http.openapi import nothing
from toolkit.api.http.routes import Access, access
from toolkit.api.http.server import server_of

router = APIRouter(tags=["operation"])

SCRIPTS = ("markdown.js", "store.js", "connection.js", "chat.js")  # in the order of their use


@router.get("/", response_model=None, responses=nothing("The page, or that the server is running"))
@access(Access.OPEN)
async def root(request: Request) -> Response:
    """Return the chat page to browsers. Others learn that the server runs, as Ollama's clients ask.

    The page has no secrets; its requests need a key, if the server has keys."""
    headers = {"Vary": "Accept", "Cache-Control": "no-cache"}
    if server_of(request).config.web and "text/html" in request.headers.get("accept", ""):
        page, policy = _page()
        return HTMLResponse(page, headers={**headers, "Content-Security-Policy": policy})
    return PlainTextResponse("tk is running", headers=headers)


@cache
def _page() -> tuple[str, str]:
    """Return the page with its style and script, and its Content-Security-Policy."""
    style, script = _asset("page.css"), "".join(map(_asset, SCRIPTS))
    page = _asset("page.html")
    for empty, text in (("<style></style>", style), ("<script></script>", script)):
        assert page.count(empty) == 1
        page = page.replace(empty, empty.replace("><", f">{text}<"))
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; "
        f"style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return page, policy


def _asset(name: str) -> str:
    """Return a file's text without comments and meaningless spaces: a fifth of it."""
    text = files("toolkit.api.web").joinpath(name).read_text(encoding="utf-8")
    text = re.sub(r"(?:^ *| +)// .*$|^ */\*\* .* \*/$|^ +", "", text, flags=re.MULTILINE)
    if name.endswith(".css"):
        text = re.sub(r"\s*([{};])\s*|([:,]) ", r"\1\2", text).replace(";}", "}")
    return re.sub(r"\n{2,}", "\n", text)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
