"""Every page and picture says and draws today what it did before: headings, captions, tables, axes, names, numbers.

A change that should not change a page passes this unchanged. One that should, such as another word or order, writes
them again, and what is printed then is what a reader will see changed:

    PYTHONPATH=src:tests python tests/parity/test_pages.py [PAGE ...]

Numbers may differ as in test_parity; in running text and tables, a fraction by its last digit.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_results as small
from command_line import in_a_process
from kept_pages import page, picture, thinned
from kept_values import differences, keep, plain, read, shown
from tiny_models import tiny_model

import sinkscope

KEPT = Path(__file__).parent / "kept" / "pages"


def shown_by(result: Any) -> dict:
    """The page of a result, its picture in a notebook, and every figure of the page as a picture."""
    with tempfile.TemporaryDirectory() as folder:
        found = page(result.report(Path(folder) / "page.html"))
    found["picture"] = picture(result.plot())
    found["pictures"] = picture(result.plot(*found["figures"]))
    return plain(found)


def commanded(folder: Path, *arguments: str | Path) -> dict:
    """The page that a command writes."""
    out = folder / "page.html"
    done = in_a_process(*arguments, "--out", out, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return plain(page(out))


def trained_alone(folder: Path) -> dict:
    return shown_by(sinkscope.compare_training(small.planted_runs(folder)[:1]))


def trained_together(folder: Path) -> dict:
    return shown_by(sinkscope.compare_training(small.planted_runs(folder)))


def compared(folder: Path) -> dict:
    runs = [
        result.save(folder / name) for name, result in (("one", small.study_of_chain()), ("two", small.study_of_gpt2()))
    ]
    return commanded(folder, "compare", *runs)


def compared_with_training(folder: Path) -> dict:
    runs = [small.study_of_gpt2().save(folder / "study"), small.trace_of_text().save(folder / "trace")]
    return commanded(folder, "compare", *runs, *small.planted_runs(folder))


PAGES: dict[str, Callable[[], dict]] = {
    "study-chain": lambda: shown_by(small.study_of_chain()),
    "study-gpt2": lambda: shown_by(small.study_of_gpt2()),
    "trace-text": lambda: shown_by(small.trace_of_text()),
    "trace-gemma2": lambda: shown_by(small.traced(tiny_model("gemma2"))),
    "intervene": lambda: shown_by(small.intervened_chain()),
    "audit": lambda: shown_by(small.audited()),
    "remedy": lambda: shown_by(small.remedied()),
    "bias": lambda: shown_by(small.biased(tiny_model("llama"))),
    "fingerprint": lambda: shown_by(small.fingerprinted()),
    **{
        name: lambda make=make: in_folder(make)
        for name, make in {
            "training": trained_alone,
            "training-reference": lambda folder: commanded(folder, "report", "reference:softmax"),
            "compare-training": trained_together,
            "compare": compared,
            "compare-with-training": compared_with_training,
        }.items()
    },
}


def in_folder(make: Callable[[Path], dict]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        return make(Path(folder))


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_what_it_was(name):
    found = list(differences("", read(KEPT / f"{name}.json.gz"), PAGES[name]()))
    assert not found, shown(found)


def test_what_changed_on_a_page_is_found(tmp_path):
    result = small.fingerprinted()
    path = result.report(tmp_path / "page.html")
    found = plain(page(path))
    drawn = plain(picture(result.plot()))

    def after(*replacements):
        text = path.read_text(encoding="utf-8")
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        changed = tmp_path / "changed.html"
        changed.write_text(text, encoding="utf-8")
        return list(differences("", found, plain(page(changed))))

    assert after() == []
    assert after(("Effect by pair</bdi>", "Effect</bdi>")) == ["text: -h3: Effect by pair", "text: +h3: Effect"]
    assert after(("largest unrelated z</th>", "largest z</th>"))
    assert after(("<tbody><tr>", "<tbody><tr></tr><tr>"))
    assert after(('"hoverongaps":false', '"hoverongaps":true'))
    assert after(('data-figure="pairs"', 'data-figure="other"'))
    cell = found["figures"]["pairs"]["traces"][0]["z"]["flat"]
    number = next(value for value in cell if value and value < 0.5)
    assert any("before" in line for line in after((f"{number}", f"{1.01 * number:.4g}")))
    # In a picture too.
    for place, value in (("title", "another"), ("images", [])):
        other = copy.deepcopy(drawn)
        other["panels"][0][place] = value
        assert list(differences("", drawn, other))
    assert drawn["panels"][0]["title"] == "Effect by pair"
    assert drawn["panels"][0]["images"]


def test_long_lists_are_thinned_and_their_sums_kept():
    values = [float(number) for number in range(600)]
    kept = thinned(values)
    assert (kept["count"], len(kept["every 10"]), kept["sums"][0]) == (600, 60, 179700.0)
    between = [*values[:5], 1000.0, *values[6:]]
    assert list(differences("y", kept, thinned(between)))


if __name__ == "__main__":
    keep(KEPT, PAGES, sys.argv[1:])
