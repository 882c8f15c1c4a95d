"""The entry point of the command line, for `sinkscope` and for `python -m sinkscope`.

It imports next to nothing, so that Ctrl-C is answered while the commands, and what they need, are still being imported.
"""

import os
import signal

from sinkscope.errors import INTERRUPTED


def main() -> None:
    """Runs the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in the background
        signal.signal(signal.SIGINT, interrupted_at_the_start)
    from sinkscope import cli

    cli.main()


def interrupted_at_the_start(number: int, frame: object) -> None:
    """Ends the process at once. Nothing is written yet, and libraries swallow exceptions while they are imported."""
    os.write(2, f"sinkscope: {INTERRUPTED}\n".encode())
    os._exit(130)


if __name__ == "__main__":
    main()
