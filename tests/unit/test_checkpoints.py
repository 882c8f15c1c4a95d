"""A run that is killed anywhere goes on as if it never had been; what cannot be continued is refused, by name."""

import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from sinkscope.errors import InputError
from sinkscope.pretrain import checkpoints, metrics_log, training_run, training_step
from sinkscope.pretrain.parallel import processes
from sinkscope.pretrain.run_setup import PretrainConfig, pretrain
from sinkscope.pretrain.tokenizing import TokenizeConfig, tokenize
from sinkscope.pretrain.training_config import TrainingConfig
from sinkscope.results import run_folder
from sinkscope.results.tables import read_table

MODEL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
MODEL["attention_variant"] = "equal_variance"  # training changes its buffers too
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


@pytest.fixture
def train(tokens, tmp_path):
    """Trains in a folder, or goes on with what is there; returns what was said."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # numbers to the bit, and a fork that cannot wait for threads it doesn't have

    def run(name="run", data=tokens, **changes):
        said = []
        training = TrainingConfig(**TRAINING | changes)
        config = PretrainConfig(
            data=[str(data)], validation=[], model=MODEL | {"max_position_embeddings": 32}, vocab_size=280,
            training=training,
        )  # fmt: skip
        with processes("single", "cpu") as group:
            pretrain(config, tmp_path / name, group, say=said.append)
        return said

    yield run
    torch.set_num_threads(threads)


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


def in_a_fork(work):
    """The status of a child process that does some work."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_tensors(monkeypatch):
    def half(tensors, path):
        path.write_bytes(b"half")
        killed()

    monkeypatch.setattr(checkpoints, "save_file", half)


def kill_before_rename(monkeypatch):
    real = run_folder._move_into_place

    def move(partial, path, overwrite):
        killed() if path.name == "step-00000006" else real(partial, path, overwrite)

    monkeypatch.setattr(run_folder, "_move_into_place", move)


def kill_while_removing_the_oldest(monkeypatch):
    monkeypatch.setattr(run_folder.shutil, "rmtree", lambda path, **_: killed())


def kill_in_a_row(monkeypatch):
    real = metrics_log.JsonLines.write

    def write(self, row):
        if row["step"] == 5 and "loss" in row:
            self._file.write('{"step": 5, "lo')
            self._file.flush()
            killed()
        real(self, row)

    monkeypatch.setattr(metrics_log.JsonLines, "write", write)


def kill_in_a_probe(monkeypatch):
    real = training_run.probe
    calls = []

    def probe(*args, **kwargs):
        calls.append(args)
        return killed() if len(calls) == 4 else real(*args, **kwargs)  # the second batch of step 4

    monkeypatch.setattr(training_run, "probe", probe)


def kill_in_a_snapshot(monkeypatch):
    real = training_run.export

    def export(model, folder, **kwargs):
        real(model, folder, **kwargs)
        if "step-00000005" in folder.name:
            killed()

    monkeypatch.setattr(training_run, "export", export)


def kill_in_the_tables(monkeypatch):
    monkeypatch.setattr(training_run, "write_tables", lambda run: killed())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    "kill",
    [
        kill_in_tensors,
        kill_before_rename,
        kill_while_removing_the_oldest,
        kill_in_a_row,
        kill_in_a_probe,
        kill_in_a_snapshot,
        kill_in_the_tables,
    ],
)
def test_killed_anywhere_the_resumed_run_is_the_same_to_the_bit(train, tmp_path, kill):
    train("whole")

    def to_the_kill():
        with pytest.MonkeyPatch.context() as monkeypatch:
            kill(monkeypatch)
            train("killed")

    assert os.WTERMSIG(in_a_fork(to_the_kill)) == signal.SIGKILL
    assert not (tmp_path / "killed" / "summary.json").exists()
    train("killed")
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    left = [path.name for path in (tmp_path / "killed").rglob(".*") if path.name != run_folder.MARK]
    assert left == [], "nothing half-written stays"


def test_control_another_seed_is_another_run(train, tmp_path):
    train("one")
    train("other", seed=1)
    assert rows(tmp_path / "one", "metrics") != rows(tmp_path / "other", "metrics")


def test_control_a_resumed_run_without_its_optimisers_is_another(train, tmp_path, monkeypatch):
    train("whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "forgetful")
    for name in ("summary.json", "model", "checkpoints/step-00000008"):
        path = tmp_path / "forgetful" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    real = checkpoints.load_file
    monkeypatch.setattr(
        checkpoints,
        "load_file",
        lambda path: {name: t for name, t in real(path).items() if not name.startswith("optimiser")},
    )
    train("forgetful")
    ours, theirs = (rows(tmp_path / name, "metrics") for name in ("forgetful", "whole"))
    assert ours[:7] == theirs[:7]
    assert ours[7:] != theirs[7:]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(train, tmp_path):
    train("whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
    run = tmp_path / "damaged"
    (run / "summary.json").unlink()
    shutil.rmtree(run / "model")
    tensors = run / "checkpoints" / "step-00000008" / "training.safetensors"
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)
    said = train("damaged")
    assert any("step-00000008 is damaged (training.safetensors has other bytes)" in text for text in said)
    assert any("resuming at step 6" in text for text in said)
    assert_same_run(tmp_path / "whole", run)


def test_a_run_with_damaged_checkpoints_only_is_refused(train, tmp_path):
    train()
    (tmp_path / "run" / "summary.json").unlink()
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        (path / "checkpoint.json").write_text("{")
    with pytest.raises(InputError, match="damaged ones only"):
        train()


def test_only_the_newest_checkpoints_are_kept(train, tmp_path):
    train(checkpoint_every=2)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000006", "step-00000008"]


def test_a_complete_run_is_left_as_it_is(train, tmp_path):
    train()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    said = train()
    assert any("complete" in text for text in said)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_another_configuration_is_refused_and_named(train):
    train()
    with pytest.raises(InputError, match=r"training\.learning_rate 0\.01 there, 0\.02 now"):
        train(learning_rate=0.02)


def test_a_run_of_another_command_is_not_gone_on_with(train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("command: sinkscope trace\n")
    with pytest.raises(InputError, match="`overwrite=True`"):
        train()


def test_a_run_that_is_older_than_a_setting_goes_on_with_its_default(train, tmp_path):
    train()
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


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(train, tmp_path, monkeypatch):
    real = training_step.TrainingStep.update

    def update(self, step, stream):
        loss, norm = real(self, step, stream)
        if step == 5:  # the sixth update, at which a checkpoint is due
            with torch.no_grad():
                self.model.final_norm.weight.fill_(float("nan"))
            loss = loss * float("nan")
        return loss, norm

    with monkeypatch.context() as patch:
        patch.setattr(training_step.TrainingStep, "update", update)
        with pytest.raises(InputError, match=r"loss nan.* at step 6.*last good checkpoint is step-00000003"):
            train()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]
    assert rows(tmp_path / "run", "metrics")[-1]["step"] == 5
    train()
    train("whole")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_full_disk_is_an_error_and_costs_no_checkpoint(train, tmp_path, monkeypatch):
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
    train("whole")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_full_disk_under_the_log_is_an_error_too(train, monkeypatch):
    def full(self, row):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(metrics_log.JsonLines, "write", full)
        with pytest.raises(InputError, match="No space left"):
            train()


def test_the_tables_say_what_the_rows_say(train, tmp_path):
    train()
    run = tmp_path / "run"
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
