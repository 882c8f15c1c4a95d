"""sinkscope intervene: every option, their combination, and every way to ask for what cannot be done."""

import json
import re

import numpy as np
import pytest
import torch
import yaml
from command_line import assert_refused, in_a_process
from tiny_models import tiny_model

from sinkscope.interventions.base import together
from sinkscope.interventions.mask import mask_to_self
from sinkscope.interventions.neurons import ablate_neurons
from sinkscope.models.anatomy import Neuron
from sinkscope.models.loading import load
from sinkscope.models.token_batches import token_batch
from sinkscope.results.tables import read_table
from sinkscope.tracing.trace import trace

SMALL = ("--num-sequences", 4, "--length", 40)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """3 layers of 4 heads, 80 neurons and 48 dimensions."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def experts_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-mixtral"
    tiny_model("mixtral").save_pretrained(folder)
    return folder


def arms(run) -> dict[str, dict[tuple, float | None]]:
    """Every observable before, after and under the control, by quantity, layer and position."""
    table = read_table(run / "observables")
    keys = list(zip(table["quantity"], table["layer"], table["position"], strict=True))
    return {arm: dict(zip(keys, table[arm], strict=True)) for arm in ("before", "after", "control")}


OPTIONS: dict[tuple[str, str], tuple[int, bool]] = {
    # option and value: (first position that can change, whether the control changes anything)
    ("--mask-to-self", "10"): (10, True),
    ("--block", "10:0-4"): (10, False),
    ("--allow", "0:0-39"): (0, False),
    ("--amplify", "10:4"): (10, True),
    ("--scale-norm", "10:4"): (10, False),
    ("--shift-mean", "10:4"): (10, True),
    ("--swap-deviation", "10:4"): (10, True),
    ("--random-direction", "10:4"): (10, True),
    ("--equalise", "0"): (0, False),
    ("--only", "10:9"): (10, False),
    ("--ablate", "1:7"): (0, True),
    ("--ablate-mean", "1:7"): (0, True),
    ("--ablate-resample", "1:7"): (0, True),
    ("--densify", "1:7"): (0, True),
    ("--transplant", "1:7@0:10"): (10, True),
    ("--zero-dimension", "5@10"): (10, False),
    ("--transplant-dimension", "5@0:10"): (10, False),
}


@pytest.mark.parametrize(("option", "expected"), OPTIONS.items(), ids=lambda value: str(value[0]).strip("-"))
def test_every_option_changes_what_it_says(option, expected, model_folder, sinkscope, tmp_path):
    result = sinkscope("intervene", model_folder, *option, *SMALL, "--out", "run")
    assert result.code == 0, result.err
    found = arms(tmp_path / "run")
    first, control_acts = expected
    assert found["after"] != found["before"]
    assert (found["control"] != found["before"]) == control_acts
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (check,) = summary["checks"]
    assert check["intervention"] == f"{option[0].strip('-').replace('-', '_')} {option[1]}"
    assert check["passed"] is not False
    assert check["text"] in " ".join(result.out.split())
    said = summary["control_is"]
    assert said.endswith(", nothing") is not control_acts
    assert said.split(",")[0] in " ".join(result.out.split())
    assert found["after"] != found["control"]
    # What a token computes depends on earlier ones alone; what it receives depends on later queries too.
    earlier = [key for key in found["before"] if key[0] == "dom_ratio" and key[2] < first]
    for key in earlier:
        assert found["after"][key] == pytest.approx(found["before"][key], rel=1e-5)
    for column in ("quantity", "position", "before", "after", "control"):
        assert column in result.out
    assert "Before: No sink" in result.out


@pytest.mark.parametrize("option", [("--clamp-neuron", "1:7@10"), ("--clamp-dimension", "5@10")])
def test_what_is_held_stays_where_it_was(option, model_folder, sinkscope, tmp_path):
    """Alone a clamp changes nothing; against an intervention it does."""
    masked = ("--mask-to-self", "10")
    for name, options in (("alone", option), ("masked", masked), ("both", (*masked, *option))):
        assert sinkscope("intervene", model_folder, *options, *SMALL, "--out", name).code == 0
    alone, free, held = (arms(tmp_path / name) for name in ("alone", "masked", "both"))
    before, after = (np.array(list(alone[arm].values()), dtype=float) for arm in ("before", "after"))
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
    assert held["after"] != free["after"]
    assert held["control"] == free["control"]


@pytest.mark.parametrize(
    ("kind", "quantities"),
    [("match-variance", ["value_variance"]), ("match-moments", ["value_variance", "second_moment"])],
)
def test_moments_are_matched_under_a_mask(kind, quantities, model_folder, sinkscope, tmp_path):
    masked = ("--mask-to-self", "10", "--layers", "0-2", *SMALL)
    for name, options in (("masked", ()), ("matched", (f"--{kind}", "10"))):
        result = sinkscope("intervene", model_folder, *masked, *options, "--out", name)
        assert result.code == 0, result.err
    before, free, matched = (
        arms(tmp_path / name)[arm] for name, arm in (("masked", "before"), ("masked", "after"), ("matched", "after"))
    )
    for key in (key for key in before if key[0] in quantities and key[2] == 10):
        assert abs(matched[key] - before[key]) < abs(free[key] - before[key])


def test_an_energy_that_its_variance_leaves_no_room_for_says_what_can_be_matched(model_folder, sinkscope):
    result = sinkscope("intervene", model_folder, "--only", "10:10", "--match-energy", "10", *SMALL, "--out", "run")
    assert result.code == 2
    assert "--match-moments 10" in result.err


def test_a_combination_equals_its_interventions_together(model_folder, sinkscope, tmp_path):
    given = ("--mask-to-self", "10", "--mask-to-self", "20", "--layers", "1-2", "--ablate", "0:3", "--ablate", "2:9")
    result = sinkscope("intervene", model_folder, *given, *SMALL, "--out", "run", "--json")
    assert result.code == 0, result.err
    summary = json.loads(result.out)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["positions"] == [10, 20]
    loaded = load(model_folder)
    batch = token_batch(loaded, length=40, num_sequences=4)
    neurons = [Neuron(0, None, 3), Neuron(2, None, 9)]
    parts = [*(mask_to_self(loaded, position, layers=[1, 2]) for position in (10, 20)), ablate_neurons(loaded, neurons)]
    before = trace(loaded, batch, effective_rank=False)
    with together(parts):
        after = trace(loaded, batch, effective_rank=False)
    with together(parts[1:]):
        without_one = trace(loaded, batch, effective_rank=False)
    found = arms(tmp_path / "run")
    for arm, expected in (("before", before), ("after", after)):
        received = torch.tensor([value for key, value in found[arm].items() if key[0] == "received"]).view(3, 40)
        torch.testing.assert_close(received, expected.recording["received"].mean(1), rtol=0, atol=1e-6)
    other = without_one.recording["received"].mean(1)
    assert (received - other).abs().max() > 1e-3, "the comparison must notice a missing intervention"
    assert summary["sink_rate_by_position"]["after"] == pytest.approx(after.recording.sink_rate.tolist())
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["interventions"] == {"mask_to_self": ["10", "20"], "ablate": ["0:3", "2:9"]}


def test_layers_and_heads_narrow_an_edit(model_folder, sinkscope, tmp_path):
    for name, options in (("all", ()), ("last", ("--layers", "2")), ("head", ("--heads", "0,3"))):
        given = ("--amplify", "10:8", "--layers", "0-2") if name == "all" else ("--amplify", "10:8", *options)
        assert sinkscope("intervene", model_folder, *given, *SMALL, "--out", name).code == 0
    everything, last, some = (arms(tmp_path / name) for name in ("all", "last", "head"))
    untouched = [key for key in last["before"] if key[1] < 2]
    assert all(last["after"][key] == last["before"][key] for key in untouched)
    assert any(everything["after"][key] != everything["before"][key] for key in untouched)
    assert some["after"] not in (everything["after"], some["before"])


def test_a_neuron_named_twice_is_one_neuron(model_folder, sinkscope, tmp_path):
    for name, neurons in (("once", ("--ablate", "1:7")), ("twice", ("--ablate", "1:7", "--ablate", "1:7"))):
        assert sinkscope("intervene", model_folder, *neurons, *SMALL, "--out", name).code == 0
    assert arms(tmp_path / "once") == arms(tmp_path / "twice")


def test_a_neuron_of_an_expert(experts_folder, sinkscope, tmp_path):
    run = ("intervene", experts_folder, *SMALL, "--out", "run")
    assert sinkscope(*run, "--ablate", "1:2:5").code == 0
    found = arms(tmp_path / "run")
    assert found["after"] != found["before"]
    assert_refused(sinkscope(*run, "--overwrite", "--ablate", "1:5"), "layer:expert:neuron", tmp_path)


NEW_KIND = """
from sinkscope.interventions import kinds

def negated(setting, values, where):
    from sinkscope.interventions.aggregation import ChangeAggregation

    mean = setting.calibration
    return [ChangeAggregation(setting.loaded, "scale_norm", at, -1.0, calibration=mean) for (at,) in values]

kinds.KINDS["negate"] = kinds.Kind(
    form="POSITION",
    example="10",
    does=" whose aggregation is turned round",
    read=lambda text: (int(text),),
    make=negated,
    control=kinds.KINDS["mask_to_self"].make,
    control_is="the token sees only itself",
    acts_at=lambda value: value[0],
)
"""


def test_a_new_kind_is_one_entry(model_folder, tmp_path):
    help_text = in_a_process("intervene", "--help", cwd=tmp_path, before=NEW_KIND).stdout
    assert "POSITION whose aggregation is turned round." in help_text
    run = ("intervene", model_folder, "--out", tmp_path / "run", *SMALL)
    found = in_a_process(*run, "--negate", 10, cwd=tmp_path, before=NEW_KIND)
    assert found.returncode == 0, found.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["positions"] == [10]
    assert summary["control_is"] == "for negate, the token sees only itself"
    by_arm = arms(tmp_path / "run")
    changed = {key for key, value in by_arm["before"].items() if by_arm["after"][key] != value}
    assert {at for quantity, _, at in changed if quantity == "dom_ratio"} == set(range(10, 40))
    assert by_arm["control"] != by_arm["after"]
    refused = in_a_process(*run, "--negate", "ten", cwd=tmp_path, before=NEW_KIND)
    assert refused.returncode == 2
    assert "--negate cannot be 'ten'. Write POSITION, such as 10." in refused.stderr


REFUSED = {
    # a position outside the text
    "--mask-to-self 64": "no position 64. Choose from 0 to 63",
    "--mask-to-self -1": "no position -1. Choose from 0 to 63",
    "--mask-to-self 40 --length 40": "no position 40. Choose from 0 to 39",
    "--amplify 64:2": "no position 64. Choose from 0 to 63",
    "--equalise 64": "no position 64. Choose from 0 to 63",
    "--block 64:0": "no position 64. Choose from 0 to 63",
    "--block 10:70": "no position 70. Choose from 0 to 63",
    "--allow 0:0-64": "no position 64. Choose from 0 to 63",
    "--transplant 1:3@0:70": "no position 70. Choose from 0 to 63",
    "--transplant 1:3@70:10": "no position 70. Choose from 0 to 63",
    "--clamp-neuron 1:3@64": "no position 64. Choose from 0 to 63",
    "--clamp-dimension 3@64": "no position 64. Choose from 0 to 63",
    "--zero-dimension 3@-1": "no position -1. Choose from 0 to 63",
    # a factor that is not finite, or becomes so
    "--amplify 10:nan": "must be a finite number",
    "--amplify 10:inf": "must be a finite number",
    "--scale-norm 10:-inf": "must be a finite number",
    "--amplify 10:1e40": "NaN or infinity in what leaves layer 0, at position 10",
    # a layer, head, neuron, expert or dimension that does not exist
    "--ablate 3:0": "no layer 3. Choose from 0 to 2",
    "--ablate -1:0": "no layer -1. Choose from 0 to 2",
    "--mask-to-self 10 --layers 0-9": "no layer 3, 4, 5, 6, 7, 8, 9. Choose from 0 to 2",
    "--mask-to-self 10 --heads 4": "no head 4. Choose from 0 to 3",
    "--ablate 2:80": "from 0 to 79",
    "--ablate-mean 2:-1": "from 0 to 79",
    "--densify 1:80": "from 0 to 79",
    "--transplant 1:90@0:10": "from 0 to 79",
    "--clamp-neuron 1:80@10": "from 0 to 79",
    "--ablate 0:1:3": "Layer 0 has no experts, so no expert 1.",
    "--zero-dimension 48@0": "no dimension 48. Choose from 0 to 47",
    "--clamp-dimension 48@10": "no dimension 48. Choose from 0 to 47",
    "--clamp-dimension -1@10": "no dimension -1. Choose from 0 to 47",
    # an intervention on nothing
    "": "at least one intervention, such as --mask-to-self 10",
    "--mask-to-self 10 --layers 2-0": "--layers cannot be '2-0'. Write numbers such as 0-2,7",
    "--mask-to-self 10 --heads 3-1": "--heads cannot be '3-1'. Write numbers",
    "--block 10:4-0": "--block cannot be '10:4-0'. Write QUERY:KEYS",
    "--ablate 1:3 --layers 0": "--layers cannot be chosen for --ablate. Leave --layers out",
    "--ablate 1:3 --heads 0": "--heads cannot be chosen for --ablate. Leave --heads out",
    "--transplant 1:3@10:10": "two different positions",
    "--amplify 0:4 --bos": "same state at position 0",
    "--swap-deviation 0:4 --bos": "same state at position 0",
    "--random-direction 0:4 --bos": "same state at position 0",
    # two that conflict
    "--amplify 10:4 --scale-norm 10:2": "Both amplify_variance and scale_norm set the aggregation",
    "--ablate 1:3 --ablate-mean 1:3": "set the neurons at the same place. Leave one",
    "--mask-to-self 10 --mask-to-self 10": "set the mask at the same place. Leave one",
    "--mask-to-self 10 --allow 10:0-3": "set the mask at the same place. Leave one",
    "--clamp-neuron 1:3@10 --ablate 1:3": "set the neurons at the same place. Leave one",
    "--zero-dimension 3@10 --clamp-dimension 3@10": "residual stream",
    "--block 0:0": "no key at all. Leave it at least its own",
    # text that cannot be read
    "--mask-to-self ten": "POSITION, such as 10",
    "--amplify 10": "POSITION:FACTOR",
    "--amplify 10:x": "POSITION:FACTOR",
    "--amplify 10:4:2": "POSITION:FACTOR",
    "--ablate 2": "LAYER:NEURON",
    "--ablate 1:2:3:4": "LAYER:NEURON",
    "--transplant 2:9@0": "LAYER:NEURON@SOURCE:TARGET",
    "--block 10:": "QUERY:KEYS",
    "--block 10:0-": "QUERY:KEYS",
    "--zero-dimension 3": "DIMENSION@POSITION",
    "--clamp-neuron 3@10": "LAYER:NEURON@POSITION",
    "--mask-to-self 10 --layers x": "--layers cannot be 'x'. Write numbers",
    "--mask-to-self 10 --layers 0,": "--layers cannot be '0,'. Write numbers",
}


@pytest.mark.parametrize(("given", "message"), REFUSED.items(), ids=lambda value: re.sub(r"\W+", "_", value)[:40])
def test_refused(given, message, model_folder, sinkscope, tmp_path):
    assert_refused(sinkscope("intervene", model_folder, "--out", "run", *given.split()), message, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_first_token_that_sees_others_has_a_variance_to_amplify(model_folder, sinkscope, tmp_path):
    command = ("intervene", model_folder, "--amplify", "0:4", "--allow", "0:0-19", "--bos", *SMALL, "--out", "run")
    assert sinkscope(*command).code == 0


def test_a_run_is_replaced_only_when_asked(model_folder, sinkscope, tmp_path):
    command = ("intervene", model_folder, "--mask-to-self", "10", *SMALL, "--out", "run")
    assert sinkscope(*command).code == 0
    environment = tmp_path / "run" / "environment.json"
    environment.write_text("{}")  # a mark, since two runs within one second write the same text
    assert_refused(sinkscope(*command), "--overwrite", tmp_path)
    assert environment.read_text() == "{}"
    assert sinkscope(*command, "--overwrite").code == 0
    assert "started_at" in environment.read_text()
