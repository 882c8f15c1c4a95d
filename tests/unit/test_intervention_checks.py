"""Every requested intervention is checked: it passes where it acts as its name says, and fails where it does not."""

import json
from dataclasses import replace
from functools import cache

import pytest
from tiny_models import tiny_model

import sinkscope
from sinkscope.interventions import kinds
from sinkscope.interventions.aggregation import ChangeAggregation
from sinkscope.interventions.checks import AtTarget
from sinkscope.interventions.mask import mask_to_self

CHECKED = {
    # kind: (what is asked for, what is on with it, the factor of one that only scales, which must fail the check)
    "mask_to_self": ("10", {}, 1.0),
    "block": ("10:10", {}, 1.0),
    "only": ("10:9", {}, 1.0),
    "amplify": ("10:4", {}, 1.0),
    "scale_norm": ("10:4", {}, 1.0),
    "shift_mean": ("10:4", {}, 3.0),
    "equalise": ("1", {}, 1.0),
    "match_variance": ("10", {"allow": "10:11-39"}, 1.0),
    "match_energy": ("10", {"allow": "10:11-39"}, 1.0),
    "match_moments": ("10", {"allow": "10:11-39"}, 1.0),
}


@cache
def model():
    return tiny_model("llama")


def intervene(interventions, **others):
    return sinkscope.intervene(model(), interventions, **{"num_sequences": 32, "length": 40, **others})


def test_every_kind_with_a_check_is_tried_here():
    # Before the norm it is the same check of the same formula, for models that have one.
    assert {*CHECKED, "amplify_before_norm"} == {name for name, kind in kinds.KINDS.items() if kind.check is not None}
    assert kinds.KINDS["amplify_before_norm"].check is kinds.KINDS["amplify"].check


@pytest.mark.parametrize("kind", CHECKED)
def test_an_intervention_passes_its_check_and_another_in_its_place_fails(kind, monkeypatch):
    value, others, factor = CHECKED[kind]
    (*_, passed) = intervene({**others, kind: value}).checks
    assert (passed.intervention, passed.passed) == (f"{kind} {value}", True)
    assert passed.text.startswith(f"{kind} {value} passed its check: ")

    def scaled(setting, values, where):
        scale = {"calibration": setting.calibration}
        return [ChangeAggregation(setting.loaded, "scale_norm", at, factor, **scale) for at, *_ in values]

    monkeypatch.setitem(kinds.KINDS, kind, replace(kinds.KINDS[kind], make=scaled))
    (*_, failed) = intervene({**others, kind: value}).checks
    assert failed.passed is False
    assert failed.text.startswith(f"{kind} {value} failed its check. Expected: ")
    assert ". Measured: " in failed.text


def test_what_is_scaled_is_compared_with_what_the_others_leave(monkeypatch):
    together = {"mask_to_self": 10, "amplify": "10:4"}
    assert [check.passed for check in intervene(together).checks] == [True, True]
    monkeypatch.setattr(AtTarget, "without", property(lambda at: at.baseline))
    assert [check.passed for check in intervene(together).checks] == [True, False], "the control"


def test_layers_are_those_acted_on():
    (check,) = intervene({"amplify": "10:4"}, layers=[1, 2]).checks
    assert check.passed


def test_what_cannot_be_checked_says_why():
    by_kind = {"amplify": "10:4", "scale_norm": "12:3", "ablate": ["1:7", "1:8"], "block": "13:0"}
    few = {check.intervention: check for check in intervene(by_kind, num_sequences=1).checks}
    assert {name: check.passed for name, check in few.items()} == {
        "amplify 10:4": None,
        "scale_norm 12:3": True,
        "ablate 1:7": None,
        "ablate 1:8": None,
        "block 13:0": None,
    }
    assert few["amplify 10:4"].text.endswith("that needs 8 sequences or more, and one sequence was read.")
    (heads,) = intervene({"mask_to_self": 10}, heads=[0]).checks
    assert heads.text.endswith("it acts on some heads, and the check reads all of them together.")


def test_checks_stand_in_the_summary_and_on_the_page(tmp_path):
    found = intervene({"amplify": "10:4"}, num_sequences=8)
    (check,) = found.checks
    page = found.report(tmp_path / "page.html").read_text()
    assert check.text in page
    saved = found.save(tmp_path / "run")
    summary = json.loads((saved / "summary.json").read_text())
    assert summary["checks"] == [{"intervention": "amplify 10:4", "passed": True, "text": check.text}]
    # A run of an earlier version has no checks, and is read.
    (saved / "summary.json").write_text(json.dumps({name: summary[name] for name in summary if name != "checks"}))
    assert check.text not in sinkscope.load_result(saved).report(tmp_path / "old.html").read_text()


def test_a_control_knows_all_that_is_requested_and_says_where_it_moved(monkeypatch):
    def elsewhere(setting, values, where):
        return [mask_to_self(setting.loaded, setting.free_positions[0])]

    masked = kinds.KINDS["mask_to_self"]
    monkeypatch.setitem(kinds.KINDS, "moved", replace(masked, control=elsewhere, control_is="another token is masked"))
    alone = intervene({"moved": 10}).control_is
    assert alone == "for moved, another token is masked, at position 0"
    among = intervene({"moved": 10, "amplify": ["0:2", "1:2"]}).control_is
    assert among.startswith("for moved, another token is masked, at position 2; for amplify, ")


def test_a_control_takes_no_neuron_that_another_request_acts_on():
    alone = intervene({"ablate": "1:7"}).control_is
    before, drawn = alone.rstrip(")").split(" (")
    assert before == "for ablate, as many random neurons, matched in size"
    among = intervene({"ablate": "1:7", "densify": drawn}).control_is
    assert among.startswith(f"{before} (1:")
    assert f"{before} ({drawn})" not in among
