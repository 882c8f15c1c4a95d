"""A page in real headless Chromium, spoken to through its debugging pipe: no driver and no network needed."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SWITCHES = (
    "--headless=new",
    "--no-sandbox",  # CI runs as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)
KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), "ArrowLeft": (37, ""), "ArrowRight": (39, "")}
"""Keys that the browser itself acts on: (code, what they type)."""

BROKEN_WORDS = """[...document.querySelectorAll('{}')].flatMap(each => {{
  const broken = [], walk = document.createTreeWalker(each, NodeFilter.SHOW_TEXT), range = document.createRange();
  for (let node; (node = walk.nextNode());) for (const word of node.data.matchAll(/\\S+/g)) {{
    range.setStart(node, word.index);
    range.setEnd(node, word.index + word[0].length);
    if (range.getClientRects().length > 1) broken.push(word[0]);
  }}
  return broken;
}})"""
"""The words in some elements that do not stand on one line."""


class Chromium:
    """One browser with one page. `errors` are the console's, `requests` every address that was asked for."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._from_here = os.pipe()
        self._to_here, from_browser = os.pipe()
        # The browser reads messages from descriptor 3 and writes to 4, each ended by a NUL.
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        arguments = [str(CHROMIUM), *SWITCHES, f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, *arguments], pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._last_id, self._buffer, self._session = 0, b"", None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._from_here)
        os.close(self._to_here)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict:
        """The result of a DevTools method."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._from_here, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next_message()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, page: Path | str, *, width: int = 1280, height: int = 800, scheme: str = "light") -> None:
        """Shows a page of ours, a file or an address, in a window of this size, and returns when it is drawn."""
        self.errors.clear()
        self.requests.clear()
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.resize(width, height)
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        deadline = time.monotonic() + 60
        while self.evaluate("document.documentElement?.dataset.drawn") is None:
            assert time.monotonic() < deadline, f"the figures of {page} were not drawn: {self.errors}"
            time.sleep(0.05)

    def resize(self, width: int, height: int = 800) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def press(self, key: str) -> None:
        code, text = KEYS.get(key, (0, key if len(key) == 1 else ""))
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=text, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]))

    def _next_message(self) -> dict:
        while b"\0" not in self._buffer:
            part = os.read(self._to_here, 1 << 20)
            assert part, "Chromium ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif event.get("method") == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(parameters["args"])[:500])
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])
