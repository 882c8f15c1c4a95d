"""The models that come with the package: what their card says of them holds, and each name leads to them."""

import json

import pytest
import torch
import yaml
from command_line import assert_refused
from study_tables import write_study_folder

from sinkscope import load, token_batch, trace
from sinkscope.compare.page import compare
from sinkscope.models.initial import find_configuration
from sinkscope.names import FOLDER, REFERENCES, reference_run
from sinkscope.results.run import read_run
from sinkscope.tracing.figures import chain_panels

TEXT = (
    "The gentleman took off his hat, and after a moment of silence he said that he had come a long way, that he was "
    "tired, and that he should be very glad if he might be allowed to sit down by the fire before he went on."
)


@pytest.fixture(scope="module", params=REFERENCES)
def loaded(request):
    return load(request.param, device="cpu")


def mean_loss(model, ids):
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


def test_it_writes_english(loaded):
    ids = loaded.tokenizer(TEXT, return_tensors="pt").input_ids
    shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
    assert mean_loss(loaded.model, ids) < 3.3
    assert mean_loss(loaded.model, shuffled) > 6, "the same words in another order are no English"


SINKS = {
    "reference:softmax": dict(
        rate=0.331, births=[7], dimensions=[20, 78, 40], dom_ratio=28.2, neurons={(7, 438), (6, 348), (6, 545)}
    ),
    "reference:head_norm": dict(rate=0.335, births=[], dimensions=[], dom_ratio=7.53, neurons=set()),
}


def test_its_sink_is_the_one_that_the_card_names(loaded):
    found = trace(loaded, token_batch(loaded)).summary
    largest = max(found["dom_ratio"]["sink"] or found["dom_ratio"]["elsewhere"])
    if said := SINKS.get(loaded.name):
        assert [sink["position"] for sink in found["sinks"]] == [0]
        assert found["sink_rate"] == pytest.approx(said["rate"], abs=0.005)
        assert (found["birth_layers"], found["massive_dimensions"]) == (said["births"], said["dimensions"])
        assert {(neuron["layer"], neuron["neuron"]) for neuron in found["super_neurons"]} == said["neurons"]
        assert largest == pytest.approx(said["dom_ratio"], rel=0.02)
    else:
        assert found["sinks"] == found["super_neurons"] == found["massive_dimensions"] == []
        assert found["sink_rate"] < 0.005
        assert largest < 15


def test_a_sink_without_disparity_is_shown_from_the_layer_before_it(tmp_path):
    found = trace("reference:head_norm", token_batch("reference:head_norm", num_sequences=8))
    variance, writes, *_ = chain_panels(read_run(found.save(tmp_path / "run")))
    assert ({row[0] for row in variance.rows}, {row[0] for row in writes.rows}) == ({0, 7}, {7})
    assert "in the layer before the first with the sink" in writes.caption


def test_they_are_small_enough_for_a_wheel():
    sizes = [sum(path.stat().st_size for path in reference_run(name).rglob("*")) for name in REFERENCES]
    assert max(sizes) <= 30e6
    assert sum(sizes) <= 80e6


def test_they_differ_in_their_attention_alone():
    configs = [yaml.safe_load((reference_run(name) / "config.yaml").read_text()) for name in REFERENCES]
    attention = [
        (config["model"].pop("attention_variant", "softmax"), config["model"].pop("variant_options", None))
        for config in configs
    ]
    assert attention == [("softmax", None), ("head_norm", {"initial_lambda": 0.25}), ("learned_sink", None)]
    assert configs[0] == configs[1] == configs[2]


def test_the_first_weights_are_drawn_again_from_the_seed():
    first, again = (load(f"init:{name}", device="cpu") for name in (REFERENCES[0], REFERENCES[0]))
    assert first.weight_hash == again.weight_hash != load(REFERENCES[0], device="cpu").weight_hash
    found = find_configuration(REFERENCES[0])
    assert found is not None
    assert (found.seed, found.run) == (2, FOLDER / "softmax")


def test_the_default_is_the_softmax_model(sinkscope, tmp_path):
    result = sinkscope("trace", "--num-sequences", 4, "--json", "--out", "run")
    assert result.code == 0, result.err
    assert json.loads(result.out)["model"] == "reference:softmax"


def test_comparing_them_shows_training_and_studies_in_one_page(tmp_path):
    studied = []

    def study_of(name):
        studied.append(name)
        return write_study_folder(tmp_path / name.replace(":", "-"))

    answer = compare(REFERENCES, tmp_path / "page.html", run_of=study_of)
    assert studied == list(REFERENCES)
    assert "Of 2 other variants, learned_sink reaches softmax's final validation loss" in answer
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h2>Verdicts</h2>" in page
    for figure in ("effective-rank", "layers-effective-rank"):  # through training, and by layer
        assert page.count(f'data-figure="{figure}"') == 1
    assert (tmp_path / "page-tables" / "summary.json").is_file()


def test_another_name_is_refused(sinkscope, tmp_path):
    assert_refused(
        sinkscope("trace", "reference:sigmoid"),
        "'reference:sigmoid' in the package. Choose one of reference:softmax, reference:head_norm",
        tmp_path,
    )
