"""Makes text from models and users safe to show: no markup, no script, no invisible or reordering characters."""

from __future__ import annotations

import codecs
import html
import json
import math
import sys
import unicodedata
from typing import Any

ISOLATE, END_ISOLATE = "\u2068", "\u2069"
NO_VALUE = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
ESCAPES = "sinkscope.escapes"
"""Name of the error handler by which a stream writes what its encoding lacks."""
# Our own signs on a terminal that knows ASCII alone.
IN_ASCII = str.maketrans(
    {
        **dict.fromkeys((NO_VALUE, MINUS), "-"),
        "\N{INFINITY}": "infinity",
        "\N{MULTIPLICATION SIGN}": "x",
        "\N{MATHEMATICAL LEFT ANGLE BRACKET}": "<",
        "\N{MATHEMATICAL RIGHT ANGLE BRACKET}": ">",
        "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}": "/",
    }
)


def visible(text: str) -> str:
    """The text with each control, format and separator character as a symbol, such as U+202E in angle brackets."""
    return "".join(map(_visible_character, text))


def say(text: str, *, error: bool = False) -> None:
    """Prints lines in which nothing can move the cursor or colour the terminal."""
    stream = sys.stderr if error else sys.stdout
    for line in text.split("\n"):
        print(printed(line, stream.encoding), file=stream, flush=True)


def printed(text: str, encoding: str | None) -> str:
    """The text for a terminal of this encoding: visible and, if it has only ASCII, with our signs in ASCII."""
    text = visible(text)
    return text if (encoding or "").lower().startswith("utf") else text.translate(IN_ASCII)


def escape_what_cannot_be_printed() -> None:
    """Makes standard output and error write characters that their encoding lacks as \\u2713, which JSON allows too."""
    codecs.register_error(ESCAPES, _json_escapes)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what a program put in their place need not have it
            stream.reconfigure(errors=ESCAPES)  # type: ignore[union-attr]


def escaped(text: str) -> str:
    """The text for HTML, inside an element or a quoted attribute."""
    return html.escape(visible(text))


def isolated(text: str) -> str:
    """An element whose right-to-left characters do not reorder the text around it."""
    return f"<bdi>{escaped(text)}</bdi>"


def plotted(text: str) -> str:
    """The text for a label of a figure: Plotly reads tags and entities in it, and SVG has no <bdi>."""
    return ISOLATE + html.escape(visible(text), quote=False) + END_ISOLATE


def token_text(text: str) -> str:
    """A token with its spaces shown."""
    return text.replace(" ", "\N{OPEN BOX}") or "(empty)"


def script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in; only ASCII, so U+2028 is no line end either."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def number(value: float | int | None) -> str:
    """Three digits after the point below 1 and three significant ones above, so that a column of numbers lines up."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NO_VALUE
    if isinstance(value, float) and math.isinf(value):
        text = "\N{INFINITY}" if value > 0 else "-\N{INFINITY}"
    elif isinstance(value, int):
        text = f"{value:,}"
    elif abs(value) >= 1e6 or 0 < abs(value) < 5e-4:
        text = f"{value:.1e}"
    else:
        decimals = sum(abs(value) < bound for bound in (1, 10, 100))
        text = f"{value:,.{decimals}f}"
    return text.replace("-", MINUS)


def interval(low: float | None, high: float | None) -> str:
    """`low to high`, or a dash where there is no interval."""
    return NO_VALUE if low is None or high is None else f"{number(low)} to {number(high)}"


def _visible_character(character: str) -> str:
    if character == "\n":
        return "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
    # Cc controls, Cf bidi and zero-width, Cs lone surrogates, Zl and Zp line separators, Co and Cn without a glyph.
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp", "Co", "Cn"):
        return f"\N{MATHEMATICAL LEFT ANGLE BRACKET}U+{ord(character):04X}\N{MATHEMATICAL RIGHT ANGLE BRACKET}"
    return character


def _json_escapes(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(json.dumps(character)[1:-1] for character in lacking), error.end


def percent(share: float) -> str:
    """A share as statements write it."""
    return f"{100 * share:g} %"
