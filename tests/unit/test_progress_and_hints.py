"""Lines where there is no terminal; and hints of errors, typed."""

import re
import shlex
import threading
import tomllib
from pathlib import Path

import pytest

from sinkscope.cli import command_line, in_options
from sinkscope.pages import progress

ROOT = Path(__file__).parents[2]
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))


def test_lines_say_what_is_done_and_left(monkeypatch):
    printed, seen = [], threading.Event()
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.01)
    monkeypatch.setattr(progress, "say", lambda text, error: (printed.append(text), seen.set()))
    with progress.bar("conditions") as move:  # pytest's standard error is no terminal
        move(3, 12)
        assert seen.wait(10)
    assert "of 12 done" in printed[-1] or "begun" in printed[-1]
    seen.clear()
    with progress.working("tracing"):
        assert seen.wait(10)
    assert printed[-1].startswith("tracing: begun ")


def test_what_comes_before_the_first_count_takes_no_part_in_the_speed(monkeypatch):
    clock = iter([0.0, 30.0, 40.0, 50.0, 60.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    task = progress.Task("conditions")
    assert task.line() == "conditions: begun 30 s ago"
    task.move(2, 12)  # at 40 s; two were done by an earlier run
    assert task.line() == "conditions: 2 of 12 done after 50 s"
    task.move(3, 12)
    assert task.line() == "conditions: 3 of 12 done after 60 s, 9 left, about 180 s"


def hints() -> list[tuple[str, str]]:
    """Every parameter with a value that an error names, as Python writes it; 7 stands for what is filled in."""
    found = re.findall(r"`([a-z_]+)=((?:[^`{}]|\{[^`{}]+\})+)`", SOURCE)
    return sorted({(name, re.sub(r"\{[^{}]+\}", "7", re.sub(r"\{[^{}]+!r\}", "'7'", value))) for name, value in found})


def refuses_hint(name: str, value: str) -> list[str]:
    """Commands that have the parameter as an option and cannot read the hint as it is printed for them."""
    wrong = []
    for command, parsed in command_line().commands.items():
        for option in parsed.params:
            typed = shlex.split(in_options(f"`{name}={value}`", [option]))
            if option.name != name or not typed[0].startswith("--"):
                continue
            context = parsed.make_context(command, [], resilient_parsing=True)
            try:
                options, rest, _ = parsed.make_parser(context).parse_args(typed)
                option.process_value(context, options[name])
                wrong += rest
            except Exception as error:  # what click raises has no common base of ours
                wrong.append(f"{command} {typed}: {error}")
    return wrong


@pytest.mark.parametrize(("name", "value"), hints())
def test_every_hint_can_be_typed(name, value):
    assert refuses_hint(name, value) == []


def test_control_a_hint_that_cannot_be_typed_is_found():
    assert len(hints()) > 5
    assert refuses_hint("length", "'many'")


def test_commands_and_extras_that_errors_name_exist():
    named = set(re.findall(r"(?:[Ww]ith|Run:?|'|others:|it:) ?sinkscope ([a-z]+)", SOURCE))
    assert named
    assert named <= set(command_line().commands), named
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"sinkscope\[(\w+)\]", SOURCE)) <= set(extras)
