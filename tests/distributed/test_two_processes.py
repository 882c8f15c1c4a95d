"""Two gloo processes on the CPU train like one: the same losses, held-out losses, probes and checkpoints."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from forked_processes import free_port, in_two_processes

from sinkscope.pretrain.parallel import processes
from sinkscope.pretrain.presets import resolve
from sinkscope.pretrain.train import pretrain

TOLERANCE = 1e-5
"""Sums over two halves of a batch in another order; losses are near 6, a rounding step of float32 there 5e-7."""
TRAINING = {
    "steps": 6,
    "batch_size": 8,
    "micro_batch_size": 2,
    "sequence_length": 32,
    "checkpoint_every": 3,
    "evaluate_every": 3,
    "probe_every": 6,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A forked process cannot wait for threads that it doesn't have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = ["the", "first", "token", "takes", "what", "no", "other", "wants", "and", "keeps", "it"]
    lines = [" ".join(words[(i * j) % len(words)] for j in range(1, 40)) for i in range(1, 60)]
    path.write_text("\n<|endoftext|>\n".join(lines))
    return path


def trained(text, run, mode="single", say=lambda text: None):
    config = resolve("tiny", data=[str(text)], training=TRAINING)
    with processes(mode, "cpu") as group:
        pretrain(config, run, group, say=say)


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    run = tmp_path_factory.mktemp("alone") / "run"
    trained(text, run)
    return run


def rows(run, name="metrics"):
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


def assert_same_training(ours, theirs):
    for name in ("loss", "gradient_norm", "validation_loss"):
        for our_row, their_row in zip(ours, theirs, strict=True):
            assert our_row[name] == pytest.approx(their_row[name], abs=TOLERANCE), name


def assert_same_run(run, alone):
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5, 6]
    assert_same_training(rows(run), rows(alone))
    for ours, theirs in zip(rows(run, "probes"), rows(alone, "probes"), strict=True):
        assert ours["layers"]["dom_ratio"] == pytest.approx(theirs["layers"]["dom_ratio"], rel=1e-3)


def test_ddp_under_torchrun_is_one_process(text, alone, tmp_path):
    """Of text: the first process tokenizes while the other waits."""
    run = tmp_path / "run"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in TRAINING.items()]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "-m", "sinkscope"]
    command = [*launcher, "pretrain", "--data", str(text), "--out", str(run), "--device=cpu", *options]
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "cpu x 2 (ddp)" in result.stderr
    assert result.stderr.count("step 6/6") == 1, "one process speaks"
    assert_same_run(run, alone)


def test_fsdp_is_one_process_and_resumes_to_the_bit(text, alone, tmp_path):
    run = tmp_path / "run"
    in_two_processes(lambda: trained(text, run, "fsdp"))
    assert_same_run(run, alone)
    names = {path.name for path in (run / "checkpoints" / "step-00000006").rglob("*")}
    assert names == {".sinkscope", "checkpoint.json", "training.safetensors"}, "no pickle"
    before = rows(run)
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    shutil.copytree(run, tmp_path / "alone")
    in_two_processes(lambda: trained(text, run, "fsdp"))
    assert [row["loss"] for row in rows(run)] == [row["loss"] for row in before]
    trained(text, tmp_path / "alone")
    assert_same_run(tmp_path / "alone", alone)


def test_control_a_step_too_far_is_seen(alone):
    with pytest.raises(AssertionError):
        assert_same_training(rows(alone)[1:], rows(alone)[:-1])
