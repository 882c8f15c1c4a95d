"""The plan of the experiment where sinks are born, its runs in a pool, and what is measured of a finished model."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import sink_experiment
import sink_measures
import sink_plan
import sink_tables
import torch
import training_pool
from kept_results import read_results, run_result
from sink_plan import SinkRun, configuration, planned_runs, read_plan
from training_folders import write_training_folder

from sinkscope.audits.damage import losses
from sinkscope.audits.schemes import linear_layers
from sinkscope.errors import InputError
from sinkscope.measures.dimension_disparity import dom_ratio
from sinkscope.models.loading import load
from sinkscope.names import FOLDER, REFERENCES
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.presets import decoder_config, preset
from sinkscope.statistics import bootstrap_mean_interval

PLAN = read_plan()
PROJECT = Path(__file__).parents[2]


def test_every_run_of_the_plan_can_be_trained_and_sees_the_batches_of_its_seed(tmp_path):
    runs = planned_runs(PLAN)
    assert len({run.name for run in runs}) == len(runs) == 5 * 4 + 16 * 2
    assert [run.name for run in runs[:6]] == PLAN["first"]
    pool = training_pool.TrainingPool(options(tmp_path), lambda run: configuration(PLAN, run))
    data = ("steps", "batch_size", "sequence_length", "seed")
    shown = set()
    for run in runs:
        config = pool.resolved(run)
        shown.add(json.dumps([config.model, config.plain()["training"]], sort_keys=True))
        assert config.model["seed"] == config.training.seed == run.seed
        assert [getattr(config.training, name) for name in data] == [40000, 64, 128, run.seed]
    assert len(shown) == len(runs), "no two runs are the same"


def test_the_larger_plan_is_the_same_question_of_a_larger_model(tmp_path):
    larger = read_plan(sink_plan.PLAN.with_name("larger_run.yaml"))
    pool = training_pool.TrainingPool(options(tmp_path), lambda run: configuration(larger, run))
    configs = [pool.resolved(run) for run in planned_runs(larger)]
    assert [config.model.get("attention_variant", "softmax") for config in configs] == ["softmax", "head_norm"]
    assert all(config.training.sequence_length == config.model["max_position_embeddings"] for config in configs)
    assert larger["verdicts"].items() <= PLAN["verdicts"].items()
    assert larger["arms"].items() < {arm: {**PLAN["arms"][arm], "seeds": [1]} for arm in PLAN["arms"]}.items()


def options(folder, **changes):
    values = dict(data="tokens", runs=folder / "runs", keep=folder / "kept", done=None, jobs=2, budget_s=float("inf"))
    return argparse.Namespace(
        **values | dict(plan=sink_plan.PLAN, only="softmax-1,scale-1", steps=None, small=False) | changes
    )


# Stands in for `sinkscope pretrain`: what it leaves in the folder, without training.
TRAINER = """
import json, pathlib, sys, yaml
config, out = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])
out.mkdir()
row = {"step": 1, "tokens": 1, "loss": 3.0, "gradient_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 1e9}
row |= {"mfu": None, "elapsed_s": 1.0, "validation_loss": 3.0}
(out / "metrics.jsonl").write_text(json.dumps(row) + chr(10))
(out / "config.yaml").write_text(yaml.safe_dump(config))
(out / "environment.json").write_text("{}")
(out / "summary.json").write_text(json.dumps({"tokens": 1, "validation_loss": 3.0}))
"""
MEASURES = "import pathlib, sys; pathlib.Path(sys.argv[1], 'measures.json').write_text('{\"found\": 1}')"


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    def command(config, out, data):
        resolved = training_pool.resolve(str(config), data=[data], training={}).plain()
        return [sys.executable, "-c", TRAINER, json.dumps(resolved), str(out)]

    monkeypatch.setattr(training_pool, "training_command", command)
    monkeypatch.setattr(training_pool, "POLL_S", 0.02)
    monkeypatch.setattr(sink_experiment, "MEASURES", tmp_path / "measures.py")
    (tmp_path / "measures.py").write_text(MEASURES)


def test_runs_are_measured_kept_and_left_out_the_next_time(stand_ins, tmp_path, capsys):
    assert sink_experiment.carry_out(options(tmp_path)) == []
    kept = {result["name"]: result for result in read_results(tmp_path / "kept")}
    assert {name: result["measures"] for name, result in kept.items()} == {
        "softmax-1": {"found": 1}, "scale-1": {"found": 1}
    }  # fmt: skip
    assert kept["scale-1"]["run"] == {"arm": "scale", "seed": 1}
    assert capsys.readouterr().out.count("begins") == 2
    again = options(tmp_path, done=tmp_path / "kept", keep=tmp_path / "more", runs=tmp_path / "new")
    again.only = "softmax-1,scale-1,head_norm-1"
    assert sink_experiment.carry_out(again) == []
    assert capsys.readouterr().out.count("begins") == 1
    assert len(read_results(tmp_path / "more")) == 3
    with pytest.raises(InputError, match="no run 'head_norm-9'"):
        sink_experiment.carry_out(options(tmp_path, only="head_norm-9"))


def test_measures_that_fail_lose_no_run_and_a_run_that_fails_stops_no_other(stand_ins, tmp_path, monkeypatch, capsys):
    (tmp_path / "measures.py").write_text("raise SystemExit('no measures today')")
    assert sink_experiment.carry_out(options(tmp_path, only="softmax-1")) == []
    assert read_results(tmp_path / "kept")[0]["measures"] is None
    assert "its measures failed: no measures today" in capsys.readouterr().out
    works = training_pool.training_command

    def command(config, out, data):
        fails = [sys.executable, "-c", "raise SystemExit('broken')"]
        return fails if out.name == "scale-1" else works(config, out, data)

    monkeypatch.setattr(training_pool, "training_command", command)
    with pytest.raises(InputError, match=r"scale-1 did not train to its end: exit code 1, broken"):
        sink_experiment.carry_out(options(tmp_path, only="scale-1,softmax-2,head_norm-2", jobs=1))
    assert {result["name"] for result in read_results(tmp_path / "kept")} == {"softmax-2", "head_norm-2"}


def planted_results(folder, losses):
    """Runs as they are kept, with planted losses of 6 windows in 3 books, and twice the disparity in softmax."""
    results = []
    for (arm, seed), windows in losses.items():
        run = SinkRun(arm=arm, seed=seed)
        write_training_folder(folder / run.name, variant=arm, seed=seed, sink=arm == "softmax")
        layers = {"dom_ratio": [90.0 if arm == "softmax" else 30.0], "norm_ratio": [2.0], "top_direction": [0.5]}
        first = {"sink_rate_by_layer": [0.2 if arm == "softmax" else 0.08]}
        text = {
            "birth_layers": [1],
            "sinks": [{"layers": [2]}],
            "variance_ratio": [9.0, 4.0, 0.1],
            "effective_rank": [100.0 if arm == "softmax" else 150.0],
        }
        measures = {
            "loss": {"windows": windows},
            "random": {"first": first},
            "text": text | {"first": first},
            "residual": layers | {"largest": [5.0], "kurtosis": [3.0]},
            "downstream": {name: [0.0, 0.0] for name in sink_tables.DAMAGES},
        }
        result = run_result(run.name, asdict(run), folder / run.name)
        results.append(result | {"measures": measures})
    return results


def test_verdicts_of_losses_that_are_known(tmp_path):
    base, lower, mixed = [3.0, 3.1, 3.2, 3.3, 3.4, 3.5], [2.9, 3.0, 3.1, 3.2, 3.3, 3.4], [2.9, 3.2, 3.3, 3.4, 3.3, 3.4]
    losses = {("softmax", 1): base, ("head_norm", 1): lower, ("scale", 1): mixed}
    text = "\n".join(sink_tables.tables(planted_results(tmp_path, losses), [1, 3, 2], PLAN["verdicts"]))
    assert "| head_norm-1 | -0.1000 [-0.1000, -0.1000] | 3.1500 | 8.0% | 8.0% | 6.00 | 30.0 |" in text
    assert "- confirmed: head_norm ends lower on every seed" in text
    assert "- not confirmed: head_norm removes the sink (8.0% left, 20.0% in softmax)" in text
    assert "- confirmed: head_norm halves the sink (40% of it)" in text
    # Means by book are -0.1, +0.1 and -0.1: the interval holds 0, so scale does not do the same.
    assert "- confirmed: scale without division does not do the same (seed 1 -0.0000 [-0.1000, +0.1000]" in text
    assert "- not run: whether head_norm accelerates" in text
    numbers = "3.00 | 150.0, softmax 100.0 | 8.0%, softmax 20.0%"
    assert f"| head_norm | 1 | -0.1000 | -0.1000 | {numbers} | yes | no |" in text
    assert f"| scale | 1 | -0.0000 | +0.1000 | {numbers} | no | no |" in text
    swapped = {("softmax", 1): lower, ("head_norm", 1): base}  # the control
    (tmp_path / "swapped").mkdir()
    text = "\n".join(sink_tables.tables(planted_results(tmp_path / "swapped", swapped), [1, 3, 2], PLAN["verdicts"]))
    assert "- not confirmed: head_norm ends lower on every seed" in text
    with pytest.raises(InputError, match=r"books\.json has 5 windows, and the results 6"):
        sink_tables.tables(planted_results(tmp_path / "again", losses), [3, 2], PLAN["verdicts"])


def test_a_plan_with_other_verdicts_is_refused():
    other = read_plan(PROJECT / "lab" / "experiments" / "large_batches.yaml")
    with pytest.raises(
        InputError, match="lacks the verdicts confirmed, accelerates, removes_the_sink, halves_the_sink"
    ):
        sink_tables.tables([], [], other["verdicts"])


def test_the_card_of_the_bundled_models_has_the_numbers_that_are_kept_of_them():
    kept = PROJECT / "lab" / "results" / "trio"
    results, books = read_results(kept), sink_tables.read_books(kept)
    lines = sink_tables.tables(results, books, PLAN["verdicts"])
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in lines if "_muon-2 |" in line]
    assert len(rows) == len(REFERENCES)
    for run, difference, loss, sink, *_, largest, _ in rows:
        for number in (difference, loss, sink.replace("%", " %"), largest):
            assert number in card, run
    without_softmax = [result for result in results if not result["name"].startswith("softmax")]
    with pytest.raises(InputError, match="no run of softmax"):
        sink_tables.tables(without_softmax, books, PLAN["verdicts"])


@pytest.mark.parametrize(
    ("births", "sinks", "expected"),
    [([1], [2], 6.0), ([3], [1, 2, 3], 9.0), ([], [2, 3], 6.0), ([], [], (9.0 * 4.0 * 0.25 * 0.25) ** 0.25)],
)
def test_the_variance_ratio_ends_at_the_birth_or_before_the_first_sink(births, sinks, expected):
    text = {"birth_layers": births, "sinks": [{"layers": sinks}] if sinks else []}
    text["variance_ratio"] = [9.0, 4.0, 0.25, 0.25]
    assert sink_tables.variance_discrepancy(text) == pytest.approx(expected)


def test_an_interval_over_books_is_wider_than_one_over_windows():
    """Ten books of 20 windows, each with a difference of its own: windows alone would promise too much."""
    rng = np.random.default_rng(0)
    values = np.repeat(rng.normal(size=10), 20)
    _, low, high = sink_tables.difference(
        {"loss": {"windows": values}}, {"loss": {"windows": np.zeros(200)}}, [20] * 10
    )
    one, other = bootstrap_mean_interval(values)
    assert high - low > 3 * (other - one)


def small_decoder(**changes):
    model = Decoder(decoder_config(preset("tiny") | {"vocab_size": 64, "hidden_size": 32} | changes)).eval()
    return load(model)


def test_a_bounded_projection_written_out_computes_the_same():
    loaded = small_decoder(feed_forward_variant="bounded_swiglu")
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    before = losses(loaded.model, ids)
    with pytest.raises(InputError, match="this model has BoundedLinear"):
        linear_layers(loaded.model)
    sink_measures.with_plain_projections(loaded.model)
    assert len(linear_layers(loaded.model)) == 7 * len(loaded.model.blocks), "quantisation sees them now"
    torch.testing.assert_close(torch.tensor(losses(loaded.model, ids)), torch.tensor(before))


def test_one_dominating_direction_is_seen_in_every_basis_and_dom_ratio_in_one():
    generator = torch.Generator().manual_seed(0)
    h_NTE = torch.randn(6, 10, 32, generator=generator, dtype=torch.float64)
    h_NTE[:, 0, 5] += 300
    turned = h_NTE @ torch.linalg.qr(torch.randn(32, 32, generator=generator, dtype=torch.float64)).Q
    assert sink_measures.top_direction(h_NTE) > 0.9
    assert sink_measures.top_direction(turned) == pytest.approx(sink_measures.top_direction(h_NTE))
    assert dom_ratio(turned[:, 0]).mean() < 0.5 * dom_ratio(h_NTE[:, 0]).mean()


def test_the_residual_after_each_layer():
    loaded = small_decoder()
    ids = torch.randint(64, (3, 24), generator=torch.Generator().manual_seed(0))
    found = sink_measures.residual(loaded, ids)
    with torch.no_grad():
        h = loaded.model.model.embed_tokens(ids)
        rotation = loaded.model.model.rotation(h)
        for number, block in enumerate(loaded.model.blocks):
            h = block(h, rotation)
            norms = h.norm(dim=-1)
            expected = {
                "dom_ratio": (h[:, 0].abs().amax(-1) / h[:, 0].abs().mean(-1)).mean(),
                "norm_ratio": (norms[:, 0] / norms[:, 1:].median(1).values).mean(),
                "largest": h.abs().max(),
                "kurtosis": (h - h.mean()).pow(4).mean() / h.var(correction=0) ** 2,
            }
            assert {name: found[name][number] for name in expected} == pytest.approx(
                {name: float(value) for name, value in expected.items()}, rel=1e-4
            )
