"""Headless Chromium, controlled over its DevTools pipe: without a driver and without a socket."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, final

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_SECONDS = 20.0


@final
class Browser:
    """One tab. `send` calls methods of the DevTools protocol; `messages` lists console messages of the pages."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        browser_in, self._out = os.pipe()
        self._in, browser_out = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--mute-audio"]
        # The browser reads from descriptor 3 and writes to 4; high numbers first, so that neither is overwritten.
        redirect = f'exec "$@" 8<&{browser_in} 9>&{browser_out} 3<&8 4>&9'
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "bash", CHROMIUM, *options, *quiet, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(browser_in, browser_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(browser_in)
        os.close(browser_out)
        self._buffer, self._number, self._session = b"", 0, ""
        self.messages: list[str] = []
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "DOM", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method and wait for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            if answer.get("method") == "Log.entryAdded":
                self.messages.append(answer["params"]["entry"]["text"])
            elif answer.get("method") == "Runtime.exceptionThrown":
                self.messages.append(json.dumps(answer["params"]["exceptionDetails"]))
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser said nothing for {_SECONDS:g} s"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, url: str) -> None:
        self.messages.clear()
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        done = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + _SECONDS
        while not self.run(condition):
            assert time.monotonic() < deadline, f"{condition} was never true; the page: {self.text()}"
            time.sleep(0.02)

    def text(self) -> str:
        """The visible text of the page."""
        return str(self.run("document.body.innerText"))

    def choose(self, selector: str, *files: Path) -> None:
        """Choose files in an <input type=file>."""
        document = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=document, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    def set_screen(self, *, width: int = 1100, height: int = 760, dark: bool = False) -> None:
        """Set the size of the screen in CSS pixels, and the preferred colour scheme."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self) -> bytes:
        """The whole page as a PNG."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def close(self) -> None:
        self._session = ""
        with contextlib.suppress(AssertionError, OSError):
            self.send("Browser.close")
        try:
            self._process.wait(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=_SECONDS)
        os.close(self._in)
        os.close(self._out)
