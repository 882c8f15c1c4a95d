"""Training runs against one another: planted curves give back what was planted, and the rest is refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from training_folders import (
    APPEARS,
    PROBE_EVERY,
    STEPS,
    TOKENS_A_STEP,
    curved_loss,
    linear_loss,
    probe_row,
    write_training_folder,
)

from sinkscope.compare.page import compare
from sinkscope.errors import InputError
from sinkscope.pretrain.appearances import LINKS, appearances
from sinkscope.pretrain.comparison import compare_training, reach
from sinkscope.pretrain.figures import median_tokens
from sinkscope.results.saved import write_page_of_run
from sinkscope.results.tables import read_table
from sinkscope.statistics import mean_interval


@pytest.fixture
def write(tmp_path):
    """Writes a run with a straight loss of this speed, into a folder of its own."""

    def run(variant="softmax", seed=0, speed=1.0, **options):
        path = tmp_path / f"{variant}-{seed}-{len(list(tmp_path.iterdir()))}"
        return write_training_folder(path, variant=variant, seed=seed, loss=linear_loss(speed), **options)

    return run


def test_the_planted_ratio_comes_back_exactly(write):
    runs = [write(), write("head_norm", speed=1.25, seconds_a_step=0.11)]
    comparison = compare_training(runs)
    (base, own) = comparison.rows("training_runs")
    assert own["target_loss"] == base["validation_loss"] == 3.0
    # 5 - 2.5 share = 3 at share 0.8, which is an evaluation; 0.8 of the tokens, each of which takes 1.1 times as long.
    assert own["tokens_ratio"] == pytest.approx(0.8, rel=1e-12)
    assert own["seconds_ratio"] == pytest.approx(0.88, rel=1e-12)
    assert own["tokens_to_target"] == pytest.approx(0.8 * STEPS * TOKENS_A_STEP)
    # Between two evaluations: 5 - 2.6 share = 3 at share 10 / 13.
    between = compare_training([runs[0], write("gate", speed=1.3)]).rows("training_runs", variant="gate")[0]
    assert between["tokens_ratio"] == pytest.approx(10 / 13, rel=1e-12)
    # Control: the baseline against itself needs all of its way, also in seconds.
    assert (base["tokens_ratio"], base["seconds_ratio"]) == (1.0, 1.0)
    assert "80 % of its tokens (one seed, no interval)" in comparison.story


def test_reach_is_the_first_point_of_a_fine_grid_that_is_low_enough():
    random = np.random.default_rng(0)
    for _ in range(50):
        tokens = np.cumsum(random.integers(1, 1000, 12))
        losses = 4 - np.linspace(0, 1, 12) + random.normal(0, 0.2, 12)
        rows = [
            {"tokens": int(t), "elapsed_s": t / 7, "validation_loss": float(loss)}
            for t, loss in zip(tokens, losses, strict=True)
        ]
        target = float(random.uniform(3, 4))
        grid = np.linspace(tokens[0], tokens[-1], 400_001)
        low_enough = np.flatnonzero(np.interp(grid, tokens, losses) <= target)
        found = reach(rows, target)
        if len(low_enough) == 0:
            assert (found.tokens, found.bound) == (tokens[-1], ">")
        elif low_enough[0] == 0:
            assert (found.tokens, found.bound) == (tokens[0], "<")
        else:
            assert found.bound == ""
            assert found.tokens == pytest.approx(grid[low_enough[0]], abs=2 * (grid[1] - grid[0]))
            assert found.seconds == pytest.approx(found.tokens / 7)


def test_the_interval_over_seeds_is_students_on_logarithms(write):
    speeds = {0: 1.25, 1: 1.6, 2: 2.0}
    runs = [write(seed=seed) for seed in speeds] + [write("head_norm", seed, speed) for seed, speed in speeds.items()]
    row = compare_training(runs).of("head_norm", "tokens_ratio")
    logs = -np.log(list(speeds.values()))
    # Student's t with 2 degrees of freedom has 97.5 % below 4.302653 (tables).
    half = 4.302653 * logs.std(ddof=1) / math.sqrt(3)
    assert row["mean"] == pytest.approx(4 ** (-1 / 3))  # 1.25 * 1.6 * 2 = 4
    assert [row["low"], row["high"]] == pytest.approx(np.exp([logs.mean() - half, logs.mean() + half]), rel=1e-6)
    assert (row["num_seeds"], row["num_pairs"], row["num_reached"]) == (3, 3, 3)


@pytest.mark.parametrize(("num", "quantile"), [(2, 12.7062), (3, 4.30265), (4, 3.18245), (5, 2.77645), (10, 2.26216)])
def test_mean_interval_has_the_published_quantiles(num, quantile):
    values = np.random.default_rng(num).normal(3, 2, num)
    low, high = mean_interval(values)
    assert (low + high) / 2 == pytest.approx(values.mean())
    assert (high - low) / 2 == pytest.approx(quantile * values.std(ddof=1) / math.sqrt(num), rel=2e-3)


def test_mean_interval_covers_and_one_sample_has_none():
    samples = np.random.default_rng(0).normal(size=(4000, 4))
    ends = np.array([mean_interval(row) for row in samples])
    assert np.mean((ends[:, 0] <= 0) & (ends[:, 1] >= 0)) == pytest.approx(0.95, abs=0.01)
    assert np.isnan(mean_interval([1.0])).all()
    with pytest.raises(ValueError, match="at least one"):
        mean_interval([])


def test_seeds_are_paired(write):
    """Seeds differ far more than variants: paired, the difference is the same in each; unpaired it would drown."""
    levels = {0: 0.0, 1: 1.0, 2: 3.0}

    def lifted(seed, variant, speed):
        loss = lambda share: 5 + levels[seed] - 2 * speed * share  # noqa: E731
        path = write(variant, seed).with_name(f"{variant}-lifted-{seed}")
        return write_training_folder(path, variant=variant, seed=seed, loss=loss)

    runs = [lifted(seed, variant, speed) for variant, speed in (("softmax", 1), ("gate", 1.25)) for seed in levels]
    comparison = compare_training(runs)
    loss, ratio = (comparison.of("gate", name) for name in ("validation_loss", "tokens_ratio"))
    assert [loss[name] for name in ("difference", "difference_low", "difference_high")] == pytest.approx([-0.5] * 3)
    assert loss["high"] - loss["low"] > 5, "control: without pairs the interval is wide"
    assert [ratio[name] for name in ("mean", "low", "high")] == pytest.approx([0.8] * 3)


def test_runs_that_never_reach_the_loss_are_bounds_and_not_dropped(write):
    runs = [write(seed=0), write(seed=1), write("sigmoid", 0, 0.8), write("sigmoid", 1, 0.8)]
    comparison = compare_training(runs)
    row = comparison.of("sigmoid", "tokens_ratio")
    assert (row["mean"], row["bound"], row["num_reached"], row["low"]) == (1.0, ">", 0, None)
    assert comparison.story == "sigmoid does not reach softmax's final validation loss of 3.0000 in every seed."
    half = compare_training([*runs[:3], write("sigmoid", 1, 1.25)]).of("sigmoid", "tokens_ratio")
    assert half["mean"] == pytest.approx(math.sqrt(0.8))
    assert (half["bound"], half["num_reached"], half["num_seeds"], half["low"]) == (">", 1, 2, None)
    # The first evaluation, a tenth of the way, is already below.
    fast = compare_training([*runs[:2], write("gate", 0, 20.0)]).of("gate", "tokens_ratio")
    assert (fast["mean"], fast["bound"]) == (pytest.approx(0.1), "<")
    both = compare_training([*runs[:2], write("gate", 0, 20.0), write("gate", 1, 0.5)]).of("gate", "tokens_ratio")
    assert (both["mean"], both["bound"]) == (None, "")


def test_without_a_common_seed_the_mean_is_the_baseline_and_there_is_no_interval(write):
    runs = [write(seed=0), write(seed=1), write("gate", 5, 1.25), write("gate", 6, 1.25)]
    comparison = compare_training(runs)
    row = comparison.of("gate", "tokens_ratio")
    assert (row["mean"], row["low"], row["num_pairs"]) == (pytest.approx(0.8), None, 0)
    assert any("No seed in common" in note for note in comparison.notes)
    partly = compare_training([*runs[:3], write("gate", 1, 1.6)])
    assert partly.of("gate", "tokens_ratio")["mean"] == pytest.approx(1 / 1.6), "only the pair counts"
    assert any("left out of gate's ratios: 5" in note for note in partly.notes)


def test_variants_are_told_apart_by_what_differs_and_replicas_by_their_seed(write):
    runs = [
        write("head_norm", model={"variant_options": {"initial_lambda": 1.0}}),
        write("head_norm"),
        write("head_norm", model={"variant_options": {"per_head": False, "offset": False}}),
        write(),
        write(seed=1, model={"rope_theta": 10000.0, "variant_options": {}}),  # what is the default anyway
        write(training={"learning_rate": 2e-3, "evaluate_every": 50}),
        write(model={"tie_word_embeddings": False}),
        write(seed=2, model={"seed": 0}),
    ]
    comparison = compare_training(runs)
    assert comparison.variants == (
        "softmax",
        "head_norm, initial_lambda 1.0",
        "head_norm",
        "head_norm, per_head False, offset False",
        "softmax, learning_rate 0.002",
        "softmax, tie_word_embeddings False",
        "softmax, model_seed 0",
    )
    assert [row["seed"] for row in comparison.rows("training_runs", variant="softmax")] == [0, 1]
    # Without softmax the first run is the baseline.
    assert compare_training([write("gate"), write("sigmoid")]).baseline == "gate"


def test_seconds_of_different_machines_are_not_compared(write):
    comparison = compare_training([write(), write("gate", environment={"device_name": "another"})])
    assert comparison.of("gate", "seconds_ratio") is None
    assert comparison.of("gate", "tokens_ratio") is not None
    assert "different machines" in comparison.notes[0]


def test_links_appear_where_they_were_planted(write):
    comparison = compare_training([write(), write("head_norm", sink=False)])
    planted = [0, *(int(APPEARS[name][2] * STEPS) for name in ("write_contrast", "top_share", "dom_ratio", "cosine"))]
    planted += [int(APPEARS["sink_rate"][2] * STEPS)] * 2
    for batch in ("random", "text"):
        rows = comparison.rows("births", variant="softmax", batch=batch)
        assert [row["link"] for row in rows] == [link.name for link in LINKS]
        assert [row["step"] for row in rows] == planted
        assert [row["tokens"] for row in rows] == [step * TOKENS_A_STEP for step in planted]
        assert [row["step_before"] for row in rows] == [None, *(step - PROBE_EVERY for step in planted[1:])]
        assert [row["layer"] for row in rows] == [0, 1, 1, 1, 1, 1, None]
        missing = comparison.rows("births", variant="head_norm", batch=batch)
        assert [row["step"] for row in missing] == [0, *[None] * 6]
        assert missing[-1]["step_before"] == STEPS
    row = comparison.rows("observables", variant="softmax", batch="text", quantity="dom_ratio", step=STEPS)[0]
    assert (row["mean"], row["largest"]) == (32.0, 60.0)
    assert comparison.of("softmax", "sink_rate")["mean"] == pytest.approx(0.3)


def test_a_link_appears_only_where_it_stays():
    """Passed at steps 2 and 3, lost at 4, passed from 6 on: appears at 6. Control: without the loss, appears at 2."""
    rates = [0.0, 0.0, 0.5, 0.5, 0.04, 0.04, 0.05, 0.9]

    def sinks(values):
        rows = [probe_row(step, "text", sink=False) for step in range(len(values))]
        for row, rate in zip(rows, values, strict=True):
            row["layers"] = {"sink_rate": [None, rate]}
        return appearances(reversed(rows))

    in_layer, _ = sinks(rates)
    assert (in_layer.link.name, in_layer.step, in_layer.step_before, in_layer.largest) == ("sink in a layer", 6, 5, 0.9)
    assert sinks(rates[:4] + [0.5] * 4)[0].step == 2
    assert sinks(rates[:6])[0].step is None
    assert sinks([None] * 3)[0].largest is None


def test_the_middle_seed():
    rows = [{"tokens": tokens} for tokens in (30, None, 10, 20)]
    assert median_tokens(rows) == 20
    assert median_tokens([{"tokens": 5}, {"tokens": None}, {"tokens": None}]) is None


REFUSED = {
    "batch": ({"training": {"batch_size": 16}}, "batch_size is 16 in"),
    "length": ({"training": {"sequence_length": 64}}, "sequence_length is 64 in"),
    "held-out windows": ({"training": {"evaluation_sequences": 8}}, "evaluation_sequences is 8 in"),
    "data": ({"data": "other tokens"}, "data is other tokens in"),
    "twin": ({"variant": "softmax"}, "are both runs of softmax with seed 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_runs_that_cannot_be_compared_are_refused_plainly(write, tmp_path, case):
    options, message = REFUSED[case]
    runs = [write(), write(**{"variant": "gate"} | options)]
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=message):
        compare(list(map(str, runs)), tmp_path / "page.html", run_of=Path)
    assert sorted(tmp_path.iterdir()) == before, "nothing is written"


def remove(name):
    return lambda run: (run / name).unlink()


def spoil(name):
    return lambda run: (run / name).write_text('{"step": 1}\n{"step" 2}\n')


DAMAGED = {
    "not complete": (remove("summary.json"), f"step {STEPS} of {STEPS}.*same sinkscope pretrain command"),
    "no config": (remove("config.yaml"), "no config.yaml"),
    "no environment": (remove("environment.json"), "no environment.json"),
    "metrics": (spoil("metrics.jsonl"), r"metrics\.jsonl: line 1: it has no key 'tokens'"),
    "probes": (spoil("probes.jsonl"), r"probes\.jsonl: line 1: it has no key 'tokens'"),
    "other config": (lambda run: (run / "config.yaml").write_text("a: 1"), r"config\.yaml: it has no key 'model'"),
    "other rows": (
        lambda run: (run / "probes.jsonl").write_text('{"step": 1}\n'),
        r"probes\.jsonl: line 1: it has no key 'tokens'",
    ),
    "no rows": (lambda run: (run / "metrics.jsonl").write_text(""), f"its 0 rows do not end at step {STEPS}"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_runs_are_refused(write, case):
    damage, message = DAMAGED[case]
    runs = [write(), write("gate")]
    damage(runs[1])
    with pytest.raises(InputError, match=message):
        compare_training(runs)


def test_one_run_has_a_story_a_page_and_figures(write, tmp_path):
    alone = compare_training([write(speed=-1.0)])  # its loss rises: nothing to compare, and no reason to refuse
    assert alone.story.startswith("softmax, seed 0: validation loss 7.0000 after 1,024,000 tokens; sink rate 30.0 %")
    assert "sink in a layer at 716,800 tokens" in alone.story
    page = alone.report(tmp_path / "run.html").read_text()
    assert "Training of softmax-0-0" in page
    assert "probes.jsonl" in page
    assert write_page_of_run(str(alone.runs[0].path), tmp_path / "again.html") == alone.story
    drawn = compare_training([write(), write("gate", sink=False)]).plot()
    assert [axes.get_title() for axes in drawn.axes] == [
        *("Validation loss against training tokens", "Sink rate", "Dimension disparity")
    ]
    assert drawn._repr_png_().startswith(b"\x89PNG")
    links = alone.plot("appearances-text").axes[0]
    assert [text.get_text() for text in links.get_yticklabels()] == [link.name for link in LINKS]
    with pytest.raises(InputError, match="Choose some of these: loss-tokens"):
        alone.plot("no such figure")


def test_other_refusals(write, tmp_path):
    with pytest.raises(InputError, match="No training run was given"):
        compare_training([])
    with pytest.raises(InputError, match="gpt2 is not, so they cannot be compared"):
        compare([str(write()), "gpt2"], tmp_path / "page.html", run_of=lambda name: pytest.fail("studied first"))
    with pytest.raises(InputError, match="There is no folder"):
        compare_training([write(), tmp_path / "nowhere"])
    with pytest.raises(InputError, match=r"does not fall: 5.2000 at step 100 and 7.0000"):
        compare_training([write(speed=-1.0), write("gate")])
    # Runs of before have no hash of their tokens: the names of the sources decide.
    old = [write(data=None), write("gate")]
    assert compare_training(old).variants == ("softmax", "gate")
    config = (old[0] / "config.yaml").read_text()
    (old[0] / "config.yaml").write_text(config.replace("- tokens", "- others"))
    with pytest.raises(InputError, match=r"data is \[\['tokens'\], \[\]\] in"):
        compare_training(old)


def test_runs_without_probes_are_compared_by_their_losses(write, tmp_path):
    runs = [write(), write("gate", speed=1.25)]
    (runs[1] / "probes.jsonl").unlink()
    text = compare(list(map(str, runs)), tmp_path / "page.html", run_of=Path)
    assert "80 % of its tokens" in text
    assert "At the end" not in text
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Trained without probes, so their sinks, disparity and links are not known: " in page


def test_forty_runs_of_ten_variants_make_one_page_with_tables(tmp_path):
    runs = [
        write_training_folder(tmp_path / f"{n}-{seed}", variant=f"variant_{n}", seed=seed, loss=curved_loss(1 + n / 10))
        for n in range(10)
        for seed in range(4)
    ]
    page = tmp_path / "page.html"
    write_page_of_run(runs[0], runs[0] / "report.html")
    compare(list(map(str, runs)), page, run_of=Path)
    assert '<a href="0-0/report.html"><bdi>0-0</bdi></a>' in page.read_text()
    assert "0-1/report.html" not in page.read_text(), "a run without a page"
    tables = tmp_path / "page-tables"
    summary = json.loads((tables / "summary.json").read_text())
    comparison = compare_training(runs)
    assert summary["variants"] == comparison.rows("variants")
    for name, table in comparison.tables.items():
        assert read_table(tables / name) == table
    with pytest.raises(InputError, match="`overwrite=True`"):
        compare(list(map(str, runs)), page, run_of=Path)
    compare(list(map(str, runs)), page, run_of=Path, overwrite=True)


def test_a_page_that_cannot_be_written_leaves_no_tables(write, tmp_path, monkeypatch):
    runs = [str(write()), str(write("gate"))]
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr("sinkscope.pages.html.render", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compare(runs, tmp_path / "page.html", run_of=Path)
    assert sorted(tmp_path.iterdir()) == before


def test_the_documentation_states_the_rules():
    lines = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    stated = {row[0]: float(row[2]) for row in rows if row[0] in {link.name for link in LINKS}}
    assert stated == {link.name: link.threshold for link in LINKS}


def test_a_run_whose_summary_has_no_hash_of_its_tokens_is_compared_by_their_names(write):
    runs = [write(), write("gate")]
    summary = json.loads((runs[1] / "summary.json").read_text())
    for data in (None, "other tokens"):
        (runs[1] / "summary.json").write_text(json.dumps(summary | {"data": data}))
        if data is None:
            assert compare_training(runs)
        else:
            with pytest.raises(InputError, match="data is other tokens"):  # control
                compare_training(runs)
