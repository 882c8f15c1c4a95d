"""A run that is killed anywhere goes on as if it never had been; what cannot be continued is refused, by name."""

import json
import os
import re
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from command_line import in_forks
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sinkscope.errors import InputError
from sinkscope.pretrain import checkpoints, metrics, training_run
from sinkscope.pretrain import step as step_module
from sinkscope.pretrain.config import PretrainConfig, TrainingConfig
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.optimisers import build_optimisers
from sinkscope.pretrain.parallel import processes
from sinkscope.pretrain.presets import decoder_config
from sinkscope.pretrain.tokenize import TokenizeConfig, tokenize
from sinkscope.pretrain.train import pretrain
from sinkscope.results import run_folder
from sinkscope.results.tables import read_table

MODEL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
TRAINING = {
    "steps": 8,
    "batch_size": 4,
    "sequence_length": 32,
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "evaluate_every": 4,
    "evaluation_sequences": 8,
    "probe_every": 4,
    "probe_length": 24,
    "probe_sequences": 4,
    "checkpoint_every": 3,
    "snapshots": (0, 5),
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    generator = np.random.default_rng(0)
    words = ["sink", "token", "first", "head", "value", "mean", "norm", "key"]
    texts = [" ".join(generator.choice(words, 120)) for _ in range(30)]
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(texts))
    config = TokenizeConfig(data=(str(folder / "text.txt"),), vocab_size=280, validation_share=0.2)
    return tokenize(config, folder / "tokens", progress=lambda text: None).path


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Numbers to the bit, and a fork that cannot wait for threads it doesn't have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "matrix_rate", lambda device: 1e9)  # a speed, which is measured for long
        yield
    torch.set_num_threads(threads)


def trained(run, data, **changes):
    """Trains in a folder, or goes on with what is there; returns what was said."""
    said = []
    training = TrainingConfig(**TRAINING | changes)
    config = PretrainConfig(
        data=[str(data)], validation=[], model=MODEL | {"max_position_embeddings": 32}, vocab_size=280,
        training=training,
    )  # fmt: skip
    with processes("single", "cpu") as group:
        pretrain(config, run, group, say=said.append)
    return said


@pytest.fixture(scope="module")
def whole(tokens, tmp_path_factory):
    """A run that nothing happened to."""
    run = tmp_path_factory.mktemp("whole") / "run"
    trained(run, tokens)
    return run


@pytest.fixture
def train(tokens, tmp_path):
    return lambda name="run", data=tokens, **changes: trained(tmp_path / name, data, **changes)


@pytest.fixture
def stopped(whole, tmp_path):
    """The same run, stopped before its last checkpoint led to an end."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
    shutil.rmtree(run / "model")
    return run


def rows(run, name):
    """The rows of a log without what the clock says."""
    clock = ("tokens_per_second", "mfu", "elapsed_s")
    lines = (run / f"{name}.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in clock} for line in lines]


def assert_same_run(one, other):
    assert rows(one, "metrics") == rows(other, "metrics")
    assert rows(one, "probes") == rows(other, "probes")
    summaries = [json.loads((run / "summary.json").read_text()) for run in (one, other)]
    for name in ("loss", "validation_loss", "tokens"):
        assert summaries[0][name] == summaries[1][name]
    for path in ("model", "snapshots/step-00000000", "snapshots/step-00000005"):
        assert (one / path / "model.safetensors").read_bytes() == (other / path / "model.safetensors").read_bytes()


def half_the_tensors(tensors, path):
    path.write_bytes(b"half")


def half_a_row(self, row):
    self._file.write('{"step": 5, "lo')
    self._file.flush()


# Where a run is killed, and what it has done of the call by then.
MOMENTS = {
    "tensors": (checkpoints, "save_file", half_the_tensors),
    "rename": (run_folder, "_move_into_place", None),
    "removal of the oldest": (run_folder.shutil, "rmtree", None),
    "row": (metrics.JsonLines, "write", half_a_row),
    "probe": (training_run, "probe", None),
    "export": (training_run, "export", None),
    "tables": (training_run, "write_tables", None),
}


# In the order of the run, each as (moment, which of its calls since the run was taken up again).
KILLS = (
    *(("probe", 2), ("probe", 2), ("export", 1), ("export", 1), ("row", 4), ("row", 4), ("tensors", 1), ("tensors", 1)),
    *(("rename", 1), ("rename", 1), ("row", 7), ("row", 2), ("export", 1), ("export", 1), ("tensors", 1)),
    *(("tensors", 1), ("rename", 1), ("rename", 1), ("probe", 4), ("probe", 2), ("removal of the oldest", 1)),
    *(("export", 1), ("export", 1), ("tables", 1), ("tables", 1)),
)


def killed_at(moment, number, work):
    """Whether some work was killed, at this call of the moment's function, in a process of its own."""
    owner, attribute, half = MOMENTS[moment]
    real = getattr(owner, attribute)

    def call(*args, **kwargs):
        nonlocal number
        number -= 1
        if number == 0:
            if half is not None:
                half(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    def to_the_kill():
        setattr(owner, attribute, call)
        work()

    status = in_forks(to_the_kill)[0]
    assert status in (0, signal.SIGKILL), "it ends as planned"
    return status == signal.SIGKILL


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_again_and_again_the_run_is_the_same_to_the_bit(train, whole, tmp_path):
    assert len(KILLS) == 25
    for moment, number in KILLS:
        assert killed_at(moment, number, lambda: train("killed")), moment
        assert not (tmp_path / "killed" / "summary.json").exists()
    assert {moment for moment, _ in KILLS} == set(MOMENTS)
    train("killed")
    assert_same_run(whole, tmp_path / "killed")
    left = [path.name for path in (tmp_path / "killed").rglob(".*") if path.name != run_folder.MARK]
    assert left == [], "nothing half-written stays"


def test_control_another_seed_is_another_run(train, whole, tmp_path):
    train("other", seed=1)
    assert rows(whole, "metrics") != rows(tmp_path / "other", "metrics")


def test_control_a_resumed_run_without_its_optimisers_is_another(train, whole, stopped, monkeypatch):
    shutil.rmtree(stopped / "checkpoints" / "step-00000008")
    real = checkpoints.load_file
    monkeypatch.setattr(
        checkpoints,
        "load_file",
        lambda path: {name: t * 0 if name.startswith("optimiser") else t for name, t in real(path).items()},
    )
    train()
    assert rows(stopped, "metrics")[:7] == rows(whole, "metrics")[:7]
    assert rows(stopped, "metrics")[7:] != rows(whole, "metrics")[7:]


def with_tensors(change):
    """A checkpoint whose tensors were changed by somebody who wrote the new hash down too."""

    def spoil(checkpoint):
        tensors = load_file(checkpoint / "training.safetensors")
        change(tensors)
        save_file(tensors, checkpoint / "training.safetensors")
        with_record(
            lambda record: record["files"].update(
                {"training.safetensors": checkpoints.file_sha256(checkpoint / "training.safetensors")}
            )
        )(checkpoint)

    return spoil


def with_record(change):
    def spoil(checkpoint):
        record = json.loads((checkpoint / "checkpoint.json").read_text())
        change(record)
        (checkpoint / "checkpoint.json").write_text(json.dumps(record))

    return spoil


def flip_a_bit(checkpoint):
    content = bytearray((checkpoint / "training.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / "training.safetensors").write_bytes(content)


NORM = "model.model.norm.weight"
NO_RECORD = "checkpoint.json: "
SPOILED = {
    "a bit": (flip_a_bit, "training.safetensors has other bytes"),
    "file": (lambda path: (path / "training.safetensors").unlink(), "training.safetensors is missing"),
    "no record": (lambda path: (path / "checkpoint.json").unlink(), NO_RECORD),
    "zeros": (lambda path: (path / "checkpoint.json").write_bytes(b"\0" * 50), NO_RECORD),
    "deep": (lambda path: (path / "checkpoint.json").write_text("[" * 100_000), NO_RECORD),
    "step": (with_record(lambda record: record.update(step="8")), NO_RECORD),
    "another step": (with_record(lambda record: record.update(step=9)), NO_RECORD),
    "seconds": (with_record(lambda record: record.update(seconds={"probes": None})), NO_RECORD),
    "a file of others": (
        with_record(lambda record: record["files"].update({"../../config.yaml": "0"})),
        "../../config.yaml is missing",
    ),
    "no tensor": (with_tensors(lambda tensors: tensors.pop(NORM)), f"no tensor {NORM}"),
    "shape": (with_tensors(lambda tensors: tensors.update({NORM: tensors[NORM][1:]})), rf"{NORM} has the shape \[31\]"),
    "dtype": (with_tensors(lambda tensors: tensors.update({NORM: tensors[NORM].double()})), f"{NORM} has the shape"),
    "no moment": (with_tensors(lambda tensors: tensors.pop(f"optimiser{NORM[5:]}.exp_avg")), "no tensor optimiser"),
    "no random state": (with_tensors(lambda tensors: tensors.pop("generator.cpu")), "no tensor generator.cpu"),
    "random state": (
        with_tensors(lambda tensors: tensors["generator.cpu"].zero_()),
        "not the state of a random generator",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_damage_is_seen_and_named(whole, tmp_path, case):
    spoil, message = SPOILED[case]
    checkpoint = tmp_path / "checkpoints" / "step-00000008"
    shutil.copytree(whole / "checkpoints" / "step-00000008", checkpoint)
    model = Decoder(decoder_config(MODEL | {"vocab_size": 280, "max_position_embeddings": 32}))
    optimisers = build_optimisers(model, model.blocks, TrainingConfig(**TRAINING))
    expected = checkpoints.expected_layouts(dict(model.named_parameters()), optimisers)
    assert checkpoints.damage(checkpoint, expected) is None
    spoil(checkpoint)
    assert re.search(message, checkpoints.damage(checkpoint, expected))
    with pytest.raises(InputError, match=f"Every checkpoint in .* is damaged; step-00000008: .*{message}"):
        checkpoints.newest_checkpoint(tmp_path, expected, lambda text: None)


def test_of_damaged_checkpoints_the_newest_whole_one_is_used(train, whole, stopped):
    with_tensors(lambda tensors: tensors.pop(NORM))(stopped / "checkpoints" / "step-00000008")
    log = stopped / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:6], "\0" * 20, "\n", '{"step": 8, "lo']))
    said = train()
    assert any(f"step-00000008 is damaged (no tensor {NORM})" in text for text in said)
    assert any("resuming at step 6" in text for text in said)
    assert_same_run(whole, stopped)


def spoil_line(name, number, text):
    def spoil(run):
        lines = (run / name).read_text().splitlines(keepends=True)
        lines[number - 1] = text
        (run / name).write_text("".join(lines))

    return spoil


def with_value(name, number, key, value):
    def spoil(run):
        row = json.loads((run / name).read_text().splitlines()[number - 1])
        spoil_line(name, number, json.dumps(row | {key: value}) + "\n")(run)

    return spoil


SPOILED_LOGS = {
    "empty": (lambda run: (run / "metrics.jsonl").write_text(""), "it has 0 rows and lacks step 1"),
    "none": (lambda run: (run / "metrics.jsonl").unlink(), "there is no such file"),
    "zeros": (spoil_line("metrics.jsonl", 3, "\0\0\0\n"), "line 3: Expecting value"),
    "deep": (spoil_line("metrics.jsonl", 3, "[" * 100_000 + "\n"), "line 3: it is nested"),
    "text step": (with_value("metrics.jsonl", 3, "step", "3"), r"line 3: step must be a whole number, not '3'"),
    "infinite": (with_value("metrics.jsonl", 2, "loss", float("inf")), "line 2: Infinity is not a number"),
    "huge": (with_value("metrics.jsonl", 2, "tokens", 10**30), "line 2: it holds a number of more than 64 bits"),
    "a row is missing": (spoil_line("metrics.jsonl", 3, ""), "line 3 is of step 4, not of step 3"),
    "cut": (spoil_line("metrics.jsonl", 8, '{"step": 8'), "it has 7 rows and lacks step 8"),
    "a probe is missing": (
        spoil_line("probes.jsonl", 1, ""),
        "line 1 is of step 0, text, not of step 0, random",
    ),
    "layers": (
        with_value("probes.jsonl", 2, "layers", {"cosine": [1.0], "top_share": []}),
        "its observables have different",
    ),
    "whole": (with_value("probes.jsonl", 2, "whole", None), r"line 2: whole must be an object with names, not None"),
}


@pytest.mark.parametrize("case", SPOILED_LOGS)
@pytest.mark.parametrize("complete", [True, False])
def test_a_damaged_log_is_refused_and_named(train, whole, tmp_path, case, complete):
    """Of a complete run too: it says so only while all of its rows are there."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    if not complete:
        (run / "summary.json").unlink()
    spoil, message = SPOILED_LOGS[case]
    spoil(run)
    refused = rf"Cannot use .*run/(metrics|probes)\.jsonl: {message}.*Put back a copy of the file.*`overwrite=True`"
    with pytest.raises(InputError, match=refused):
        train()


def test_a_damaged_summary_is_written_again(train, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text("[" * 100_000)
    assert any("summary.json is damaged" in text for text in train())
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_of_two_processes_started_together_one_is_refused_and_the_other_is_whole(train, whole, tmp_path, monkeypatch):
    real, refusal = training_run.probe, tmp_path / "refusal"

    def probe(*args, **kwargs):
        for _ in range(6000):  # the one that has the folder keeps it until the other one has asked for it
            if not refusal.exists():
                time.sleep(0.01)
        return real(*args, **kwargs)

    def work():
        try:
            train()
        except InputError as error:
            (tmp_path / "told").write_text(str(error))
            (tmp_path / "told").rename(refusal)

    monkeypatch.setattr(training_run, "probe", probe)
    in_forks(work, work)
    assert "Another run is writing to" in refusal.read_text()
    assert_same_run(tmp_path / "run", whole)


def test_only_the_newest_checkpoints_are_kept(train, tmp_path):
    train(checkpoint_every=2)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000006", "step-00000008"]


def test_a_complete_run_is_left_as_it_is(train, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    said = train()
    assert any("complete" in text for text in said)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_another_configuration_is_refused_and_named(train, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(InputError, match=r"training\.learning_rate 0\.01 there, 0\.02 now"):
        train(learning_rate=0.02)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda text: text + "foo: 1\n", "it has an unknown key 'foo'"),
        (lambda text: text.replace("vocab_size: 280\n", ""), "it has no key 'vocab_size'"),
        (lambda text: "", "it must be an object with names, not None"),
        (lambda text: "][", "did not find expected"),
        (lambda text: None, "there is no such file"),
    ],
)
def test_a_spoiled_configuration_is_named_while_the_checkpoints_are_whole(train, stopped, whole, spoil, found):
    config = stopped / "config.yaml"
    text = config.read_text()
    config.unlink()
    if (spoiled := spoil(text)) is not None:
        config.write_text(spoiled)
    with pytest.raises(InputError, match=f"config.yaml is not the one that the run began with: .*{found}.*Put it back"):
        train()
    config.write_text(text)
    train()
    assert_same_run(whole, stopped)


def test_a_run_of_another_command_is_not_gone_on_with(train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("command: sinkscope trace\n")
    with pytest.raises(InputError, match=r"no \.sinkscope file"):
        train()


def test_a_run_that_is_older_than_a_setting_goes_on_with_its_default(train, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("  skipped_targets: 0\n", ""))
    assert any("complete" in text for text in train())
    with pytest.raises(InputError, match=r"training\.skipped_targets 0 there, 1 now"):
        train(skipped_targets=1)


def test_other_data_behind_the_same_name_are_refused(train, tokens, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(tokens, data)
    train(data=data)
    (tmp_path / "run" / "summary.json").unlink()
    manifest = json.loads((data / "manifest.json").read_text())
    file = data / manifest["shards"][0]["file"]
    content = file.read_bytes()
    file.write_bytes(content[2:] + content[:2])
    with pytest.raises(InputError, match="other bytes"):
        train(data=data)
    manifest["shards"][0]["sha256"] = checkpoints.file_sha256(file)
    (data / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="other tokens"):
        train(data=data)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(train, whole, tmp_path, monkeypatch):
    real = step_module.TrainingStep.update

    def update(self, step, stream):
        loss, norm = real(self, step, stream)
        if step == 5:  # the sixth update, at which a checkpoint is due
            with torch.no_grad():
                self.model.final_norm.weight.fill_(float("nan"))
            loss = loss * float("nan")
        return loss, norm

    with monkeypatch.context() as patch:
        patch.setattr(step_module.TrainingStep, "update", update)
        with pytest.raises(InputError, match=r"loss nan.* at step 6.*last good checkpoint is step-00000003"):
            train()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]
    assert rows(tmp_path / "run", "metrics")[-1]["step"] == 5
    train()
    assert_same_run(tmp_path / "run", whole)


def test_a_rate_that_blows_the_weights_up_is_refused_and_no_such_weights_are_kept(train, tmp_path):
    """Loss and gradient of the first step are finite: what they do to the weights is not."""
    with pytest.raises(
        InputError, match=r"weights that are not finite after step 1\. .*no checkpoint yet.*`learning_rate`"
    ):
        train(learning_rate=1e38, evaluate_every=8, probe_every=0, checkpoint_every=1, snapshots=())
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


def test_a_full_disk_is_an_error_and_costs_no_checkpoint(train, whole, tmp_path, monkeypatch):
    real = checkpoints.save_file
    calls = []

    def full(tensors, path):
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        real(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", full)
        with pytest.raises(InputError, match=r"No space left.*Free some space"):
            train()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]
    train()
    assert_same_run(tmp_path / "run", whole)


def test_a_full_disk_under_the_log_is_an_error_too(train, monkeypatch):
    def full(self, row):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(metrics.JsonLines, "write", full)
        with pytest.raises(InputError, match="No space left"):
            train()


def test_the_tables_say_what_the_rows_say(whole):
    run = whole
    metrics, lines = read_table(run / "metrics"), rows(run, "metrics")
    assert metrics["loss"] == [row["loss"] for row in lines]
    assert [step for step, loss in zip(metrics["step"], metrics["validation_loss"], strict=True) if loss] == [4, 8]
    probes = read_table(run / "probes.parquet")
    table = {
        key: value
        for *key, value in zip(*(probes[name] for name in ("step", "batch", "quantity", "layer", "value")), strict=True)
        for key in [tuple(key)]
    }
    for row in rows(run, "probes"):
        assert table[row["step"], row["batch"], "sink_rate", None] == row["whole"]["sink_rate"]
        assert table[row["step"], row["batch"], "dom_ratio", 1] == row["layers"]["dom_ratio"][1]
    assert {(row["step"], row["batch"]) for row in rows(run, "probes")} == {
        (step, batch) for step in (0, 4, 8) for batch in ("random", "text")
    }
