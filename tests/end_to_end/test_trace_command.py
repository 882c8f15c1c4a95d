"""The real command: what it prints, what it writes, and how it refuses."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from command_line import assert_refused, in_a_process
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedTokenizerFast

from sinkscope import __version__
from sinkscope.results.tables import read_table

TABLES = ("sinks", "positions", "neurons", "dimensions", "heads", "layers", "distances")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_model("llama").save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w1", eos_token="w2").save_pretrained(folder)
    return folder


def test_without_a_model_the_bundled_one_is_traced(sinkscope, tmp_path):
    result = sinkscope("trace", "--num-sequences", 4)
    assert result.code == 0, result.err
    assert "reference:softmax" in result.out
    assert "Without the 8 neurons that write them most (layer:neuron 7:438" in result.out
    (run,) = (tmp_path / "runs").iterdir()
    for name in ("config.yaml", "environment.json", "summary.json", "chain.png"):
        assert (run / name).stat().st_size > 0
    for name in TABLES:
        read_table(run / name)


def test_json_is_all_that_is_printed_and_equals_the_file(model_folder, tmp_path):
    result = in_a_process("trace", model_folder, "--json", "--out", "run", "--num-sequences", 3, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["model"] == "tiny-llama"
    assert summary["tokens"] == {"kind": "random", "length": 64, "count": 3, "seed": 0, "bos": False, "left_out": 0}
    keys = {"family", "num_layers", "sink_rate", "sinks", "birth_layers", "erasure_layers", "massive_dimensions"}
    keys |= {"super_neurons", "variance_ratio", "dom_ratio", "effective_rank"}
    assert keys <= summary.keys()
    assert summary["keys"] is None
    assert len(summary["variance_ratio"]) == len(summary["effective_rank"]) == summary["num_layers"] == 3
    positions = read_table(tmp_path / "run" / "positions")
    assert len(positions["layer"]) == 3 * 64
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["attention_path"] in ("tiles", "tiles in C")
    assert len(environment["weight_hash"]) == 64
    assert str(tmp_path) not in json.dumps(environment)


def test_same_seed_same_numbers_other_seed_other_numbers(model_folder, sinkscope):
    runs = [
        sinkscope("trace", model_folder, "--json", "--seed", seed, "--out", name)
        for seed, name in ((5, "a"), (5, "b"), (6, "c"))
    ]
    first, again, other = (json.loads(run.out)["variance_ratio"] for run in runs)
    assert first == again
    assert first != other


def test_text_bos_and_keys(model_folder, sinkscope, tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(f"w{number % 90 + 3}" for number in range(500)))
    common = ("trace", model_folder, "--json", "--tokens", "text:text.txt", "--num-sequences", 4, "--length", 40)
    result = sinkscope(*common, "--bos", "--keys", "0,10", "--out", "run")
    assert result.code == 0, result.err
    summary = json.loads(result.out)
    assert summary["tokens"]["bos"] is True
    assert summary["variance_ratio"] is None
    assert summary["keys"] == [0, 10]
    assert summary["story"].startswith("No sink among the recorded keys (0 and 10)"), "the others are not known"
    positions = read_table(tmp_path / "run" / "positions")
    received = zip(positions["position"], positions["attention_received"], strict=True)
    assert {position for position, value in received if value is not None} == {0, 10}
    assert sinkscope(*common, "--keys", "0,40", "--out", "other").code == 2


def bert(folder):
    config = AutoConfig.for_model(
        "bert", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50
    )
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)


def bloom(folder):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(
        AutoConfig.for_model("bloom", hidden_size=32, n_layer=1, n_head=2, vocab_size=50)
    ).save_pretrained(folder)


def truncated(folder):
    tiny_model("llama").save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def pickled(folder):
    model = tiny_model("llama")
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def not_a_number(folder):
    model = tiny_model("llama")
    model.save_pretrained(folder)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


REFUSED_FOLDERS = {
    bert: "causal",
    bloom: "does not ask the attention interface",
    truncated: "safetensors",
    pickled: "safetensors",
    not_a_number: "model.norm.weight",
}


@pytest.mark.parametrize(
    ("build", "message"), REFUSED_FOLDERS.items(), ids=lambda value: getattr(value, "__name__", None)
)
def test_refused_models(build, message, sinkscope, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    build(folder)
    assert_refused(sinkscope("trace", folder), message, tmp_path)


REFUSED_OPTIONS = {
    ("./nowhere",): "nowhere",
    ("nobody/no-such-model",): "no-such-model",
    ("broken.gguf",): "GGUF",
    ("--length", "100000"): "--length",
    ("--tokens", "text:empty.txt"): "empty.txt",
    ("--device", "cuda:99"): "cuda",
    ("--out", "taken"): "remove it yourself",
}


@pytest.mark.parametrize(
    ("options", "message"),
    REFUSED_OPTIONS.items(),
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else None,
)
def test_refused_options(options, message, sinkscope, model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(40))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    model = () if not options[0].startswith("--") else (model_folder,)
    assert_refused(sinkscope("trace", *model, *options), message, tmp_path)
    assert (tmp_path / "taken" / "notes.txt").read_text() == "mine"


def test_a_refusal_in_a_process_of_its_own_has_exit_code_2(tmp_path):
    result = in_a_process("trace", "./nowhere", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("sinkscope: There is no folder or .gguf file")
    assert list(tmp_path.iterdir()) == []


def test_overwrite_replaces_a_run(model_folder, sinkscope, tmp_path):
    arguments = ("trace", model_folder, "--out", "run", "--num-sequences", 2, "--no-effective-rank")
    assert sinkscope(*arguments).code == 0
    environment = tmp_path / "run" / "environment.json"
    environment.write_text("{}")  # a mark, since two runs within one second write the same text
    assert sinkscope(*arguments).code == 2
    assert environment.read_text() == "{}"
    assert sinkscope(*arguments, "--overwrite").code == 0
    assert "started_at" in environment.read_text()


@pytest.mark.parametrize(("names", "code"), [(["SIGINT"], 130), (["SIGTERM"], 143), (["SIGINT", "SIGTERM"], 130)])
def test_an_interrupted_run_leaves_nothing(names, code, tmp_path):
    """The signals arrive at once, while the run folder is half written; an impatient one once more on the way out."""
    before = f"""
import atexit, os, signal, time
signals = [getattr(signal, name) for name in {names}]
atexit.register(os.kill, os.getpid(), signals[-1])
import sinkscope.tracing.trace as module
def interrupted(findings):
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    for each in signals:
        os.kill(os.getpid(), each)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    time.sleep(60)
module.trace_tables = interrupted
"""
    result = in_a_process("trace", "--out", "run", cwd=tmp_path, before=before)
    assert result.returncode == code, result.stderr
    said = result.stderr.count("sinkscope: interrupted; no run was written\n")
    assert said == (names[0] == "SIGINT"), "a termination needs no sentence"
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_an_interrupt_while_modules_are_imported_is_told(module, tmp_path):
    """Ctrl-C when a module is looked for, through the entry point of the console script."""
    code = f"""
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from sinkscope.__main__ import main
main()
"""
    command = [sys.executable, "-c", code, "trace", "--out", "run"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 130
    assert result.stderr == "sinkscope: interrupted; no run was written\n"
    assert list(tmp_path.iterdir()) == []


def test_next_to_nothing_is_imported_before_ctrl_c_is_heard():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["sinkscope"] == "sinkscope.__main__:main"
    code = "import sys; before = set(sys.modules); import sinkscope.__main__; print(*set(sys.modules) - before)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
    assert "sinkscope.__main__" in imported
    assert not {"typing", "pathlib", "ast", "typer", "torch"} & set(imported)


def test_the_version_is_the_packages(tmp_path):
    result = in_a_process("--version", cwd=tmp_path)
    assert (result.returncode, result.stdout.strip()) == (0, __version__)


def test_models_lists_every_family_and_looks_into_one(model_folder, sinkscope):
    assert len(json.loads(sinkscope("models", "--json").out)) == 19
    parts = json.loads(sinkscope("models", model_folder, "--json").out)
    assert parts["family"] == "llama"
    assert parts["num_key_value_heads"] == 2
    assert "self_attn.o_proj" in sinkscope("models", "llama").out


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
        MemoryError(),
    ],
)
def test_a_full_memory_or_folder_for_temporary_files_is_explained(sinkscope, monkeypatch, error):
    monkeypatch.setattr("sinkscope.tracing.trace.record", raises(error))
    result = sinkscope("trace", "--out", "run")
    assert result.code == 2
    assert "fewer or shorter sequences" in result.err
    assert "Traceback" not in result.err
    assert not Path("run").exists()
    no_place = FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp']")
    monkeypatch.setattr("sinkscope.tracing.trace.record", raises(no_place))
    assert "name a folder in TMPDIR" in sinkscope("trace", "--out", "run").err
    # Control: another failure of the program is not mistaken for it.
    monkeypatch.setattr("sinkscope.tracing.trace.record", raises(RuntimeError("shapes")))
    with pytest.raises(RuntimeError, match="shapes"):
        sinkscope("trace", "--out", "run")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the limits of Linux")
def test_a_trace_beyond_the_memory_of_its_control_group_ends_with_a_message(tmp_path):
    """The kernel kills a process there; an allocation of ours fails before. Every other test is the control."""
    before = """
import re
from pathlib import Path
from sinkscope import memory
def little_more():
    return (int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10) + (20 << 20)
memory.memory_bytes = little_more
"""
    result = in_a_process("trace", "--length", 32, "--out", "run", cwd=tmp_path, before=before)
    assert result.returncode == 2, result.stderr
    assert "fewer or shorter sequences" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def raises(error):
    def read(*arguments, **options):
        raise error

    return read
