"""The tutorials run from the first cell to the last, on the models that come with the package, and are kept without
outputs. `make docs` runs them in a kernel; here they share this process, which has torch already."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path, capsys):
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    names: dict = {}
    for cell in cells:
        assert cell["outputs"] == []
        exec(compile("".join(cell["source"]), path.name, "exec"), names)
    assert len(cells) > 4
    assert capsys.readouterr().out


def test_there_is_one_for_each_reader():
    assert [path.stem for path in NOTEBOOKS] == ["eight_bits", "pretrain_pair", "prompt_sink"]
