"""Paths as users type them: ~ is home, and what can name no file is refused wherever a path is given."""

import json
from pathlib import Path

import pytest

from sinkscope.errors import InputError
from sinkscope.results.parts import Parts
from sinkscope.results.run_folder import check_output, check_page, run_folder
from sinkscope.user_paths import user_path


@pytest.fixture
def looped(tmp_path):
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    return tmp_path / "one"


def test_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~") == tmp_path
    assert user_path(Path("~/x")) == tmp_path / "x"
    with run_folder(Path("~/x")) as folder:
        folder.write_json("summary.json", {})
    assert json.loads((tmp_path / "x" / "summary.json").read_text()) == {}
    for overwrite in (False, True):
        with pytest.raises(InputError, match=r"has no \.sinkscope file"):
            check_output(Path("~"), overwrite)
    assert user_path("org/name") == Path("org/name")  # the control: what is not there may be named


def test_what_can_name_no_file(tmp_path, looped):
    wrong = {
        "~nosuchuser/x": "home directory",
        "x" * 300: "File name too long",
        "/".join(["x" * 200] * 50): r"\.\.\. of 10,049 characters': File name too long",
        looped: "symbolic links",
        looped / "x": "symbolic links",
        "a\0b": "null",
    }
    for path, found in wrong.items():
        for use in (user_path, check_output, check_page, lambda path: Parts(path, {})):
            with pytest.raises(InputError, match=found) as error:
                use(path)
            assert len(str(error.value)) < 500
