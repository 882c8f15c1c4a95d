"""What a figure draws is what the Parquet beside it says: recomputed here from the files, without our readers."""

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from study_tables import FACTORS, LENGTH, NUM_HEADS, NUM_LAYERS, write_study_folder, write_trace_folder

from sinkscope.pages.figure import Figure, bounds, heat_map, log_axis, rounded
from sinkscope.pages.html import write_page
from sinkscope.results.run import read_run
from sinkscope.studies.figures import study_figures
from sinkscope.studies.page import writers
from sinkscope.tracing.figures import chain_panels, sink_rates
from sinkscope.tracing.maps import layer_curves, mapped_positions, maps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_study_folder(tmp_path_factory.mktemp("runs") / "study")


@pytest.fixture(scope="module")
def run(folder):
    return read_run(folder)


@pytest.fixture(scope="module")
def figures(run):
    studied = [figure for own in study_figures(run).values() for figure in own]
    return {figure.id: figure for figure in [*chain_panels(run), *studied, *maps(run), *layer_curves(run)]}


def parquet(folder, name):
    return pyarrow.parquet.read_table(folder / f"{name}.parquet").to_pylist()


def near(drawn, expected):
    """Equal up to the four digits that a page keeps."""
    assert len(drawn) == len(expected)
    return np.allclose(np.array(drawn, float), np.array(expected, float), rtol=6e-4, atol=1e-12)


def trace_named(figure, name):
    return next(trace for trace in figure.traces if name in trace["name"])


def test_every_figure_has_data_a_source_and_a_table_and_is_strict_json(figures, folder):
    for figure in figures.values():
        assert figure.traces, figure.id
        assert all((folder / f"{source}.parquet").is_file() for source in figure.sources), figure.id
        assert figure.rows, figure.id
        assert all(len(row) == len(figure.columns) for row in figure.rows), figure.id
        json.dumps([figure.traces, figure.layout], allow_nan=False)


@pytest.mark.parametrize(
    ("id", "column", "logarithmic"),
    [("attention-received", "attention_received", False), ("dom-ratio", "dom_ratio", True)],
)
def test_position_maps(figures, folder, id, column, logarithmic):
    expected = np.empty((NUM_LAYERS, LENGTH))
    for row in parquet(folder, "positions"):
        expected[row["layer"], row["position"]] = row[column]
    (trace,) = figures[f"map-{id}"].traces
    shown = np.array(trace["customdata"] if logarithmic else trace["z"], float)
    assert near(shown.ravel(), expected.ravel())
    if logarithmic:
        assert near(trace["z"][3], np.log10(expected[3]))


def test_head_map(figures, folder):
    expected = np.empty((NUM_LAYERS, NUM_HEADS))
    for row in parquet(folder, "heads"):
        if row["position"] == 0:
            expected[row["layer"], row["head"]] = row["sink_rate"]
    (trace,) = figures["heads-sink-rate"].traces
    assert near(np.array(trace["z"], float).ravel(), expected.ravel())
    assert (trace["zmin"], trace["zmax"]) == (0, 1.0)


def test_variance_and_its_law(figures, folder):
    entries = [row for row in parquet(folder, "positions") if row["layer"] == 2]
    assert near(trace_named(figures["variance"], "layer 2")["y"], [row["value_variance"] for row in entries])
    first = [row["averaging_law"] for row in parquet(folder, "positions") if row["layer"] == 0]
    assert near(trace_named(figures["variance"], "law")["y"], first)
    assert "log R^2 0.950 in layer 0, 0.850 in layer 2" in figures["variance"].caption


def test_dose_response_with_its_intervals(figures, folder):
    at_20 = [row for row in parquet(folder, "rates") if row["position"] == 20]
    untouched = [row for row in at_20 if row["condition"] == "untouched"]
    entries = untouched + [row for row in at_20 if row["condition"] == "amplify_variance" and row["target"] == 20]
    trace = trace_named(figures["dose-20"], "variance amplified")
    assert trace["x"] == [1.0, *FACTORS]
    assert near(trace["y"], [row["rate"] for row in entries])
    assert near(trace["error_y"]["array"], [row["high"] - row["rate"] for row in entries])
    assert near(trace["error_y"]["arrayminus"], [row["rate"] - row["low"] for row in entries])
    # At a factor of 1 a random direction still changes the model: no point is borrowed for it.
    assert trace_named(figures["dose-20"], "a random deviation added")["x"] == [8.0]


def test_what_a_removal_leaves(figures, folder):
    before, after, low, high = next(
        (row["before"], row["after"], row["low"], row["high"])
        for row in parquet(folder, "effects")
        if row["condition"] == "ablate_minimal_set" and row["quantity"] == "sink_rate_at_sink"
    )
    (row,) = (row for row in figures["remaining"].rows if row[0] == "minimal set removed")
    assert low < -before  # by how its sequences differ: of a rate there is no less than nothing left
    assert row[1:] == pytest.approx((after / before, 0, (before + high) / before))
    assert (
        len([row for row in figures["remaining"].rows if row[0] == "variance lowered to that of later positions"]) == 1
    )  # at the sink only
    random_sets = figures["remaining"].traces[1]["x"]
    assert near(random_sets, [row["remaining"] for row in parquet(folder, "random_sets")])


def test_confounds_show_after_over_before_at_the_largest_factor(figures, folder):
    expected = next(
        row["after"] / row["before"]
        for row in parquet(folder, "effects")
        if (row["condition"], row["target"], row["factor"], row["quantity"]) == ("amplify_variance", 10, 8.0, "loss")
    )
    (trace,) = figures["confounds"].traces
    line = next(index for index, name in enumerate(trace["y"]) if "variance amplified @10 \u00d78" in name)
    column = next(index for index, name in enumerate(trace["x"]) if "loss" in name)
    assert float(trace["text"][line][column]) == pytest.approx(expected, abs=0.005)
    assert trace["z"][line][column] == pytest.approx(abs(math.log2(expected)), rel=1e-3)


def test_keys_with_few_queries_are_not_drawn(figures):
    assert max(figures["received"].traces[0]["x"]) == max(figures["moved"].traces[0]["x"]) == LENGTH - 17


def test_mediation(figures, folder):
    entries = parquet(folder, "mediation")
    assert near(trace_named(figures["mediation-effects"], "indirect")["y"], [row["indirect"] for row in entries])


def test_histogram_shares_add_up_to_one(figures, folder):
    (figure,) = (
        figure
        for figure in figures.values()
        if figure.title == "Neuron 2:90: attending only to itself in all layers @10"
    )
    counts = [
        row["count"]
        for row in parquet(folder, "histograms")
        if (row["condition"], row["neuron"], row["place"]) == ("mask_to_self", 90, "target")
    ]
    shares = trace_named(figure, "target")["y"][:-1]
    assert near(shares, np.array(counts) / sum(counts))
    assert sum(shares) == pytest.approx(1, abs=1e-3)


def test_with_bos_the_energy_stands_for_the_variance(tmp_path):
    variance, *_ = chain_panels(read_run(write_trace_folder(tmp_path / "bos", bos=True)))
    assert "second moment" in variance.columns
    assert not any("law" in trace["name"] for trace in variance.traces)


def test_without_a_sink_nothing_is_invented(tmp_path):
    run = read_run(write_study_folder(tmp_path / "none", sink=False))
    studied = study_figures(run)
    assert [studied[name] for name in ("mediation", "confounds", "histograms")] == [[], [], []]
    _, _, output, dom_ratio, _ = chain_panels(run)
    assert output.rows == []
    assert [trace["name"].strip("\u2068\u2069") for trace in dom_ratio.traces] == ["all positions"]


def test_a_long_sequence_is_thinned_but_keeps_its_sinks(run, monkeypatch):
    monkeypatch.setattr("sinkscope.tracing.maps.NUM_POSITIONS_MAPPED", 16)
    monkeypatch.setitem(run.summary, "sinks", [{"position": 29}])
    positions = mapped_positions(run)
    assert len(positions) <= 18
    assert positions == sorted(set(positions))
    assert {0, 1, 2, 3, 29, LENGTH - 1} <= set(positions)
    assert any("of 48 positions" in figure.caption for figure in maps(run))


def test_curves_keep_the_sink_and_the_target_of_a_long_sequence(run, monkeypatch):
    monkeypatch.setattr("sinkscope.tracing.figures.NUM_POSITIONS_DRAWN", 4)
    monkeypatch.setitem(run.summary, "dom_ratio", {"position": 29})
    created = next(figure for figure in study_figures(run)["creation"] if figure.id == "created")
    assert created.traces[0]["x"] == [0, 1, 2, 3, 10, 29]
    assert sink_rates(run)[0] == [0, 1, 2, 3, 29]


def test_numbers_in_a_page_have_four_digits_and_no_infinity():
    assert rounded([1.23456789, None, math.nan, math.inf]) == [1.235, None, None, None]
    assert bounds([1.0], [0.5], [2.0], "c")["arrayminus"] == [0.5]


def test_a_logarithmic_map_leaves_zero_blank_and_a_narrow_axis_is_linear():
    trace = heat_map([0, 1], [0], np.array([[0.0, 100.0]]), "value", "here", logarithmic=True)
    assert trace["z"] == [[None, 2.0]]
    assert trace["customdata"] == [[0.0, 100.0]]
    assert "type" not in log_axis("", [4.0, 5.0])
    assert log_axis("", [1.0, 50.0])["tickvals"] == [1, 2, 5, 10, 20, 50]


def test_two_figures_of_one_id_are_refused(tmp_path):
    figure = Figure("rates", "Rates", "", (), [], {})
    write_page(tmp_path / "page.html", "pages/base.html", "One", [figure])
    with pytest.raises(ValueError, match="same id"):
        write_page(tmp_path / "page.html", "pages/base.html", "Two", [figure, figure])


def test_what_carries_the_sink_is_listed_whole():
    """The minimal set with its write shares or, where there is none, every writer."""
    minimal = [{"layer": 2, "expert": None, "neuron": 90, "share": 0.5}]
    along_direction = [{"layer": 7, "expert": None, "neuron": n} for n in range(32)] + [
        {"layer": 6, "expert": 1, "neuron": 3}
    ]

    def listed(rows, summary) -> str:
        run: Any = SimpleNamespace(rows=lambda table: rows, summary=summary)
        return writers(run)

    assert "The minimal set has 1 neuron," in listed(minimal, {"writers": []})
    assert "2:90 (0.500)" in listed(minimal, {})
    told = listed([], {"writers": along_direction})
    assert told.startswith("The 33 neurons that write most strongly along the sink's direction")
    assert told.count(":") == 1 + 1 + 32 + 2  # that of "layer:neuron:", and those of the names
    assert listed([], {}) == ""
