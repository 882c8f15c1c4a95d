"""Draws docs/explore.png: a prompt, a token masked to itself, and a neuron taken out, as the live page shows them.

PYTHONPATH=tests python docs/explore_picture.py
"""

import base64
import io
import threading
import time
from pathlib import Path

import uvicorn
from chromium import Chromium
from PIL import Image

import sinkscope
from sinkscope.explore.cli import FIRST_PROMPT
from sinkscope.explore.server import application, listening
from sinkscope.explore.sources import LiveModel

WIDTH, HEIGHT, GAP = 640, 960, 12
IDLE = "document.querySelector('.pane')?.dataset.answered && !document.querySelector('.pane').hasAttribute('aria-busy')"
MASKED = 10
CLICKS = (
    "document.querySelector('.read')",
    f"document.querySelector('.tokens [data-position=\"{MASKED}\"]')",
    "document.querySelector('[data-kind=mask_to_self]')",
    "document.querySelector('.undo')",
    "document.querySelector('.parts button')",
)
FRAMES = (0, 2, 4)
"""After which clicks a frame is taken."""


def click(browser: Chromium, what: str) -> None:
    browser.evaluate(f"delete document.querySelector('.pane').dataset.answered; {what}.click()")
    while not browser.evaluate(IDLE):
        time.sleep(0.05)


def main() -> None:
    source = LiveModel(sinkscope.load("reference:softmax"), "sinkscope.load('reference:softmax')")
    frames = []
    with listening(0) as at:
        port = at.getsockname()[1]
        app = application([source], prompts=[FIRST_PROMPT], token="picture", port=port)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [at]})
        thread.start()
        browser = Chromium()
        browser.call("Emulation.setScrollbarsHidden", hidden=True)
        browser.open(f"http://127.0.0.1:{port}/picture/", width=WIDTH, height=HEIGHT)
        for number, what in enumerate(CLICKS):
            click(browser, what)
            if number in FRAMES:
                shot = browser.call("Page.captureScreenshot")["data"]
                frames.append(Image.open(io.BytesIO(base64.b64decode(shot))))
        browser.close()
        server.should_exit = True
        thread.join()
    whole = Image.new("RGB", (len(frames) * (WIDTH + GAP) - GAP, HEIGHT), "#8a9099")
    for number, frame in enumerate(frames):
        whole.paste(frame, (number * (WIDTH + GAP), 0))
    whole.quantize(128).save(Path(__file__).with_name("explore.png"), optimize=True)


if __name__ == "__main__":
    main()
