"""What mkdocs does beyond its pages: runs the notebooks, brings in pages of the repository, and allows no network.

A notebook is stored without outputs, run when the site is built, and shown as a page of the same name.
"""

from __future__ import annotations

import base64
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbclient import NotebookClient

from sinkscope.cli import command_line

ROOT = Path(__file__).parents[1]
BROUGHT_IN = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "reference_models.md": "src/sinkscope/reference/README.md",
}
"""Pages of the site that stand elsewhere in the repository."""
LOADED = re.compile(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="?https?:|<link\b(?![^>]*canonical)[^>]*href="?https?:')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, source in BROUGHT_IN.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "commands.md", content=_commands()))
    for notebook in [file for file in files if file.src_path.endswith(".ipynb")]:
        for generated in _executed(notebook, config):
            files.append(generated)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Ends every page with a link to the words."""
    to_glossary = posixpath.relpath("glossary.md", posixpath.dirname(page.file.src_uri) or ".")
    return f"{markdown}\n\n---\n\n[What the words mean]({to_glossary})\n"


def on_post_page(output: str, page: object, config: MkDocsConfig) -> str:
    if found := LOADED.search(output):
        raise PluginError(f"{page} would load something from the network: {found[0]}")
    return output


def _commands() -> str:
    """The help of every command."""
    parts = ["# Commands\n\nEvery command with its options, as `sinkscope COMMAND --help` prints them."]
    for name, command in command_line().commands.items():
        context = command.make_context(f"sinkscope {name}", [], resilient_parsing=True)
        parts.append(f"## sinkscope {name}\n\n```text\n{command.get_help(context)}\n```")
    return "\n\n".join(parts)


def _executed(file: File, config: MkDocsConfig) -> Iterator[File]:
    """A notebook as a page with what its cells gave, and the pictures of that page."""
    assert file.abs_src_path is not None
    notebook = nbformat.read(file.abs_src_path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", coalesce_streams=True).execute()
    stem, parts, num_pictures = file.src_path.removesuffix(".ipynb"), [], 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            if output.get("name") == "stderr":  # bars of progress
                continue
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "text/html" in data:
                parts.append(f'<div class="output">{data["text/html"]}</div>')
            elif "image/png" in data:
                num_pictures += 1
                picture = f"{stem}-{num_pictures}.png"
                yield File.generated(config, picture, content=base64.b64decode(data["image/png"]))
                parts.append(f"![What the cell above draws]({Path(picture).name})")
            else:
                parts.append(f"```text\n{data['text/plain'].rstrip()}\n```")
    download = f"[This page as a notebook]({Path(stem).name}.ipynb), without outputs."
    yield File.generated(config, f"{stem}.md", content="\n\n".join([*parts, download]))
