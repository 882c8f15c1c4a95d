"""Templates hold all the HTML and escape whatever they show, so that no page needs to remember it."""

import ast
import re
from pathlib import Path

import jinja2
import pytest
from markupsafe import Markup
from study_tables import HOSTILE_TOKENS

from sinkscope.pages import html
from sinkscope.pages.text import visible

SOURCE = Path(html.__file__).parents[1]
TRUSTED = re.compile(r"\|\s*safe\b|autoescape")
CLOSED = re.compile(r"</(?!extra>)\w+>")
"""The end of an element; `<extra>` is Plotly's."""


def shown(template: str, **values) -> str:
    return html.render(html.environment().from_string(template), **values)


@pytest.mark.parametrize("text", [*HOSTILE_TOKENS, "\u202egnp.exe", "a\nb", "\x1b[31m"])
@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        ("<p>{{ text }}</p>", "<p>", "</p>"),
        ('<p title="{{ text }}"></p>', '<p title="', '"></p>'),
        ("{{ text | isolated }}", "<bdi>", "</bdi>"),
        ('{{ "a " ~ text }}', "a ", ""),
        ('{{ [text, text] | join(", ") }}', "", ", "),
    ],
)
def test_text_is_escaped_and_visible_wherever_it_stands(text, template, before, after):
    page = shown(template, text=text)
    inside = page.removeprefix(before).split(after)[0] if after else page.removeprefix(before)
    assert page.startswith(before)
    assert not set(inside) & set("<>\"'")
    assert Markup(inside).unescape() == visible(text)


def test_control_html_of_ours_stays_as_it_is():
    assert shown("{{ text }}", text=Markup("<b>")) == "<b>"
    assert shown("{% set text %}<b>{{ inner }}</b>{% endset %}{{ text }}", inner="<i>") == "<b>&lt;i&gt;</b>"


def test_a_name_that_a_page_does_not_give_is_an_error():
    for template in ("{{ missing }}", "{{ run.missing }}", "{% if missing %}{% endif %}", "{{ missing | isolated }}"):
        with pytest.raises(jinja2.UndefinedError, match="missing"):
            shown(template, run={})


def test_a_table_says_yes_or_no_and_aligns_numbers_alone_to_the_right():
    rows = [("a", True, 1), ("b", False, 0)]
    template = '{% import "pages/parts.html" as parts %}{{ parts.table(("name", "holds", "count"), rows) }}'
    table = shown(template, rows=rows)
    assert re.findall(r"<td[^>]*>(?:yes|no|\d)</td>", table) == [
        "<td>yes</td>",
        '<td class="number">1</td>',
        "<td>no</td>",
        '<td class="number">0</td>',
    ]
    assert '<th scope="col">holds</th><th scope="col" class="number">count</th>' in table


def test_no_template_trusts_a_string():
    templates = sorted(SOURCE.rglob("*.html"))
    assert len(templates) > 10
    assert [path.name for path in templates if TRUSTED.search(path.read_text(encoding="utf-8"))] == []
    assert TRUSTED.search("{{ text |safe }}"), "the control"


def test_python_holds_no_html():
    held = [
        f"{path.relative_to(SOURCE)}: {node.value}"
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and CLOSED.search(node.value)
    ]
    assert held == ["pages/text.py: </bdi>"]
