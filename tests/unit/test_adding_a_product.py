"""The product of CONTRIBUTING works as it stands there: its folder, and one line of the command line."""

import re
import subprocess
import sys
from pathlib import Path

from tiny_models import tiny_model

ROOT = Path(__file__).parents[2]
COMMANDS = """
import sys
from pathlib import Path

import sinkscope

sinkscope.__path__.append("rooms")
from sinkscope import cli
from sinkscope.cli_options import command
from sinkscope.embedding_norms.cli import embedding_norms_command

cli.app.command("embedding-norms", rich_help_panel="Look")(command(embedding_norms_command))


def code_of(*words):
    sys.argv = ["sinkscope", *words]
    try:
        cli.main()
    except SystemExit as end:
        return end.code


assert code_of("embedding-norms", "model", "--out", "run") == 0
# Read back without its model: the same page by `sinkscope report`.
assert code_of("report", "run", "--out", "again.html") == 0
# The control: a file that is not what the schema says is refused.
Path("run/summary.json").write_text('{"model": 1}')
assert code_of("report", "run", "--out", "no.html") == 2
"""


def product(folder: Path) -> None:
    """Writes the files that CONTRIBUTING shows into a folder of rooms."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Add a product")[1].split("\n## ")[0]
    shown = re.findall(r"`embedding_norms/(\w+\.\w+)`.*?```\w+\n(.*?)```", section, re.DOTALL)
    assert [name for name, _ in shown] == ["schemas.py", "norms.py", "page.py", "page.html", "cli.py"]
    room = folder / "rooms" / "embedding_norms"
    room.mkdir(parents=True)
    for name, text in [("__init__.py", ""), *shown]:
        (room / name).write_text(text, encoding="utf-8")


def test_a_product_is_a_folder_and_a_line(tmp_path):
    product(tmp_path)
    tiny_model("llama").save_pretrained(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS], capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "has the longest embedding" in done.stdout
    assert "summary.json" in done.stderr
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "The longest embeddings" in page
    again = (tmp_path / "again.html").read_text(encoding="utf-8")
    assert again.count("The longest embeddings") == page.count("The longest embeddings")
