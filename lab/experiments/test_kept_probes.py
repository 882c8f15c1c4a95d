"""The rows of kept runs, with values known by hand, and the figure."""

import kept_probes
import pytest
from kept_results import KeptResults

from sinkscope.errors import InputError


def probe(step, batch, rate, key):
    layers = {"dom_ratio": [4.0, None, 9.0], "dom_ratio_elsewhere": [3.0, 2.0, 1.0]}
    whole = {"sink_rate": rate, "sink_position": key, "num_super_neurons": 3}
    return {"step": step, "batch": batch, "whole": whole, "layers": layers}


@pytest.fixture
def result():
    """A run that was stopped between its last evaluation and its last probe."""
    model = {"num_hidden_layers": 3, "hidden_size": 48}
    training = {"batch_size": 8, "sequence_length": 1024, "learning_rate": 0.003, "weight_decay": 0.5, "steps": 12000}
    numbers = {"seed": 0, "learning_rate": 0.003, "weight_decay": 0.5, "initial_lambda": None}
    return {
        "run": {"stage": "explore-A", "variant": "softmax", **numbers},
        "config": {"data": ["prose"], "model": model, "training": training},
        "summary": None,
        "metrics": [{"step": 1000, "validation_loss": 5.0}, {"step": 2000, "validation_loss": 4.25}],
        "probes": [probe(1000, "random", 0.1, 5), probe(3000, "random", 0.034, 18), probe(3000, "text", 0.9, 1)],
    }


def test_a_row_by_hand(result):
    assert kept_probes.cells(result) == [
        *("A", "softmax", "3 x 48", "prose", "8 x 1,024", "0.003", "0.5", "stopped, of 12,000"),
        *("4.250", "2,000", "3.4%", "18", "9.0", "3.0", "3", "3,000"),
    ]
    assert len(kept_probes.cells(result)) == len(kept_probes.HEADS)
    assert kept_probes.cells(result | {"summary": {"steps": 12000}})[7] == "12,000", "the control"


def test_the_script_prints_and_draws(tmp_path, result, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    KeptResults(tmp_path / "kept", print).add(result)
    arguments = ["kept_probes", str(tmp_path / "kept"), "--figure", str(tmp_path / "course.png")]
    monkeypatch.setattr("sys.argv", arguments)
    kept_probes.main()
    assert capsys.readouterr().out.count("\n") == 3
    assert not list(tmp_path.glob(".*"))
    assert (tmp_path / "course.png").read_bytes().startswith(b"\x89PNG")


def test_runs_without_probes_are_refused(tmp_path, result, monkeypatch, capsys):
    with pytest.raises(InputError, match="A run of softmax has no held-out"):
        kept_probes.cells(result | {"probes": []})
    monkeypatch.setattr("sys.argv", ["kept_probes", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        kept_probes.main()
    assert "has no results-*.jsonl.xz" in capsys.readouterr().err
