"""Draws the first screens of a run's report.html as a picture.

PYTHONPATH=tests python docs/report_picture.py runs/smollm2/report.html docs/smollm2-report.png
"""

import base64
import io
import sys
from pathlib import Path

from chromium import Chromium
from PIL import Image

WIDTH, HEIGHT = 1280, 1720


def main(page: Path, picture: Path) -> None:
    browser = Chromium()
    browser.call("Emulation.setScrollbarsHidden", hidden=True)
    browser.open(page, width=WIDTH, height=HEIGHT)
    shot = browser.call("Page.captureScreenshot")["data"]
    browser.close()
    Image.open(io.BytesIO(base64.b64decode(shot))).convert("RGB").quantize(64).save(picture, optimize=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
