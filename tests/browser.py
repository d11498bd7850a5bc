"""A Chromium without a window, told what to do in its DevTools protocol through two pipes: no driver, no library."""

import json
import os
import signal
import time
from base64 import b64decode
from pathlib import Path
from typing import Any

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4",
    "--remote-debugging-pipe",
)  # fmt: skip
_PATIENCE_S = 60
_STILL_S = 2
_TEXT = "document.body.innerText"
_CLICK = """(() => {
  const words = %s;
  const found = [...document.querySelectorAll("a, button, label, span, div")]
    .find(one => one.ariaLabel === words || (!one.children.length && one.innerText === words));
  found?.click();
  return Boolean(found);
})()"""


class Browser:
    """One page of a Chromium without a window."""

    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        command = [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        actions = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (1, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, theirs_in, 3), (os.POSIX_SPAWN_DUP2, theirs_out, 4)]
        self._pid = os.posix_spawn(program, command, os.environ, file_actions=actions, setsid=True)
        os.close(theirs_in)
        os.close(theirs_out)
        self._to, self._from = os.fdopen(ours_out, "wb", buffering=0), os.fdopen(ours_in, "rb")
        self._calls = 0
        self._session: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        """A method's answer. What the browser tells besides is not listened to."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params, **self._session}
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._read())
            if answer.get("id") == self._calls:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _read(self) -> bytes:
        """The next message; NUL ends each."""
        message = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser has left")
            message += byte
        return bytes(message)

    def take(self, url: str, width: int, height: int, clicks: tuple[str, ...], shows: tuple[str, ...]) -> bytes:
        """A page as PNG: clicked on where it says these words, once it shows those and has stopped changing.

        RuntimeError if it does not come to that.
        """
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        # what was folded away on a page before is so no more
        self._call("Storage.clearDataForOrigin", origin=url.partition("/#")[0], storageTypes="local_storage")
        self._call("Page.navigate", url="about:blank")  # else another fragment of the page that is there loads nothing
        self._call("Page.navigate", url=url)
        for words in clicks:
            self._wait_for(_CLICK % json.dumps(words))
        for words in shows:
            self._wait_for(f"{_TEXT}.includes({json.dumps(words)})")
        before, now = b"", self._capture()
        while now != before:
            time.sleep(_STILL_S)
            before, now = now, self._capture()
        return now

    def _wait_for(self, condition: str) -> None:
        end = time.monotonic() + _PATIENCE_S
        while not self._evaluate(condition):
            if time.monotonic() > end:
                raise RuntimeError(f"not so after {_PATIENCE_S} s: {condition}; there is: {self._evaluate(_TEXT)}")
            time.sleep(0.5)

    def _evaluate(self, script: str) -> Any:
        return self._call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def _capture(self) -> bytes:
        return b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
