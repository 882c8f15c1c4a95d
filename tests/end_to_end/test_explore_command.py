"""The live page as a process: what other users of the machine see of it, requests that are cut off, and its end."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

PLANTED = """
import time
from sinkscope.explore.sources import LiveModel
def view(self, asked):
    if asked.prompt == "fail":
        raise RuntimeError("planted")
    time.sleep(600)
LiveModel.view = view
from sinkscope.cli import main
main()
"""
STATE = {
    "source": 0,
    "prompt": "a b c",
    "interventions": [],
    "position": None,
    "start": 0,
    "quantity": "attention_received",
}


def waited_for(found):
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found()


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 0)])
def test_a_private_page_that_ends_in_time_and_quietly(tmp_path, name, code):
    seen, browser = tmp_path / "seen", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {seen}.part && mv {seen}.part {seen}\n')
    browser.chmod(0o700)
    process = subprocess.Popen(
        [sys.executable, "-c", PLANTED, "explore"],
        env=os.environ | {"BROWSER": f"{browser} %s", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    address = re.findall(r"http\S+", process.stdout.readline())[0]
    port, token = urlsplit(address).port, urlsplit(address).path.strip("/")

    # What the browser is started with does not hold the token; the file that it names does, for its owner alone.
    waited_for(seen.exists)
    assert token not in seen.read_text()
    redirect = Path(unquote(urlsplit(seen.read_text().strip()).path))
    assert f'url={address}"' in redirect.read_text()
    assert stat.S_IMODE(redirect.stat().st_mode) == 0o600
    assert stat.S_IMODE(redirect.parent.stat().st_mode) == 0o700

    def post(prompt):
        body = json.dumps(STATE | {"prompt": prompt}).encode()
        return urllib.request.Request(f"{address}view", body, {"Origin": f"http://127.0.0.1:{port}"})

    head = f"POST /{token}/view HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nOrigin: http://127.0.0.1:{port}\r\n"
    with socket.create_connection(("127.0.0.1", port)) as cut_off:
        cut_off.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
    with pytest.raises(urllib.error.HTTPError, match="500"):
        urllib.request.urlopen(post("fail"))

    with socket.create_connection(("127.0.0.1", port)) as reading:
        body = json.dumps(STATE).encode()
        reading.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.5)
        for _ in range(2):
            process.send_signal(getattr(signal, name))
            time.sleep(0.2)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert not redirect.parent.exists()
    assert "ClientDisconnect" not in errors
    assert errors.count("Traceback") == errors.count("RuntimeError: planted") == 1, "control: failures of ours are told"
