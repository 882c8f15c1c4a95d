"""The models that come with the package: what their card says of them holds, and each name leads to them."""

import json

import pytest
import torch
from command_line import assert_refused
from study_tables import write_study_folder

from sinkscope import load, token_batch, trace
from sinkscope.models.names import FOLDER, REFERENCES, reference_run
from sinkscope.pretrain.model_specs import find_configuration
from sinkscope.report.comparison import compare

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


def test_one_has_a_sink_and_the_other_none(loaded):
    found = trace(loaded, token_batch(loaded)).summary
    largest = max(found["dom_ratio"]["sink"] or found["dom_ratio"]["elsewhere"])
    if loaded.name.endswith("softmax"):
        assert [sink["position"] for sink in found["sinks"]] == [0]
        assert found["sink_rate"] == pytest.approx(0.237, abs=0.005)
        assert (found["birth_layers"], found["massive_dimensions"]) == ([5], [171, 57])
        assert {(unit["layer"], unit["neuron"]) for unit in found["super_neurons"]} >= {(5, 148), (12, 455), (15, 522)}
        assert largest == pytest.approx(94.5, rel=0.02)
    else:
        assert found["sinks"] == found["super_neurons"] == found["massive_dimensions"] == []
        assert found["sink_rate"] < 0.005
        assert largest < 15


def test_each_is_small_enough_for_a_wheel():
    sizes = [sum(path.stat().st_size for path in reference_run(name).rglob("*")) for name in REFERENCES]
    assert max(sizes) <= 35e6
    assert sum(sizes) <= 60e6


def test_they_differ_in_their_attention_alone():
    configs = [(reference_run(name) / "config.yaml").read_text().splitlines() for name in REFERENCES]
    differing = [pair for pair in zip(*configs, strict=True) if pair[0] != pair[1]]
    assert differing == [("  attention_variant: softmax", "  attention_variant: learned_sink")]


def test_the_first_weights_are_drawn_again_from_the_seed():
    first, again = (load(f"init:{name}", device="cpu") for name in (REFERENCES[0], REFERENCES[0]))
    assert first.weight_hash == again.weight_hash != load(REFERENCES[0], device="cpu").weight_hash
    found = find_configuration(REFERENCES[0])
    assert found is not None
    assert (found.seed, found.run) == (0, FOLDER / "softmax")


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
    assert "learned_sink reaches softmax's final validation loss" in answer
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h2>Verdicts</h2>" in page
    for figure in ("effective-rank", "layers-effective-rank"):  # through training, and by layer
        assert page.count(f'data-figure="{figure}"') == 1
    assert (tmp_path / "page-tables" / "summary.json").is_file()


def test_another_name_is_refused(sinkscope, tmp_path):
    assert_refused(
        sinkscope("trace", "reference:sigmoid"), "expected reference:softmax or reference:learned_sink", tmp_path
    )
