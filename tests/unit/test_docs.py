"""The site without building it: its pages are there, links lead somewhere, and the page on Python names everything."""

import json
import re
from pathlib import Path

import pytest
import yaml

import sinkscope

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
WRITTEN_WITH_THE_SITE = {"contributing.md", "changelog.md", "reference_models.md", "commands.md"}


def in_nav(entries: list) -> list[str]:
    found = []
    for entry in entries:
        for value in entry.values():
            found += in_nav(value) if isinstance(value, list) else [value]
    return found


def is_page(path: Path) -> bool:
    """Whether a path below docs/ is a file, or a page that the site makes."""
    if not path.is_relative_to(DOCS):
        return False
    if any(path.relative_to(DOCS).match(pattern) for pattern in SITE["exclude_docs"].split()):
        return False
    made = path.with_suffix(".ipynb").is_file() or path.relative_to(DOCS).as_posix() in WRITTEN_WITH_THE_SITE
    return path.is_file() or made


def broken_links(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)]
    return [link for link in links if link and "://" not in link and not is_page((path.parent / link).resolve())]


def test_pages_of_the_site_are_there():
    pages = in_nav(SITE["nav"])
    assert all(is_page(DOCS / page) for page in pages), pages
    written = {
        path.relative_to(DOCS).with_suffix(".md").as_posix() for path in [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    }
    assert written <= set(pages), "a page that the navigation does not name"


@pytest.mark.parametrize("path", [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")], ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    assert broken_links(path) == []


def test_control_a_broken_link_is_found(tmp_path):
    (tmp_path / "page.md").write_text("[here](nowhere.md) and [there](https://example.org)")
    assert broken_links(tmp_path / "page.md") == ["nowhere.md"]
    assert (DOCS / "explore_picture.py").is_file()
    assert not is_page(DOCS / "explore_picture.py"), "the site leaves it out"


def test_what_a_cell_printed_is_wrapped():
    """The style wraps blocks of text by their class, which the extension writes only when it is asked to."""
    assert ".language-text" in (DOCS / "assets" / "site.css").read_text(encoding="utf-8")
    assert {"pymdownx.highlight": {"pygments_lang_class": True}} in SITE["markdown_extensions"]


def test_the_page_on_python_names_everything():
    named = set(re.findall(r"^::: sinkscope\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), flags=re.M))
    assert named == set(sinkscope.__all__) - {"__version__"}
