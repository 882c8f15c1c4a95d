"""The product of CONTRIBUTING works as it stands there: its folder, and one line of the command line."""

import re
import subprocess
import sys
from pathlib import Path

from tiny_models import tiny_model

ROOT = Path(__file__).parents[2]
RUN = """
import sys
import sinkscope

sinkscope.__path__.append(sys.argv[1])
from sinkscope import cli
from sinkscope.cli_options import command
from sinkscope.embedding_norms.cli import embedding_norms_command

cli.app.command("embedding-norms", rich_help_panel="Look")(command(embedding_norms_command))
sys.argv = ["sinkscope", *sys.argv[2:]]
cli.main()
"""


def product(folder: Path) -> Path:
    """The files that CONTRIBUTING shows, in a folder of their own."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Add a product")[1].split("\n## ")[0]
    shown = re.findall(r"`embedding_norms/(\w+\.\w+)`.*?```\w+\n(.*?)```", section, re.DOTALL)
    assert [name for name, _ in shown] == ["schemas.py", "norms.py", "page.py", "page.html", "cli.py"]
    room = folder / "rooms" / "embedding_norms"
    room.mkdir(parents=True)
    for name, text in [("__init__.py", ""), *shown]:
        (room / name).write_text(text, encoding="utf-8")
    return room.parent


def run(folder: Path, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", RUN, folder, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_product_is_a_folder_and_a_line(tmp_path):
    rooms = product(tmp_path)
    tiny_model("llama").save_pretrained(tmp_path / "model")
    told = run(rooms, "embedding-norms", tmp_path / "model", "--out", tmp_path / "run")
    assert told.returncode == 0, told.stderr
    assert "has the longest embedding" in told.stdout
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "The longest embeddings" in page
    # Read back without its model: the same page by `sinkscope report`.
    again = run(rooms, "report", tmp_path / "run", "--out", tmp_path / "again.html")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again.html").read_text(encoding="utf-8").count("The longest embeddings") == page.count(
        "The longest embeddings"
    )
    # The control: a file that is not what the schema says is refused.
    (tmp_path / "run" / "summary.json").write_text('{"model": 1}')
    refused = run(rooms, "report", tmp_path / "run", "--out", tmp_path / "no.html")
    assert refused.returncode == 2
    assert "model" in refused.stderr
