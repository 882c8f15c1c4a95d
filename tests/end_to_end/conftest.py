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
        before = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as exit_info:
                main()
        finally:
            signal.signal(signal.SIGTERM, before)
        return SimpleNamespace(code=exit_info.value.code, **capfd.readouterr()._asdict())

    return run
