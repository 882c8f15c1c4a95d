"""Devices, dtypes, and a record of the run that tells nothing about whose machine it was."""

import getpass
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from sinkscope.errors import InputError
from sinkscope.runtime import environment, resolve_device, resolve_dtype


@pytest.mark.parametrize("name", [None, "auto"])
@pytest.mark.parametrize("has_gpu", [True, False])
def test_auto_takes_the_gpu_where_there_is_one(monkeypatch, name, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert resolve_device(name).type == ("cuda" if has_gpu else "cpu")


def test_cuda_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="`device='cpu'`"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda") == torch.device("cuda")
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(InputError, match="2 CUDA devices"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "", "meta", "cuda:x"])
def test_unknown_device(name):
    with pytest.raises(InputError, match="auto, cpu, cuda"):
        resolve_device(name)


def test_dtypes():
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_dtype("auto") == "auto"
    for name in ("float32", "bfloat16", "float16", "float64"):
        assert resolve_dtype(name) is getattr(torch, name)


@pytest.mark.parametrize("name", ["int8", "fp32", "Float32", "Tensor", ""])
def test_unknown_dtype(name):
    with pytest.raises(InputError, match="bfloat16"):
        resolve_dtype(name)


def test_environment_says_what_ran():
    record = environment(
        device="cpu", dtype=torch.bfloat16, attention_path="tiles", revision=None, trust_remote_code=False
    )
    assert record["torch"] == torch.__version__
    assert record["python"] == platform.python_version()
    assert record["num_threads"] == torch.get_num_threads()
    assert record["device"] == "cpu"
    assert record["device_name"]
    assert {"transformers", "triton", "sinkscope", "platform"} <= record.keys()
    assert record["dtype"] == "bfloat16"
    assert record["revision"] is None
    assert record["trust_remote_code"] is False
    started_at = datetime.fromisoformat(record["started_at"])
    assert started_at.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - started_at) < timedelta(minutes=1)
    assert json.loads(json.dumps(record)) == record


def test_environment_without_triton(monkeypatch):
    import importlib.metadata

    real = importlib.metadata.version

    def version(package):
        if package == "triton":
            raise importlib.metadata.PackageNotFoundError
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert environment()["triton"] is None


def leaks(record: dict, secrets: list[str]) -> list[str]:
    return [secret for secret in secrets if secret in json.dumps(record)]


def test_environment_names_nobody(monkeypatch):
    # Invented names: the real ones may be so short that they occur in any text.
    monkeypatch.setattr(platform, "node", lambda: "grace-hoppers-laptop")
    monkeypatch.setattr(getpass, "getuser", lambda: "ghopper")
    paths = {"model": "/home/ghopper/models/tiny", "file": Path("/home/ghopper/x.gguf"), "maps": {"a": ["~/ghopper/y"]}}
    record = environment(device="cpu", **paths)
    assert (record["model"], record["file"], record["maps"]) == ("tiny", "x.gguf", {"a": ["y"]})
    secrets = ["ghopper", "grace-hoppers-laptop", "/home", str(Path.cwd())]
    assert leaks(record, secrets) == []
    # Control: the check does see a path that was put in.
    assert leaks(record | {"model": paths["model"]}, secrets) == ["ghopper", "/home"]


def test_environment_keeps_a_hub_name():
    assert environment(model="org/name", revision="refs/pr/1")["model"] == "org/name"


def test_environment_refuses_to_overwrite_an_entry():
    with pytest.raises(ValueError, match="torch"):
        environment(torch="9.9")


def test_importing_runtime_does_not_import_torch():
    check = "import sys, sinkscope.runtime as r; print('torch' in sys.modules); r.resolve_dtype('float32'); "
    check += "print('torch' in sys.modules)"  # the control: the same question answers yes once torch was needed
    answer = subprocess.run(
        [sys.executable, "-c", check],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "PATH": ""},
    )
    assert answer.stdout.split() == ["False", "True"]
