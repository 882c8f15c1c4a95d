"""The one exception for input that cannot be honoured, and what Ctrl-C says; both reach the user as one line.

The command line turns an `InputError` into its message and exit code 2.
A message says in one or two plain sentences what is wrong and what to do. It names the parameters of Python functions,
in backticks and as Python writes them: `length`, `length=64`, `bos=False`, `keys=[0, 10]`. The command line prints the
options of the command that runs in their place: --length, --length 64, --no-bos, --keys 0,10. A parameter therefore has
one name everywhere; what the command has no option for stays as it is.
"""

from importlib.util import find_spec

INTERRUPTED = "interrupted; no run was written"
"""What Ctrl-C says, unless a command keeps finished parts and says how to go on."""


class InputError(Exception):
    """What is wrong and what to do, in plain sentences."""


def check_installed(purpose: str, extra: str, *packages: str) -> None:
    """Refuses what needs a package that is not installed, with the extra of sinkscope that brings it."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise InputError(
            f'{purpose} needs {" and ".join(missing)}, not installed here. Run: pip install "sinkscope[{extra}]".'
        )
