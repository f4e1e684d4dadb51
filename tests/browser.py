"""A page in a real browser: ask it something, press keys, look at it.

Chromium is told what to do through two pipes (its `--remote-debugging-pipe`), so that no port and
no other package is needed. The methods are those of the DevTools protocol:
chromedevtools.github.io/devtools-protocol.
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PATIENCE = 120  # seconds for an answer, on a machine however busy
# Chromium reads what it is told from file 3, and answers on file 4.
START = """import fcntl, os, sys
# First out of the way, for one of them may be 3 or 4 by now.
told, answers = (fcntl.fcntl(int(it), fcntl.F_DUPFD, 10) for it in sys.argv[1:3])
os.dup2(told, 3), os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])"""
KEYS = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Page:
    """One page, until the end of a `with` block; nothing of the browser is left behind.

    Raises:
        TimeoutError: there is no answer.
        RuntimeError: the browser has ended, or the page has raised an error.
    """

    def __init__(self, url: str, width: int = 1280, height: int = 1000, dark: bool = False):
        self.errors: list[str] = []
        self._url, self._size, self._dark = url, (width, height), dark
        self._numbers, self._left = itertools.count(1), b""

    def __enter__(self) -> "Page":
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        told, self._tell = os.pipe()
        self._answers, answers = os.pipe()
        options = f"--headless --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run \
            --disable-dev-shm-usage --user-data-dir={self._profile.name} about:blank".split()
        command = [sys.executable, "-c", START, str(told), str(answers), CHROMIUM, *options]
        self._process = subprocess.Popen(
            command, pass_fds=(told, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(told), os.close(answers)
        (page,) = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attach = {"targetId": page["targetId"], "flatten": True}
        self._session = self.call("Target.attachToTarget", **attach)["sessionId"]
        width, height = self._size
        its = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **its)
        theme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])
        self.call("Runtime.enable")
        self.call("Page.enable")
        self.call("Page.navigate", url=self._url)
        while self.ask("document.readyState") != "complete":
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._tell, b'{"id": 0, "method": "Browser.close"}\0')
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
        os.close(self._tell), os.close(self._answers)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One method of the protocol, and what it answers."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._tell, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("method") == "Runtime.exceptionThrown":
                its = answer["params"]["exceptionDetails"]
                self.errors.append(its.get("exception", {}).get("description", its["text"]))
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def ask(self, expression: str) -> Any:
        """What an expression of JavaScript is on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["result"].get("description", "an error on the page"))
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """A key goes down and up, as if somebody had pressed it."""
        its = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **its, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **its)

    def picture(self, path: Path) -> None:
        """The whole page, as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._left:
            ready, *_ = select.select([self._answers], [], [], max(until - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"the browser has said nothing for {PATIENCE} seconds")
            more = os.read(self._answers, 2**16)
            if not more:
                raise RuntimeError("the browser has ended")
            self._left += more
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)
