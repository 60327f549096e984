"""Terminal chat with an OpenAI-compatible server."""

import sys

# httpx would import its own command line, with click and pygments: 0.1 s of a question's 0.6.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]  # makes the import fail
