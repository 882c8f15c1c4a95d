"""Command lines that cannot be honoured: a message that can be acted on, exit code 2, and nothing written."""

import json
import subprocess
import sys

import pytest
import torch
from command_line import assert_refused
from tiny_models import tiny_model

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
    ("trace", "--length", "1"): "--length must be at least 2, not 1",
    ("trace", "--prompt", "a b", "--length", "32"): "Leave --length or --prompt out",
    ("trace", "--length", DIGITS): "--length",
    ("trace", "--num-sequences", "0"): "--num-sequences must be at least 1, not 0",
    ("trace", "--seed", str(2**32)): "--seed must be from 0 to 4294967295, not 4294967296",
    ("trace", "--seed", "-1"): "--seed",
    ("trace", "--keys", "0-99999999"): "--keys 0,10",
    ("trace", "--keys", f"0-{DIGITS}"): "--keys 0,10",
    ("trace", "--keys", "0-9223372036854775807"): "--keys 0,10",
    ("trace", "--keys", "first"): "--keys 0,10",
    ("trace", "--keys", ""): "--keys 0,10",
    ("trace", "--keys", "0,64"): "--keys must be positions from 0 to 63, not 64",
    ("trace", "--tokens", "poem"): "text:FILE",
    ("trace", "--tokens", "text:nowhere.txt"): "nowhere.txt",
    ("trace", "--tokens", "text:."): "a folder",
    ("trace", "--tokens", "repeat:x"): "--tokens repeat:42",
    ("trace", "--tokens", f"repeat:{DIGITS}"): "--tokens repeat:42",
    ("trace", "--dtype", "int3"): "bfloat16",
    ("trace", "--device", "gpu"): "cuda:N",
    ("trace", "--device", f"cuda:{DIGITS}"): "cuda:N",
    ("trace", "--device-map", "bogus"): "--device-map cannot be 'bogus'. Use auto, balanced",
    ("trace", "--device", "cpu", "--device-map", "auto"): "--device and --device-map cannot be given together",
    ("trace", "--out", "taken"): "remove it yourself",
    ("trace", "--json", "--length", "1"): "--length must be at least 2, not 1",
    ("explore", "--port", "70000"): "--port must be from 0 to 65535, not 70000",
    ("explore", "--prompt", "a b", "--prompt", "c d", "--prompt", "e f"): "one --prompt, or two side by side",
    ("audit", "--length", "63"): "--length must be at least 64, not 63",
    ("audit", "--num-sequences", "1"): "--num-sequences must be at least 2, not 1",
    ("audit", "--text", "nowhere.txt"): "nowhere.txt",
    ("study", "--json", "--bos", "maybe"): "--bos cannot be 'maybe'. Choose one of auto, yes, no, both.",
    ("study", "--bos", "maybe"): "--bos cannot be 'maybe'. Choose one of auto, yes, no, both.",
    ("study", "gpt2", "--bos"): "--bos needs a value (auto, yes, no, both). Give, for example, --bos yes.",
    ("study", "gpt2", "--bos", "--length", "32"): "--bos needs a value (auto, yes, no, both)",
    ("study", "gpt2", "--no-bos"): "A study has no --no-bos: --bos takes a value (auto, yes, no, both). Give --bos no.",
    ("study", "--bos", "gpt2"): "--bos cannot be 'gpt2'. Choose one of auto, yes, no, both.",
    ("study", "--length", "20"): "--length must be at least 32, not 20",
    ("study", "--num-sequences", "15"): "--num-sequences must be at least 16, not 15",
    ("study", "--tokens", "poem"): "text:FILE",
    ("study", "--num-sequences", MANY): "at most --num-sequences",
    ("study", "--out", "taken"): "remove it yourself",
    ("intervene", "--mask-to-self", "3", "--length", "1"): "--length must be at least 2, not 1",
    ("intervene", "--mask-to-self", "3", "--num-sequences", MANY): "at most --num-sequences",
    ("intervene", "--mask-to-self", "3", "--out", "taken"): "remove it yourself",
    ("intervene",): "such as --mask-to-self 10",
    ("intervene", "--amplify", "ten:4"): "--amplify cannot be 'ten:4'. Write POSITION:FACTOR, such as 10:4.",
    ("intervene", "--block", "10:0-99999999"): "--block cannot be '10:0-99999999'. Write QUERY:KEYS",
    ("intervene", "--ablate", f"2:{DIGITS}"): ". Write LAYER:NEURON",
    ("intervene", "--mask-to-self", "3", "--layers", "0-99999999"): "--layers cannot be '0-99999999'. Write numbers",
    ("bias", "--seeds", "1000000000"): "--seeds must be from 1 to 1000, not 1000000000",
    ("bias", "--seeds", "0"): "--seeds must be from 1 to 1000, not 0",
    ("bias", "--num-sequences", "3"): "--num-sequences must be at least 16, not 3",
    ("bias", "--seed", str(2**32 - 1)): "--seed must be from 0 to",
    ("bias", "--out", "taken"): "remove it yourself",
    ("bias", "--controls", "NONSENSE"): "--controls cannot be 'NONSENSE'. Choose one of tanh_activation",
    ("bias", "--controls", "no_attention,"): "--controls cannot be ''. Choose one of tanh_activation",
    ("fingerprint", "a"): "at least two",
    ("fingerprint", "a", "b", "--fresh", "1000000000"): "--fresh must be from 0 to 1000, not 1000000000",
    ("fingerprint", "a", "b", "--method", "guess"): "alignment, seedprint",
    (
        "fingerprint",
        "a",
        "b",
        "--method",
        "seedprint",
        "--unrelated",
        "c",
    ): "--method seedprint takes no --unrelated models",
    ("fingerprint", "a", "b", "--num-sequences", "63"): "--num-sequences must be at least 64, not 63",
    ("fingerprint", "a", "b", "--vocabulary", MANY): "--vocabulary must be from 2 to 2147483648, not 100000000000",
    ("fingerprint", "a", "b", "--fresh", "-1"): "--fresh must be from 0 to 1000, not -1",
    ("fingerprint", "a", "b", "--seed", str(2**32)): "--seed",
    ("fingerprint", "a", "b", "--out", "taken"): "remove it yourself",
    ("remedy",): "at least one remedy: --rotate, --prefix, --unplug, --exempt, --scales",
    ("remedy", "--prefix", "--text", "nowhere.txt"): "nowhere.txt",
    ("remedy", "--prefix", "--length", "8"): "--length must be at least 64, not 8",
    ("remedy", "--rotate", "--out", "taken"): "remove it yourself",
    ("tokenize", "--data", "nowhere.txt", "--out", "tokens"): "nowhere.txt",
    ("tokenize", "--data", "text.txt", "--out", "tokens", "--vocab-size", DIGITS): "--vocab-size",
    ("tokenize", "--data", "text.txt", "--out", "tokens", "--vocab-size", "100"): "--vocab-size must be from 257 to",
    ("tokenize", "--data", "text.txt", "--out", "tokens", "--validation-share", "1.5"): "--validation-share 0.01",
    ("tokenize", "--data", "text.txt", "--out", "tokens", "--max-tokens", "0"): "--max-tokens must be at least 1",
    ("pretrain", "--data", "nowhere.txt", "--out", "run"): "nowhere.txt",
    ("pretrain", "--data", "text.txt", "--out", "run", "--steps", "0"): "--steps must be at least 1, not 0",
    ("pretrain", "--data", "text.txt", "--out", "run", "--steps", MANY): "steps",
    ("pretrain", "--data", "text.txt", "--out", "run", "--optimiser", "sgd"): "--optimiser must be 'adamw' or 'muon'",
    ("pretrain", "--data", "text.txt", "--out", "run", "--device", "gpu"): "cuda:N",
    ("pretrain", "--data", "text.txt", "--out", "run", "--keep", DIGITS): "--keep 0,100,1000",
    ("pretrain", "--data", "text.txt", "--out", "taken"): "remove it yourself",
    ("pretrain", "--data", "text.txt", "--out", "run", "--variant", "softmaxx"): "'softmaxx'. Choose one of softmax",
    ("pretrain", "--data", "text.txt", "--out", "run", "--parallel", "many"): "'many'. Choose one of auto, single",
    ("pretrain", "--data", "text.txt", "--out", "run", "--parallel", "ddp"): "Start with torchrun",
    ("pretrain", "--data", "text.txt", "--out", "run", "--track", "paper"): "--track cannot be 'paper'",
    ("pretrain", "--data", "text.txt", "--out", "run", "--config", "huge"): "Choose one of tiny, 30m, 152m, 1b",
    ("pretrain", "--data", "text.txt", "--out", "run", "--config", "nowhere.yaml"): "nowhere.yaml",
    ("pretrain", "--data", "text.txt", "--out", "run", "--config", "odd.yaml"): "The training configuration has no key",
    ("compare", "nowhere"): "needs two runs or more, not 1",
    ("compare", "taken", "./taken"): "./taken was given twice",
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
    (folder / "odd.yaml").write_text("training: {stepps: 3}")
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
    assert (code, out, files) == (2, "", ["odd.yaml", "taken", "text.txt"])
    assert WITHOUT_TORCH[arguments] in err


AFTER_LOADING = {
    ("trace", "MODEL", "--length", "5000"): "--length 5000 exceeds the model's context of 256 tokens",
    ("trace", "MODEL", "--tokens", "repeat:97"): "Token ids must be from 0 to 96, not 97",
    ("trace", "MODEL", "--tokens", "text:text.txt"): "model has no tokenizer",
    ("trace", "ZEROS"): "only special ones, unused ones",
    ("trace", "LOUD", "--dtype", "float16"): "--dtype float32",
    ("study", "MODEL", "--length", "5000"): "--length 5000 exceeds the model's context of 256 tokens",
    ("study", "LOUD", "--dtype", "float16"): "--dtype float32",
    ("intervene", "MODEL", "--mask-to-self", "3", "--layers", "9"): "layer",
    ("intervene", "MODEL", "--ablate", "0:9999"): "neuron",
    ("bias", "MODEL", "--length", "5000"): "--length 5000 exceeds the model's context of 256 tokens",
    ("bias", "ZEROS"): "only special ones, unused ones",
    ("bias", "MODEL", "--seeds", "2"): "Leave --seeds out",
    ("audit", "LOUD", "--dtype", "float16"): "--dtype float32",
    ("remedy", "SHORT", "--prefix", "--length", "128"): "Give --length 96",
    ("remedy", "LOUD", "--exempt", "--dtype", "float16"): "--dtype float32",
    ("fingerprint", "MODEL", "LOUD", "--vocabulary", "98", "--fresh", "0"): "98",
    ("models", "text.txt"): "text.txt is neither a model folder nor a .gguf file",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of models by the names that the table gives them."""
    made = {name: tiny_model("llama") for name in ("MODEL", "ZEROS", "LOUD")}
    made["SHORT"] = tiny_model("llama", max_position_embeddings=128)
    with torch.no_grad():
        for weight in made["ZEROS"].parameters():
            weight.zero_()
        made["LOUD"].model.layers[1].mlp.down_proj.weight.mul_(3e4)
    for name, model in made.items():
        model.save_pretrained(tmp_path_factory.getbasetemp() / name / "model")
    return {name: str(tmp_path_factory.getbasetemp() / name / "model") for name in made}


@pytest.mark.parametrize("arguments", AFTER_LOADING, ids=" ".join)
def test_a_refusal_after_the_model_is_loaded_prints_no_json_and_writes_nothing(arguments, models, sinkscope, tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    result = sinkscope(*(models.get(argument, argument) for argument in arguments), "--json")
    assert_refused(result, AFTER_LOADING[arguments], tmp_path)
    assert {path.name for path in tmp_path.rglob("*")} <= {"text.txt", "runs"}


def test_help_has_an_example_and_loads_nothing_heavy(tmp_path):
    """For the whole and for every command; what is loaded is what --help would wait for."""
    pages = [["--help"], *([name, "--help"] for name in cli.command_line().commands)]
    code = f"{PROCESS}\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(pages), capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert all(code == 0 and "Example: sinkscope" in out for code, out, _, _ in json.loads(done.stdout))
    loaded = {name.split(".")[0] for name in json.loads(done.stderr)}
    assert not loaded & {
        "transformers",
        "numpy",
        "pyarrow",
        "safetensors",
        "tokenizers",
        "jaxtyping",
        "plotly",
        "starlette",
        "jinja2",
    }
    assert "typer" in loaded, "control: what is loaded is seen"


def test_the_first_help_does_not_wait_for_pydantic(tmp_path):
    """Control: the help of a command does, since typer does."""
    code = """
import sys
from sinkscope.cli import command_line
command_line().main(sys.argv[1:], standalone_mode=False)
sys.exit("pydantic" in sys.modules)
"""
    for asked, is_loaded in ((["--help"], 0), (["trace", "--help"], 1)):
        assert subprocess.run([sys.executable, "-c", code, *asked], cwd=tmp_path).returncode == is_loaded


@pytest.mark.parametrize("command", [("--help",), ("models", "--json")])
def test_a_full_disk_behind_standard_output_is_told(command):
    with open("/dev/full", "w", encoding="utf-8") as full:
        result = subprocess.run(
            [sys.executable, "-m", "sinkscope", *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (result.returncode, "Cannot write the output: No space left" in result.stderr) == (2, True)
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr
