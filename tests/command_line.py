"""What tests of the command line share."""

import os
import re
import subprocess
import sys


def in_a_process(*arguments, cwd, before=""):
    """Runs a command in a process of its own, after some lines of Python."""
    code = f"{before}\nfrom sinkscope.cli import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=900
    )


def started_process(*arguments, cwd):
    """A command that runs in a process of its own, and prints nothing here."""
    return subprocess.Popen(
        [sys.executable, "-m", "sinkscope", *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def in_forks(*works):
    """The statuses of child processes that each do some work, all at once."""
    children = []
    for work in works:
        children.append(os.fork())
        if children[-1] == 0:
            try:
                work()
            finally:
                os._exit(0)
    return [os.waitpid(child, 0)[1] for child in children]


def assert_refused(result, message, cwd):
    assert result.code == 2, result.out + result.err
    assert "Traceback" not in result.err
    assert result.out == ""
    assert re.search(r"sinkscope: \S", result.err)
    assert message in result.err
    assert not (cwd / "runs").exists() or list((cwd / "runs").iterdir()) == []
