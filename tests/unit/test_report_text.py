"""Text in a page is text, and numbers read the same everywhere."""

import html
import io
import json
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from study_tables import HOSTILE_TOKENS

from sinkscope.models import cli as models_cli
from sinkscope.pages.text import (
    escape_what_cannot_be_printed,
    escaped,
    interval,
    isolated,
    number,
    plotted,
    say,
    script_json,
    token_text,
    visible,
)

INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
any_text = st.text(st.characters(codec=None)) | st.sampled_from(HOSTILE_TOKENS)


@given(any_text)
def test_no_character_is_invisible_or_reorders(text):
    assert not {unicodedata.category(character) for character in visible(text)} & INVISIBLE
    visible(text).encode("utf-8")


@given(any_text)
def test_escaped_text_reads_back_and_holds_no_markup(text):
    assert html.unescape(escaped(text)) == visible(text)
    assert not set(escaped(text)) & set("<>\"'")


@given(
    st.recursive(any_text | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(any_text, inner))
)
def test_json_in_a_script_reads_back_and_cannot_end_it(value):
    text = script_json(value)
    assert json.loads(text) == value
    assert text.isascii()
    assert not set(text) & set("<>&")


def test_control_plain_json_would_end_the_script():
    assert "</script>" in json.dumps(HOSTILE_TOKENS[0])


def test_right_to_left_text_is_isolated():
    assert isolated("\u05d0") == "<bdi>\u05d0</bdi>"
    assert plotted("<b>\u05d0") == "\u2068&lt;b&gt;\u05d0\u2069"
    assert visible("\u202ea") == "\u27e8U+202E\u27e9a"


def test_spaces_of_a_token_are_seen():
    assert token_text(" a ") == "\u2423a\u2423"
    assert token_text("") == "(empty)"
    assert visible("a\nb") == "a\u21b5b"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\u2013"),
        (float("nan"), "\u2013"),
        (0.0, "0.000"),
        (0.05, "0.050"),
        (-0.7666, "\u22120.767"),
        (9.4, "9.40"),
        (14.04, "14.0"),
        (262.88, "263"),
        (17133.4, "17,133"),
        (2.5e7, "2.5e+07"),
        (1e-5, "1.0e\u221205"),
        (1234, "1,234"),
        (float("inf"), "\u221e"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


def test_an_interval_needs_both_ends():
    assert interval(0.1, 0.25) == "0.100 to 0.250"
    assert interval(None, 0.25) == interval(0.1, None) == "\u2013"


def printed_in_ascii(monkeypatch, write) -> str:
    """What a function prints on a terminal that knows ASCII alone."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        with pytest.raises(UnicodeEncodeError):  # the control
            print("\u2713")
        escape_what_cannot_be_printed()
        write()
        stream.flush()
    return stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]


def test_names_on_a_terminal_neither_colour_it_nor_need_more_than_ascii(monkeypatch):
    name = f"{''.join(HOSTILE_TOKENS)}\x9b31m \N{GRINNING FACE} \N{MINUS SIGN}3"

    def write() -> None:
        models_cli.show_anatomy(name, {name: name})
        models_cli.show_families([{"family": name}])
        say(name)

    printed = printed_in_ascii(monkeypatch, write)
    assert not set(printed) - {"\n"} - set(map(chr, range(32, 127)))
    assert "<U+001B>" in printed
    assert "\\ud83d\\ude00 -3" in printed


def test_json_is_whole_on_a_terminal_that_knows_ascii_alone(monkeypatch):
    value = {"name": "\N{GRINNING FACE} \N{MINUS SIGN} \x1b"}
    assert json.loads(printed_in_ascii(monkeypatch, lambda: print(json.dumps(value, ensure_ascii=False)))) == value
