"""python -m sinkscope: the command line."""

from sinkscope.cli import main

main()
