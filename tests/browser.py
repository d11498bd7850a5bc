"""Control a headless Chromium by the DevTools protocol over two pipes, without a driver."""

import json
import os
import shutil
import signal
import time
from base64 import b64decode
from pathlib import Path
from typing import Any

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--remote-debugging-pipe",
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4",
)  # fmt: skip
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
NO_BROWSER = f"none of {', '.join(PROGRAMS)} is installed: install Chromium"
_TIMEOUT_S = 60
_PAUSE_S = 2
"""Time between two captures: a page whose captures are equal has stopped changing."""
_TEXT = "document.body.innerText"
_CLICK = """(() => {
  const words = %s;
  const found = [...document.querySelectorAll("a, button, label, span, div")]
    .find(node => node.ariaLabel === words || (!node.children.length && node.innerText === words));
  found?.click();
  return Boolean(found);
})()"""


def find_program() -> str | None:
    """Return the path of an installed browser, or None."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, program: str, profile: Path) -> None:
        browser_in, our_out = os.pipe()
        our_in, browser_out = os.pipe()
        command = [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        actions = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (1, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, browser_in, 3), (os.POSIX_SPAWN_DUP2, browser_out, 4)]
        self._pid = os.posix_spawn(program, command, os.environ, file_actions=actions, setsid=True)
        os.close(browser_in)
        os.close(browser_out)
        self._to, self._from = os.fdopen(our_out, "wb", buffering=0), os.fdopen(our_in, "rb")
        self._calls = 0
        self._session: dict[str, str] = {}
        self.requests: list[str] = []
        """Every URL that pages have requested, data: included, up to the last call."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self._call("Network.enable")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method and return its result; note the requests that the browser reports."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params, **self._session}
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            reply = json.loads(self._read())
            if reply.get("method") == "Network.requestWillBeSent":
                self.requests.append(reply["params"]["request"]["url"])
            if reply.get("id") == self._calls:
                assert "error" not in reply, f"{method}: {reply['error']['message']}"
                return reply["result"]

    def _read(self) -> bytes:
        """Return the next message; each ends with NUL."""
        message = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            assert byte, "the browser has ended"
            message += byte
        return bytes(message)

    def capture(
        self, url: str, width: int, height: int, clicks: tuple[str, ...], shows: tuple[str, ...]
    ) -> bytes:
        """Return a page as PNG once it has stopped changing.

        clicks: texts of elements to click on first. shows: texts to wait for.
        """
        self.open(url, width, height)
        for words in clicks:
            self._wait_for(_CLICK % json.dumps(words))
        for words in shows:
            self._wait_for(f"{_TEXT}.includes({json.dumps(words)})")
        before, now = b"", self._screenshot()
        while now != before:
            time.sleep(_PAUSE_S)
            before, now = now, self._screenshot()
        return now

    def open(self, url: str, width: int, height: int) -> None:
        """Load a page as on a first visit in a window of this size; return when it is complete."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        # Expand the sections that a previous page has collapsed.
        self._call("Storage.clearDataForOrigin", origin=url.partition("/#")[0], storageTypes="local_storage")
        # a change of only the fragment would not load the page
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=url)
        self._wait_for("location.protocol !== 'about:' && document.readyState === 'complete'")

    def _wait_for(self, condition: str) -> None:
        end = time.monotonic() + _TIMEOUT_S
        while not self.evaluate(condition):
            assert time.monotonic() < end, f"false: {condition}; the page shows: {self.evaluate(_TEXT)}"
            time.sleep(0.5)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        return self._call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def _screenshot(self) -> bytes:
        return b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
