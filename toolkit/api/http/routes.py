"""Access to routes: declared by each route, and looked up before a request's body is read."""

from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any, TypeVar

from starlette.routing import BaseRoute, Mount, Route

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

_DECLARED = "_declared_access"  # attribute of an endpoint
_TAKES_FORM = "_takes_form"  # attribute of an endpoint
_SAFE_METHODS = {"GET", "HEAD"}


class Access(Enum):
    """Conditions for calling a route."""

    OPEN = auto()  # none
    KEY = auto()  # an API key, if the server has keys
    ADMIN = auto()  # the admin key, if the server has one
    MODEL_WORK = auto()  # a key; the limits hold, and a server that drains refuses it


def access(needed: Access) -> Callable[[Endpoint], Endpoint]:
    """Declare the access of a route: a decorator below `@router.post(...)`.

    A GET route may leave it out, and needs a key then."""

    def declare(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _DECLARED, needed)
        return endpoint

    return declare


def takes_form(endpoint: Endpoint) -> Endpoint:
    """Declare that a route reads its body by `read_form`: a decorator below `@router.post(...)`.

    The limits of JSON do not hold for it."""
    setattr(endpoint, _TAKES_FORM, True)
    return endpoint


class Body(Enum):
    """The body of a request, as its route reads it."""

    NONE = auto()  # not at all
    JSON = auto()
    FORM = auto()  # by `read_form`


class RouteTable:
    """Access of all routes. Uses the router's own patterns, in the router's order."""

    def __init__(self) -> None:
        self._rows: list[tuple[Callable[[str], object], set[str] | None, Access, Body]] = []

    def add(self, routes: Iterable[BaseRoute], open_paths: Iterable[str] = ()) -> None:
        """Append routes. Those at `open_paths` are open; they come from a library.

        Raises AssertionError for a route of another method than GET that declares nothing."""
        for route in routes:
            assert isinstance(route, Route | Mount), f"{route!r} has no path"
            methods = route.methods if isinstance(route, Route) else None
            needed = Access.OPEN if route.path in open_paths else _declared(route, methods)
            is_form = getattr(getattr(route, "endpoint", None), _TAKES_FORM, False)
            kind = Body.FORM if is_form else Body.JSON
            self._rows.append((route.path_regex.match, methods, needed, kind))

    def find(self, method: str, path: str) -> Access:
        """Return the access of the route that takes a request. `path` has no root path.

        A request that no route takes needs a key, unless the path is open for another method. If it
        is a POST, it counts as model work: it is logged, and the limits hold."""
        found = Access.MODEL_WORK if method == "POST" else Access.KEY
        for match, methods, needed, _ in self._rows:
            if match(path):
                if methods is None or method in methods:
                    return needed
                if needed is Access.OPEN:
                    found = needed
        return found

    def has(self, path: str) -> bool:
        """Return True if a route has this path."""
        return any(match(path) for match, *_ in self._rows)

    def body(self, method: str, path: str) -> Body:
        """Return how the route of a request reads its body."""
        if method != "POST":
            return Body.NONE
        for match, methods, _, kind in self._rows:
            if match(path) and (methods is None or method in methods):
                return kind
        return Body.NONE


def _declared(route: Route | Mount, methods: set[str] | None) -> Access:
    endpoint = getattr(route, "endpoint", None)
    declared: Access | None = getattr(endpoint, _DECLARED, None)
    assert declared or (methods is not None and methods <= _SAFE_METHODS), (
        f"{route!r} does not declare its access: add @access(...) to its endpoint."
    )
    return declared or Access.KEY
