"""Every result has one shape: a story, a summary, tables; a short repr, a notebook's view, a folder and a page."""

import json
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_model

import sinkscope
from sinkscope.interventions.specs import read_specs
from sinkscope.results.kinds import kinds
from sinkscope.results.tables import Column, Schema


@pytest.fixture(scope="module")
def traced():
    model = tiny_model("llama")
    return sinkscope.trace(model, sinkscope.token_batch(sinkscope.load(model), num_sequences=3, length=24))


class Small(sinkscope.Result):
    """A result as a test needs it."""

    kind = "trace"
    headline = ("found", "name", "value")
    lacking = ("all",)
    story = "<b>bold</b>"
    schemas = (Schema("found", (Column("name", "str", "Its name"), Column("value", "float", "Its value", True))),)

    @property
    def tables(self):
        return {"found": {"name": ["<script>"] * 50, "value": [1.0] * 49 + [None]}}


def test_every_result_has_this_shape():
    for name in (
        "Trace",
        "Study",
        "InterventionResult",
        "Fingerprint",
        "Bias",
        "AuditResult",
        "RemedyResult",
        "TrainingComparison",
    ):
        kind = getattr(sinkscope, name)
        assert issubclass(kind, sinkscope.Result)
        assert kind.__repr__ is sinkscope.Result.__repr__, "a dataclass would write its own, of any length"
        assert kinds()[kind.kind].headline[0]
        assert all(hasattr(kind, part) for part in ("story", "summary"))


def test_a_model_is_given_as_it_is_at_hand(tmp_path):
    model = tiny_model("llama")
    loaded = sinkscope.load(model)
    batch = sinkscope.token_batch(model, num_sequences=2, length=24)
    assert batch.ids.equal(sinkscope.token_batch(loaded, num_sequences=2, length=24).ids)
    assert (
        sinkscope.anatomy_of(loaded).layers[0].output_projection
        is sinkscope.anatomy_of(model).layers[0].output_projection
    )
    assert sinkscope.probe(loaded, batch).whole == sinkscope.probe(model, batch).whole
    model.save_pretrained(tmp_path)
    assert sinkscope.probe(tmp_path, batch).whole == sinkscope.probe(model, batch).whole
    norms = sinkscope.insert_head_norm(loaded)
    assert norms[0] in set(model.modules())
    sinkscope.remove_head_norm(loaded)
    for weights in (sinkscope.unplug(loaded, [(1, 3)]), sinkscope.unplug(model, ["1:3"])):
        assert not weights.model.layers[1].mlp.down_proj.weight[:, 3].any()
    with pytest.raises(sinkscope.InputError, match="Load it first"):
        sinkscope.mask_to_self("gpt2", 10)  # type: ignore[arg-type]


def test_a_trace_without_a_text_is_of_random_tokens():
    model = sinkscope.load(tiny_model("llama"))
    found, batch = sinkscope.trace(model), sinkscope.token_batch(model)
    assert torch.equal(found.recording.batch.ids, batch.ids)


def test_one_intervention_needs_no_list():
    (spec,) = read_specs({"mask_to_self": "10"})
    assert spec.values == read_specs({"mask_to_self": ["10"]})[0].values == ((10,),)
    assert read_specs({"mask_to_self": 10}) == read_specs({"mask_to_self": [10]}) == [spec]
    super_neuron = SimpleNamespace(position=0, layer=5, expert=None, neuron=148)
    for neurons in ("5:148", (5, 148), sinkscope.Neuron(5, None, 148), super_neuron, [super_neuron], ((5, 148),)):
        assert read_specs({"ablate": neurons})[0].values == (((5, None, 148),),)
    assert read_specs({"amplify": "10:4"}, layers=[0, 1], heads="0-1")[0].where == {"layers": (0, 1), "heads": (0, 1)}


def test_what_is_no_intervention_is_refused():
    for wrong in ("mask_to_self", ["mask_to_self 10"]):
        with pytest.raises(sinkscope.InputError, match="'mask_to_self': 10"):
            sinkscope.intervene(tiny_model("llama"), wrong)  # type: ignore[arg-type]
    for wrong in (1.5, None, "x", (5, 148, 3)):
        with pytest.raises(sinkscope.InputError, match="such as 10"):
            read_specs({"mask_to_self": wrong})  # type: ignore[arg-type]


def test_a_repr_is_a_few_lines(traced):
    assert traced.story in repr(traced)
    assert "heads" in repr(traced)
    assert len(repr(traced)) < 3000

    class Long(Small):
        story = "long " * 10_000

    assert len(repr(Long())) < 3000
    model = sinkscope.load("reference:softmax")
    assert repr(model).startswith("reference:softmax (reference): LlamaForCausalLM of 12,853,504 parameters")
    assert repr(model).endswith("float32 on cpu, with its tokenizer")
    assert repr(traced.findings).startswith(f"Findings on {traced.recording.model_name}: sinks: ")
    masked = sinkscope.mask_to_self(model, 10, layers=[0, 1, 2])
    assert repr(masked) == "mask_to_self on the mask: layers 0 to 2, position 10"
    few = sinkscope.trace(model, [[5, 6, 7, 8] * 5], observables=["entropy"])
    assert "none, without dimension, " in repr(few.findings)
    for other in (sinkscope.anatomy_of(model), sinkscope.probe(model, sinkscope.token_batch(model, num_sequences=2))):
        assert len(repr(other)) < 1000
        assert "sink_rate" in repr(other) or "num_layers=16" in repr(other)


def test_a_notebook_shows_the_story_the_table_and_the_chain(traced):
    shown = traced._repr_html_()
    assert "data:image/png;base64," in shown
    assert len(shown) < 150_000
    assert "http" not in shown.replace("data:image", "")
    assert "<script" not in shown
    hostile = Small()._repr_html_()
    assert "40 of 50 rows" in hostile
    assert "<script>" not in hostile
    assert "<b>bold" not in hostile


def test_every_figure_of_the_page_is_drawn(traced):
    with pytest.raises(sinkscope.InputError, match="Choose some of these: ") as refused:
        traced.plot("no such figure")
    names = str(refused.value).split("Choose some of these: ")[1].rstrip(".").split(", ")
    drawn = traced.plot(*names)
    titles = [axes.get_title() for axes in drawn.axes if axes.get_title()]
    assert {"Neuron activations", "Attention received", "Sink rate by head"} <= set(titles)
    assert len(titles) == len(names) > 10
    (image,) = traced.plot("heads-sink-rate").axes[0].images
    rates = [row for row in traced.table("heads").to_pylist() if row["position"] == traced.findings.strongest[0]]
    assert image.get_array().ravel().tolist() == pytest.approx([row["sink_rate"] for row in rates], abs=1e-3)


def test_one_sequence_is_told_as_one(traced, tmp_path):
    found = sinkscope.trace(tiny_model("llama"), [[5, 6, 7, 8] * 25])
    alone = found.plot().axes[0]
    assert alone.get_title() == "Energy by position"
    assert len(alone.lines[0].get_ydata()) == 64
    assert traced.plot().axes[0].get_title() == "Variance by position"
    energy = found.plot("map-second-moment").axes[0].images[0].get_array()
    assert energy.count() == 100 * found.recording.num_layers
    page, several = (result.report(tmp_path / name).read_text() for name, result in (("a", found), ("b", traced)))
    assert "one sequence of 100 given tokens" in page
    assert "One sequence has no variance across sequences" in page
    assert "The first 64 of 100 positions." in page
    assert "The first 64 of 100 tokens, each" in page
    assert f"20 of {100 * found.recording.num_layers} rows" in page  # of a map
    assert "position %{x}, %{text}" in page  # the token in the hover
    assert "%{x}, %{text}" not in several, "sequences have no token in common"


def test_a_table_is_one_of_arrow_and_of_pandas(traced):
    heads = traced.table("heads")
    assert heads.num_rows == len(traced.tables["heads"]["head"])
    assert heads.schema.field("sink_rate").metadata[b"meaning"].startswith(b"Share of sequences")
    assert Small().table("found").column("value").null_count == 1
    with pytest.raises(sinkscope.InputError, match=r"no table 'no such table'\. Choose one of these: sinks, positions"):
        traced.table("no such table")


def test_a_result_is_saved_and_reported(traced, tmp_path):
    saved = traced.save(tmp_path / "run")
    assert json.loads((saved / "summary.json").read_text())["story"] == traced.story
    page = traced.report(tmp_path / "page.html")
    assert traced.story[:40] in page.read_text()
    with pytest.raises(sinkscope.InputError, match="overwrite=True"):
        traced.report(page)


def test_a_recording_without_findings_has_the_same_shape():
    few = sinkscope.trace(tiny_model("llama"), [[5, 6, 7, 8] * 5], observables=["entropy"])
    assert "entropy" in repr(few)
    assert "entropy" in few._repr_html_()
    assert few.table("positions").num_rows == 20 * few.recording.num_layers
