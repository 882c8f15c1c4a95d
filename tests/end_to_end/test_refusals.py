"""Command lines that cannot be honoured: a message that can be acted on, exit code 2, and nothing written."""

import json
import subprocess
import sys

import pytest

from sinkscope import cli


@pytest.mark.parametrize(
    ("command", "text", "printed"),
    [
        ("trace", "`length=64`", "--length 64"),
        ("trace", "`num_sequences`", "--num-sequences"),
        ("trace", "`keys=[0, 10]`", "--keys 0,10"),
        ("trace", "`bos=False`", "--no-bos"),
        ("study", "`bos=False`", "--bos no"),
        ("trace", "`overwrite=True`", "--overwrite"),
        ("trace", "`tokens='text:my file'`", "--tokens 'text:my file'"),
        ("trace", "`model='gpt2'`", "gpt2"),
        ("pretrain", "`length=64`", "`length=64`"),
    ],
)
def test_parameters_in_a_message_are_printed_as_options_of_the_command(command, text, printed):
    assert cli.in_options(text, cli.command_line().commands[command].params) == printed


DIGITS = "9" * 5000
MANY = "100000000000"
WITHOUT_TORCH = {
    ("trace", "--num-sequences", MANY): "at most --num-sequences",
    ("trace", "--length", MANY): "Lower --length",
    ("trace", "--length", "8"): "--length of at least 17",
    ("trace", "--length", DIGITS): "--length",
    ("trace", "--num-sequences", "0"): "Raise --num-sequences",
    ("trace", "--seed", str(2**32)): "a seed from 0 to 4294967295",
    ("trace", "--seed", "-1"): "--seed",
    ("trace", "--keys", "0-99999999"): "--keys 0,10",
    ("trace", "--keys", f"0-{DIGITS}"): "--keys 0,10",
    ("trace", "--keys", "0-9223372036854775807"): "--keys 0,10",
    ("trace", "--keys", "first"): "--keys 0,10",
    ("trace", "--keys", ""): "--keys 0,10",
    ("trace", "--keys", "0,64"): "key positions from 0 to 63",
    ("trace", "--tokens", "poem"): "text:FILE",
    ("trace", "--tokens", "text:nowhere.txt"): "nowhere.txt",
    ("trace", "--tokens", "text:."): "a folder",
    ("trace", "--tokens", "repeat:x"): "--tokens repeat:42",
    ("trace", "--tokens", f"repeat:{DIGITS}"): "--tokens repeat:42",
    ("trace", "--dtype", "int3"): "bfloat16",
    ("trace", "--device", "gpu"): "cuda:N",
    ("trace", "--device", f"cuda:{DIGITS}"): "cuda:N",
    ("trace", "--device", "cpu", "--device-map", "auto"): "either --device or --device-map",
    ("trace", "--out", "taken"): "--overwrite",
    ("trace", "--json", "--length", "8"): "--length of at least 17",
    ("study", "--json", "--bos", "maybe"): "--bos as yes, no, both or auto",
    ("study", "--bos", "maybe"): "--bos as yes, no, both or auto",
    ("study", "--length", "20"): "--length of at least 32",
    ("study", "--num-sequences", "15"): "--num-sequences of at least 16",
    ("study", "--tokens", "poem"): "text:FILE",
    ("study", "--num-sequences", MANY): "at most --num-sequences",
    ("study", "--out", "taken"): "--overwrite",
    ("intervene", "--mask-to-self", "3", "--length", "8"): "--length of at least 17",
    ("intervene", "--mask-to-self", "3", "--num-sequences", MANY): "at most --num-sequences",
    ("intervene", "--mask-to-self", "3", "--out", "taken"): "--overwrite",
    ("intervene",): "such as --mask-to-self 10",
    ("intervene", "--amplify", "ten:4"): "--amplify as POSITION:FACTOR",
    ("intervene", "--block", "10:0-99999999"): "--block as QUERY:KEYS",
    ("intervene", "--ablate", f"2:{DIGITS}"): "--ablate as LAYER:NEURON",
    ("intervene", "--mask-to-self", "3", "--layers", "0-99999999"): "--layers as numbers",
    ("bias", "--seeds", "1000000000"): "--seeds of at least 1 and at most 1000",
    ("bias", "--seeds", "0"): "Raise --seeds",
    ("bias", "--num-sequences", "3"): "--num-sequences of at least 16",
    ("bias", "--seed", str(2**32 - 1)): "a seed from 0 to",
    ("bias", "--out", "taken"): "--overwrite",
    ("fingerprint", "a"): "at least two",
    ("fingerprint", "a", "b", "--fresh", "1000000000"): "--fresh of at least 0 and at most 1000",
    ("fingerprint", "a", "b", "--method", "guess"): "alignment, seedprint",
    (
        "fingerprint",
        "a",
        "b",
        "--method",
        "seedprint",
        "--unrelated",
        "c",
    ): "no --unrelated models beside --method seedp",
    ("fingerprint", "a", "b", "--num-sequences", "63"): "--num-sequences of at least 64",
    ("fingerprint", "a", "b", "--vocabulary", MANY): "Lower --vocabulary",
    ("fingerprint", "a", "b", "--fresh", "-1"): "Raise --fresh",
    ("fingerprint", "a", "b", "--seed", str(2**32)): "--seed",
    ("fingerprint", "a", "b", "--out", "taken"): "--overwrite",
    ("tokenize", "--data", "nowhere.txt", "--out", "tokens"): "nowhere.txt",
    ("tokenize", "--data", "text.txt", "--out", "tokens", "--vocab-size", DIGITS): "--vocab-size",
    ("tokenize", "--data", "text.txt", "--out", "tokens", "--vocab-size", "100"): "--vocab-size of at least 257",
    ("tokenize", "--data", "text.txt", "--out", "tokens", "--validation-share", "1.5"): "--validation-share 0.01",
    ("tokenize", "--data", "text.txt", "--out", "tokens", "--max-tokens", "0"): "Raise --max-tokens",
    ("pretrain", "--data", "nowhere.txt", "--out", "run"): "nowhere.txt",
    ("pretrain", "--data", "text.txt", "--out", "run", "--steps", "0"): "steps of at least 1",
    ("pretrain", "--data", "text.txt", "--out", "run", "--steps", MANY): "steps",
    ("pretrain", "--data", "text.txt", "--out", "run", "--optimiser", "sgd"): "adamw, muon",
    ("pretrain", "--data", "text.txt", "--out", "run", "--device", "gpu"): "cuda:N",
    ("pretrain", "--data", "text.txt", "--out", "run", "--keep", DIGITS): "--keep 0,100,1000",
    ("pretrain", "--data", "text.txt", "--out", "taken"): "--overwrite",
    ("compare", "nowhere"): "2 to 26 runs",
}
PROCESS = """
import contextlib, io, json, os, sys, traceback
sys.modules["torch"] = None  # importing it fails
from sinkscope.cli import main
results = []
for arguments in json.load(sys.stdin):
    sys.argv = ["sinkscope", *arguments]
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as error:
            code = error.code
        except BaseException:
            traceback.print_exc()
    results.append([code, out.getvalue(), err.getvalue(), sorted(os.listdir())])
json.dump(results, sys.stdout)
"""


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory):
    """What every command line of the table gives in a process that has no torch."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "taken").mkdir()
    (folder / "taken" / "notes.txt").write_text("mine")
    (folder / "text.txt").write_text("some text")
    done = subprocess.run(
        [sys.executable, "-c", PROCESS],
        input=json.dumps(list(WITHOUT_TORCH)),
        capture_output=True,
        text=True,
        cwd=folder,
        check=True,
    )
    return dict(zip(WITHOUT_TORCH, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("arguments", WITHOUT_TORCH, ids=lambda arguments: " ".join(arguments)[:60])
def test_options_that_cannot_work_are_refused_before_torch_is_imported(arguments, without_torch):
    code, out, err, files = without_torch[arguments]
    assert "Traceback" not in err, err
    assert (code, out, files) == (2, "", ["taken", "text.txt"])
    assert WITHOUT_TORCH[arguments] in err


def test_help_has_an_example_and_loads_nothing_heavy(tmp_path):
    """For the whole and for every command; what is loaded is what --help would wait for."""
    pages = [["--help"], *([name, "--help"] for name in cli.command_line().commands)]
    code = f"{PROCESS}\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(pages), capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert all(code == 0 and "Example: sinkscope" in out for code, out, _, _ in json.loads(done.stdout))
    loaded = {name.split(".")[0] for name in json.loads(done.stderr)}
    assert not loaded & {"transformers", "numpy", "pyarrow", "safetensors", "tokenizers", "jaxtyping", "plotly"}
    assert "typer" in loaded, "control: what is loaded is seen"
