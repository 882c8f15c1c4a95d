"""The real command, run in this process."""

import signal
import sys
from types import SimpleNamespace

import pytest

from sinkscope.cli import main


@pytest.fixture
def sinkscope(tmp_path, monkeypatch, capfd):
    """Runs a command in this process, in an empty folder, through the entry point; gives code, out and err."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["sinkscope", *map(str, arguments)])
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            with pytest.raises(SystemExit) as exit_info:
                main()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return SimpleNamespace(code=exit_info.value.code, **capfd.readouterr()._asdict())

    return run
