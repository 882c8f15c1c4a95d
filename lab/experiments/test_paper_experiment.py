"""The plan of the paper's experiment, its processes within a budget, what is kept of it and the tables made of that."""

import argparse
import json
import sys
import time
from collections import Counter

import kept_results
import paper_tables
import pytest
import training_pool
import yaml
from kept_results import KeptResults, read_results, run_result, write_run
from paper_experiment import carry_out, pool
from paper_plan import OTHERS, Run, best_trial, judging_groups, run_configuration, tuning_groups

from sinkscope.errors import InputError
from sinkscope.statistics import mean_interval

# Stands in for `sinkscope pretrain`: what it leaves in the folder, without training. Its loss is lower with the norm.
TRAINER = """
import json, pathlib, sys, time, yaml
config, out = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])
training, model = config["training"], config["model"]
if training["learning_rate"] > 0.5:
    sys.exit("sinkscope: Training diverged: loss nan, gradient norm nan at step 1. Start anew.")
if training["learning_rate"] > 0.05:
    sys.exit("sinkscope: expected more. Go on.")
time.sleep(SLEEP)
loss = 3 + 0.01 * training["seed"] - {"softmax": 0, "first_norm": 0.05}.get(model["attention_variant"], 0.1)
(out / "checkpoints").mkdir(parents=True)
rows = []
for step in range(1, training["steps"] + 1):
    rows.append({"step": step, "tokens": 1000 * step, "loss": 4.0, "gradient_norm": 1.0, "learning_rate": 1.0,
                 "tokens_per_second": 1e9, "mfu": None, "elapsed_s": float(step), "validation_loss": None})
    if step % 2 == 0:
        rows[-1]["validation_loss"] = loss + 1 - step / training["steps"]
(out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
layers = {"effective_rank": [10.0, 20.0], "dom_ratio": [4.0, 6.0], "largest_residual": [1.0, 7.0]}
probes = [{"step": 0, "tokens": 0, "batch": batch, "whole": {"sink_rate": 0.5}, "layers": layers}
          for batch in ("random", "text")]
(out / "probes.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in probes))
(out / "config.yaml").write_text(yaml.safe_dump(config))
(out / "environment.json").write_text("{}")
summary = {"steps": training["steps"], "tokens": rows[-1]["tokens"], "validation_loss": loss}
(out / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Options of a small experiment whose runs are made by the stand-in."""

    def use(sleep):
        def command(config, out, data):
            resolved = training_pool.resolve(str(config), data=[data], training={}).plain()
            return [sys.executable, "-c", TRAINER.replace("SLEEP", str(sleep)), json.dumps(resolved), str(out)]

        monkeypatch.setattr(training_pool, "training_command", command)

    use(0)
    monkeypatch.setattr(training_pool, "POLL_S", 0.02)
    return argparse.Namespace(
        data="tokens", runs=tmp_path / "runs", keep=tmp_path / "kept", done=None, jobs=2, budget_s=float("inf"),
        tune_steps=None, seeds=[1, 2], use=use,
    )  # fmt: skip


BASE = {"preset": "tiny", "training": {"steps": 10}}
TRIALS = tuning_groups([0.001, 0.002], [0.1], [0.25, 0.5], seed=0)


def test_softmax_and_the_norm_get_the_same_trials():
    groups = tuning_groups([1, 2, 3], [0.1, 0.5], [0.25, 0.5], seed=7)
    runs = [run for group in groups for run in group]
    settings = {
        variant: [(run.learning_rate, run.weight_decay) for run in runs if run.variant == variant]
        for variant in ("softmax", "head_norm")
    }
    assert settings["softmax"] == settings["head_norm"]
    assert len(set(settings["softmax"])) == 6
    assert {run.seed for run in runs} == {7}
    normed = [run for run in runs if run.variant == "head_norm"]
    assert set(Counter(run.initial_lambda for run in normed).values()) == {3}
    for rate in (1, 2, 3):  # each learning rate meets each lambda
        assert {run.initial_lambda for run in normed if run.learning_rate == rate} == {0.25, 0.5}


def test_pairs_come_first_and_seed_by_seed():
    softmax, norm = (TRIALS[0][0], TRIALS[1][1])
    groups = judging_groups(softmax, norm, [1, 2, 3, 4])
    assert [[(run.variant, run.seed) for run in group] for group in groups[:4]] == [
        [("softmax", seed), ("head_norm", seed)] for seed in (1, 2, 3, 4)
    ]
    rest = [run for group in groups[4:] for run in group]
    assert Counter(run.variant for run in rest if run.stage == "others") == Counter(OTHERS)
    assert {run.seed for run in rest if run.stage == "others"} == {1}
    lambdas = {run.variant: run.initial_lambda for run in rest if run.stage == "others"}
    assert lambdas["head_norm_gate"] == norm.initial_lambda == 0.5
    assert lambdas["gate"] is None
    ablations = [(run.variant, run.initial_lambda, run.seed) for run in rest if run.stage == "ablate"]
    assert sorted(ablations) == sorted(
        (*kind, seed) for kind in (("first_norm", 0.5), ("head_norm", 1.0)) for seed in (1, 2, 3, 4)
    )
    names = [run.name for group in TRIALS + groups for run in group]
    assert len(set(names)) == len(names)


def test_a_configuration_differs_in_nothing_but_the_run():
    base = {"preset": "tiny", "model": {"num_hidden_layers": 3}, "training": {"steps": 9, "snapshots": [9]}}
    run = Run(stage="judge", variant="head_norm", seed=3, learning_rate=0.1, weight_decay=0.2, initial_lambda=0.25)
    found = run_configuration(base, run, tune_steps=5)
    options = {"initial_lambda": 0.25, "per_head": False, "offset": False}
    assert found["model"] == dict(num_hidden_layers=3, attention_variant="head_norm", seed=3, variant_options=options)
    assert found["training"] == dict(steps=9, snapshots=[9], seed=3, learning_rate=0.1, weight_decay=0.2)
    trial = run_configuration(base, Run(**(vars(run) | {"stage": "tune"})), tune_steps=5)["training"]
    assert (trial["steps"], trial["snapshots"], trial["probe_every"]) == (5, [], 0)
    assert base["training"] == {"steps": 9, "snapshots": [9]}


def test_the_whole_experiment_then_nothing_is_left_to_do(options, monkeypatch, capsys):
    assert carry_out(options, BASE, TRIALS) == []
    results = read_results(options.keep)
    assert len(results) == 4 + 4 + 6 + 4
    assert not list(options.runs.glob("*/checkpoints"))
    said = capsys.readouterr().out
    monkeypatch.setattr(training_pool.subprocess, "Popen", None)  # the control: nothing may start
    assert carry_out(options, BASE, TRIALS) == []
    by_name = {Run(**result["run"]).name: result for result in read_results(options.keep)}
    assert by_name == {Run(**result["run"]).name: result for result in results}
    assert "begins" not in capsys.readouterr().out
    assert said.count("begins") == 18
    # On another machine, where the run folders are lost:
    options.done, options.keep = options.keep, options.keep.with_name("again")
    options.runs = options.runs.with_name("elsewhere")
    assert carry_out(options, BASE, TRIALS) == []
    with pytest.raises(InputError, match="with another configuration"):
        carry_out(options, BASE | {"training": {"steps": 8}}, TRIALS)


def test_the_budget_stops_what_runs_and_says_what_is_missing(options):
    options.use(sleep=60)
    options.budget_s = training_pool.GRACE_S + 1.0
    missing = carry_out(options, BASE, TRIALS)
    assert len(missing) == 4 + 14
    assert next(run.name for run in missing if run.stage == "judge") == "judge-softmax-seed1-as-tuned"
    assert not list(options.keep.iterdir())


def test_a_pair_is_not_begun_that_would_not_end(options):
    options.jobs = 1
    experiment = pool(options, BASE)
    assert experiment.carry_out([TRIALS[0]])
    experiment.overhead_s, experiment.deadline = 60.0, time.monotonic() + 100  # one would fit, two would not
    assert not experiment.carry_out([TRIALS[1]])
    assert experiment.missing == TRIALS[1]
    experiment.deadline = time.monotonic() + 130  # the control
    assert experiment.carry_out([TRIALS[1]])


def test_a_diverged_trial_loses_and_a_broken_one_is_refused(options):
    trials = tuning_groups([0.9, 0.001], [0.1], [0.25], seed=0)
    assert pool(options, BASE).carry_out(trials)
    assert sum(result["diverged"] for result in read_results(options.keep)) == 2
    assert best_trial(read_results(options.keep), "softmax").learning_rate == 0.001
    with pytest.raises(InputError, match="did not train to its end: exit code 1, sinkscope: expected more"):
        carry_out(options, BASE, tuning_groups([0.1], [0.1], [0.25], seed=0))
    with pytest.raises(InputError, match="the loss is not finite in any"):
        carry_out(options, BASE, tuning_groups([0.9], [0.1], [0.25], seed=0))


def test_kept_files_stay_within_their_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_results, "FILE_BYTES", 700)
    said = []
    kept = KeptResults(tmp_path / "kept", said.append)
    for seed in range(12):
        probes = [{"value": str(hash((seed, number)))} for number in range(10)]
        run = vars(Run(stage="judge", variant="softmax", seed=seed, learning_rate=0.1, weight_decay=0.1))
        kept.add({"name": f"seed {seed}", "run": run, "diverged": False, "probes": probes})
    files = sorted((tmp_path / "kept").iterdir())
    assert len(files) == kept_results.NUM_FILES
    found = read_results(tmp_path / "kept")
    assert [result["run"]["seed"] for result in found] == list(range(12))
    assert found[0]["probes"]
    assert not found[-1]["probes"]
    assert "left out" in said[-1]
    with pytest.raises(InputError, match=r"has no results-\*"):
        read_results(tmp_path)


def test_tables_of_losses_that_are_known(options):
    carry_out(options, BASE, TRIALS)
    results = read_results(options.keep)
    text = "\n".join(paper_tables.tables(results))
    row = next(line for line in text.splitlines() if line.startswith("| head_norm |"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[:2] == ["head_norm", "2"]
    low, high = mean_interval([2.91, 2.92])
    assert cells[2] == f"2.9150 [{low:.4f}, {high:.4f}]"
    assert cells[3] == "-0.1000 [-0.1000, -0.1000]"
    # Losses fall by 0.1 a step: the norm's is where softmax's ends one step before the tenth.
    assert cells[4].startswith("1.11")
    assert cells[6:10] == [
        "15.0 [15.0, 15.0]", "5.0 [5.0, 5.0]", "50.0% [50.0%, 50.0%]", "7.0 [7.0, 7.0]"
    ]  # fmt: skip
    assert "- confirmed: head_norm has the lower loss on every seed" in text
    assert "- not confirmed: the best variant needs at least 1.25x fewer tokens" in text
    assert "| first_norm | +0.0500 [+0.0500, +0.0500] | 50% |" in text
    assert "| head_norm, lambda 1 | +0.1000 [+0.1000, +0.1000] | 100% |" in text
    swapped = [  # the control: with the names exchanged nothing is confirmed
        result | {"run": result["run"] | {"variant": {"softmax": "head_norm", "head_norm": "softmax"}.get(v, v)}}
        for result in results
        if result["run"]["stage"] == "judge"
        for v in [result["run"]["variant"]]
    ]
    assert "- confirmed: head_norm has the lower loss" not in "\n".join(paper_tables.tables(swapped))
    with pytest.raises(InputError, match="judged runs lack"):
        paper_tables.tables([result for result in results if result["run"]["variant"] != "softmax"])


def test_a_kept_run_is_a_run_folder_again(options, tmp_path):
    pool(options, BASE).carry_out([TRIALS[0]])
    result = read_results(options.keep)[0]
    folder = write_run(result, tmp_path / "again")
    assert yaml.safe_load((folder / "config.yaml").read_text()) == result["config"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10]


def test_a_stopped_run_is_kept_without_a_summary(options, tmp_path):
    pool(options, BASE).carry_out([TRIALS[0]])
    kept = read_results(options.keep)[0]
    folder = write_run(kept, tmp_path / "whole")
    (folder / "summary.json").unlink()
    stopped = run_result(kept["name"], kept["run"], folder)
    assert stopped["summary"] is None
    assert stopped["metrics"] == kept["metrics"]
    assert not (write_run(stopped, tmp_path / "stopped") / "summary.json").exists()
    assert (write_run(kept, tmp_path / "again") / "summary.json").exists(), "the control"


def test_probes_without_the_largest_residual_leave_its_cell_empty(options):
    carry_out(options, BASE, TRIALS)
    results = read_results(options.keep)
    for result in results:
        for probe in result["probes"]:
            del probe["layers"]["largest_residual"]
    row = next(line for line in paper_tables.tables(results) if line.startswith("| head_norm |"))
    assert [cell.strip() for cell in row.split("|")[9:11]] == ["50.0% [50.0%, 50.0%]", ""]


def test_a_gain_that_lasts():
    sure, unsure = [0.10, 0.11, 0.12], [0.1, -0.1, 0.1]
    assert paper_tables.lasting_gain({1: sure, 2: unsure, 3: sure, 4: sure}) == 3
    assert paper_tables.lasting_gain({1: sure, 2: sure}) == 1
    assert paper_tables.lasting_gain({1: sure, 2: unsure}) is None
    assert paper_tables.lasting_gain({1: [0.5]}) is None, "one seed has no interval"
