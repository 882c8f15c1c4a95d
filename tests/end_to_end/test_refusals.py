"""Command lines that cannot be honoured: a message that can be acted on, exit code 2, and nothing written."""

import pytest
import typer

from sinkscope import cli
from sinkscope.errors import InputError


@pytest.mark.parametrize(
    ("command", "text", "printed"),
    [
        ("trace", "`length=64`", "--length 64"),
        ("trace", "`num_sequences`", "--num-sequences"),
        ("trace", "`keys=[0, 10]`", "--keys 0,10"),
        ("trace", "`bos=False`", "--no-bos"),
        ("study", "`bos=False`", "--bos no"),
        ("trace", "`overwrite=True`", "--overwrite"),
        ("trace", "`tokens='text:my file'`", "--tokens 'text:my file'"),
        ("trace", "`model='gpt2'`", "gpt2"),
        ("pretrain", "`length=64`", "`length=64`"),
    ],
)
def test_parameters_in_a_message_are_printed_as_options_of_the_command(command, text, printed):
    assert cli.in_options(text, typer.main.get_command(cli.app).commands[command].params) == printed


def test_the_command_line_translates_what_the_library_says(sinkscope, monkeypatch):
    def refused(self, **options):
        raise InputError(expected="more", found="`length=1`", next_step="Raise `length`, or `chunk_tokens`")

    monkeypatch.setattr(typer.Typer, "__call__", refused)
    result = sinkscope("trace")
    assert (result.code, result.out) == (2, "")
    assert result.err == "sinkscope: expected more; found --length 1. Raise --length, or `chunk_tokens`.\n"
