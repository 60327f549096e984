"""Chromium without a window, driven by the DevTools protocol through two pipes."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
FOUND = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--mute-audio"),
    *("--disable-extensions", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
    *("--disable-background-networking", "--window-size=1280,800"),
)
WAIT = 60.0  # seconds for something that should happen at once: machines are busy


class Browser:
    """A process of Chromium with one page. Events of the page are kept until they are asked for."""

    def __init__(self, profile: Path) -> None:
        assert FOUND is not None
        ours, theirs = _pipe(), _pipe()
        self._read, self._write = theirs[0], ours[1]
        actions = [
            (os.POSIX_SPAWN_DUP2, ours[0], 3),  # the protocol's descriptors
            (os.POSIX_SPAWN_DUP2, theirs[1], 4),
            (
                os.POSIX_SPAWN_OPEN,
                2,
                str(profile / "chromium.log"),
                os.O_CREAT | os.O_WRONLY,
                0o600,
            ),
        ]
        arguments = [FOUND, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        environment = os.environ | {"HOME": str(profile)}
        self._pid = os.posix_spawn(FOUND, arguments, environment, file_actions=actions)
        os.close(ours[0])
        os.close(theirs[1])
        self._rest, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in pages if one["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a command. Raises AssertionError with the browser's error."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def event(self, method: str) -> dict[str, Any]:
        """Return the parameters of the next event of this name, and drop those before it."""
        while True:
            found = self.events.pop(0) if self.events else self._next()
            if found.get("method") == method:
                return found["params"]

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of an expression, in JSON, after its promise. Raises its exception."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait for an expression to be true."""
        end = time.monotonic() + WAIT
        while True:
            with contextlib.suppress(AssertionError):  # a page that is being loaded has no elements
                if self.run(f"Boolean({condition})"):
                    return
            assert time.monotonic() < end, (condition, self.run("document.body.innerText"))
            time.sleep(0.02)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int = 0, **params: Any) -> None:
        """Press a key of this name, and release it. `code`: its number in Windows."""
        text = {"Enter": "\r"}.get(key, "")
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, **params}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(
        self, file: Path, width: int, height: int, scheme: str, scale: float = 1
    ) -> None:
        """Write a PNG of the page in a window of this size. `scheme`: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        size = {"width": width, "height": height, "deviceScaleFactor": scale}
        self.call("Emulation.setDeviceMetricsOverride", mobile=False, **size)
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._session = ""
        self.call("Browser.close")
        os.waitpid(self._pid, 0)
        os.close(self._read)
        os.close(self._write)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], WAIT)[0], "Chromium does not answer"
            part = os.read(self._read, 2**20)
            assert part, "Chromium has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


def _pipe() -> tuple[int, int]:
    """Return a pipe whose descriptors are above the protocol's."""
    ends = []
    for end in os.pipe():
        ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(end)
    return ends[0], ends[1]
