"""Two gloo processes share a trace: the same findings and tables as one, a user's own observable included."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from forked_processes import free_port, in_two_processes
from planted_models import decoy, planted_chain
from tiny_models import tiny_model

import sinkscope
from sinkscope import processes
from sinkscope.fingerprints.signature import Inputs, sign
from sinkscope.models.anatomy import Neuron
from sinkscope.results.parts import Parts
from sinkscope.studies import controls, minimal_set
from sinkscope.tracing.observables import CHAIN, HookPoint, Observable
from sinkscope.tracing.reducers import Mean

IDS = torch.randint(3, 97, (5, 24), generator=torch.Generator().manual_seed(0))
RESIDUAL_NORM = Observable(
    name="residual_norm",
    hook_point=HookPoint.RESIDUAL_OUT,
    value=lambda call: call.residual.norm(dim=-1),
    reducer=Mean(),
    axes="LT",
    meaning="Euclidean norm of the residual that leaves the layer, mean over sequences",
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A forked process cannot wait for threads that it doesn't have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_two_processes_trace_what_one_traces(tmp_path):
    model = tiny_model("llama")

    def traced():
        return sinkscope.trace(model, IDS, observables=[*CHAIN, RESIDUAL_NORM])

    def work():
        with processes.joined():
            found, rank = traced(), processes.rank()
        columns = {
            f"{table}.{name}": np.asarray(values) for table, of in found.tables.items() for name, values in of.items()
        }
        np.savez(tmp_path / f"{rank}.npz", **{k: v for k, v in columns.items() if v.dtype != object}, story=found.story)

    in_two_processes(work)
    expected = traced()
    for rank in range(2):
        found = np.load(tmp_path / f"{rank}.npz")
        assert str(found["story"]) == expected.story
        for name in ("residual_norm", "value_variance", "averaging_law", "dom_ratio", "cosine", "largest_write_neuron"):
            np.testing.assert_allclose(
                found[f"positions.{name}"], expected.tables["positions"][name], rtol=1e-5, atol=1e-6, err_msg=name
            )
        np.testing.assert_allclose(found["heads.lock_share"], expected.tables["heads"]["lock_share"], rtol=1e-4)


def test_two_processes_find_the_bias_and_the_signature_that_one_finds(tmp_path):
    loaded = sinkscope.load(tiny_model("llama"))
    inputs = Inputs(vocabulary=97, length=20, num_sequences=64)

    def found():
        bias = sinkscope.bias(loaded.model, num_sequences=17, length=20, controls=[])
        return bias.summary, sign(loaded, inputs).states

    def work():
        with processes.joined():
            summary, states = found()
            torch.save({"summary": summary, "states": states}, tmp_path / f"{processes.rank()}.pt")

    monkeypatched = pytest.MonkeyPatch()
    monkeypatched.setattr("sinkscope.fingerprints.signature.TOKENS_AT_ONCE", 6 * 20)
    in_two_processes(work)
    monkeypatched.undo()
    summary, states = found()
    for rank in range(2):
        shared = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        torch.testing.assert_close(shared["states"], states)
        assert shared["summary"]["story"] == summary["story"]


def test_two_processes_judge_what_one_judges(tmp_path):
    model, _ = planted_chain(0)

    def judged(parts=None):
        found = sinkscope.study(model, num_sequences=16, length=32, parts=parts)
        return [(judgement.id, judgement.verdict, judgement.effect) for judgement in found.judgements]

    def work():
        with processes.joined():
            parts = Parts(tmp_path / "run", {})
            processes.from_first(parts.prepare)
            (tmp_path / f"{processes.rank()}.json").write_text(json.dumps(judged(parts)))

    in_two_processes(work)
    expected = judged()
    assert any(verdict == "holds" for _, verdict, _ in expected)
    for rank in range(2):
        for found, (claim, verdict, effect) in zip(
            json.loads((tmp_path / f"{rank}.json").read_text()), expected, strict=True
        ):
            assert found[:2] == [claim, verdict]
            assert found[2] == (effect and pytest.approx(effect, rel=1e-4, nan_ok=True)), claim


@pytest.mark.parametrize("kind", [None, "sink_from_ordinary_units"])
def test_processes_that_round_differently_search_the_same_way(kind, tmp_path, monkeypatch):
    model, _ = decoy(kind, 0) if kind else planted_chain(0)
    rate, writers = minimal_set._Search._rate, controls.direction_writers

    def other_rate(*of):
        return rate(*of) + 0.5 * processes.rank()

    def other_order(*of):
        return writers(*of)[:: -1 if processes.rank() else 1]

    monkeypatch.setattr(minimal_set._Search, "_rate", other_rate)
    monkeypatch.setattr("sinkscope.studies.study.direction_writers", other_order)

    def work():
        with processes.joined():
            found = sinkscope.study(model, num_sequences=16, length=32).data
            (tmp_path / str(processes.rank())).write_text(repr((found.minimal, found.writers)))

    in_two_processes(work)
    first, second = ((tmp_path / str(rank)).read_text() for rank in range(2))
    assert first == second != "((), ())"


def test_the_first_process_of_torchrun_writes_and_speaks(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "-m", "sinkscope"]
    options = ["--length=20", "--num-sequences=3", "--device=cpu", "--out", str(tmp_path / "run")]
    command = [sys.executable, *launcher, "trace", "reference:learned_sink", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("No sink") == 1
    assert (tmp_path / "run" / "summary.json").is_file()
    again = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert again.returncode != 0
    assert "sinkscope: There is already a folder" in again.stderr


def test_shares_are_runs_of_the_items_in_the_order_of_the_processes(tmp_path):
    def work():
        with processes.joined():
            (tmp_path / str(processes.rank())).write_text(
                f"{processes.share(list(range(5)))} {processes.gathered(os.getpid())}"
            )
            assert processes.gathered(Neuron(1, None, 2)) == [Neuron(1, None, 2)] * 2  # a tuple with names

    in_two_processes(work)
    first, second = ((tmp_path / str(rank)).read_text().split("] ") for rank in range(2))
    assert (first[0], second[0]) == ("[0, 1, 2", "[3, 4")
    assert first[1] == second[1]


def test_one_process_has_everything():
    with processes.joined():
        assert (processes.count(), processes.rank()) == (1, 0)
        assert processes.share([1, 2]) == [1, 2]
        assert processes.gathered("x") == ["x"]
