"""The real commands tokenize and pretrain: what they write, that training learns, and how they refuse."""

import json
import os
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from command_line import assert_refused
from tiny_models import tiny_model
from transformers import Trainer, TrainerCallback, TrainingArguments

import sinkscope as package
from sinkscope.attention.variants import VARIANTS
from sinkscope.pretrain.metrics import read_rows
from sinkscope.pretrain.probes import QUANTITIES
from sinkscope.pretrain.tokens import open_shards
from sinkscope.results.tables import read_table

SHORT = ("--steps", 12, "--warmup-steps", 2, "--batch-size", 8, "--sequence-length", 64, "--learning-rate", 1e-2)
SHORT += ("--evaluate-every", 6, "--probe-every", 12, "--checkpoint-every", 12)
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Sentences of a small grammar: enough order for a tiny model to learn in a few steps."""
    generator = np.random.default_rng(0)
    words = [["the", "a", "every"], ["token", "head", "layer"], ["attends", "writes", "reads"], ["again", "first", "."]]
    texts = ["\n".join(" ".join(generator.choice(kind) for kind in words * 3) for _ in range(30)) for _ in range(60)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n<|endoftext|>\n".join(texts))
    return path


@pytest.fixture(scope="session")
def tokens(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("shards") / "tokens"
    command = [sys.executable, "-m", "sinkscope", "tokenize", "--data", str(text), "--out", str(out)]
    result = subprocess.run([*command, "--vocab-size", "300"], capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr
    shards = open_shards(out)
    assert f"{shards.num_tokens('train'):,} train tokens" in result.stdout
    return out


def test_tiny_trains_on_plain_text_and_its_model_is_loaded_without_the_package(sinkscope, text, tmp_path):
    """The whole of the tiny preset, 200 steps."""
    result = sinkscope("pretrain", "--config", "tiny", "--data", text, "--out", "run", "--keep", "0,100")
    assert result.code == 0, result.err
    run = tmp_path / "run"
    metrics = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, 201))
    first, last = (np.mean([row["loss"] for row in part]) for part in (metrics[:5], metrics[-5:]))
    assert last < first - 2
    assert metrics[-1]["validation_loss"] < metrics[49]["validation_loss"]
    probes = read_rows(run / "probes.jsonl")
    assert [(row["step"], row["batch"]) for row in probes] == [
        (step, batch) for step in (0, 100, 200) for batch in ("random", "text")
    ]
    layers = probes[-1]["layers"]
    assert set(layers) == set(QUANTITIES)
    assert {len(values) for values in layers.values()} == {4}
    for name in ("config.yaml", "environment.json", "metrics.parquet", "probes.parquet", "tokens/manifest.json"):
        assert (run / name).stat().st_size > 0
    # Another process, which never imports the package, loads the model and gets the held-out loss's neighbourhood.
    program = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model, tokenizer = (A.from_pretrained(sys.argv[1]) for A in (AutoModelForCausalLM, AutoTokenizer))\n"
        "ids = tokenizer('the token attends again a head writes first every layer reads', return_tensors='pt')\n"
        "print(type(model).__name__, float(model(**ids, labels=ids['input_ids']).loss))\n"
        "assert 'sinkscope' not in sys.modules\n"
    )
    command = [sys.executable, "-c", program, str(run / "model")]
    loaded = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert loaded.returncode == 0, loaded.stderr
    name, loss = loaded.stdout.split()
    assert name == "LlamaForCausalLM"
    assert float(loss) < first - 1
    assert [path.name for path in sorted((run / "snapshots").iterdir())] == ["step-00000000", "step-00000100"]
    traced = sinkscope("trace", "run/snapshots/step-00000100", "--num-sequences", 4, "--json", "--out", "trace")
    assert traced.code == 0, traced.err


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_learns_is_probed_and_loads_again(sinkscope, tokens, tmp_path, variant):
    result = sinkscope("pretrain", "--data", tokens, "--out", "run", "--variant", variant, *SHORT)
    assert result.code == 0, result.err
    metrics = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.5
    probes = read_rows(tmp_path / "run" / "probes.jsonl")
    assert [row["step"] for row in probes] == [0, 0, 12, 12]
    for row in probes:
        expected = set(QUANTITIES) - ({"effective_rank"} if row["batch"] == "random" else set())
        assert set(row["layers"]) == expected
    loaded = package.load(tmp_path / "run")
    assert loaded.tokenizer is not None
    ids = torch.tensor([loaded.tokenizer("the token attends again")["input_ids"]])
    assert loaded.model(ids).logits.shape == (1, ids.shape[1], open_shards(tokens).vocab_size)


def test_a_run_can_be_replaced(sinkscope, tokens):
    assert sinkscope("pretrain", "--data", tokens, "--out", "run", *SHORT, "--steps", 2).code == 0
    refused = sinkscope("pretrain", "--data", tokens, "--out", "run", *SHORT, "--steps", 3)
    assert refused.code == 2
    assert "training.steps 2 there, 3 now" in refused.err
    assert sinkscope("report", "run").code == 0  # its page is the run's own, and goes with it
    assert sinkscope("pretrain", "--data", tokens, "--out", "run", *SHORT, "--steps", 3, "--overwrite").code == 0


def test_runs_are_compared(sinkscope, tokens, tmp_path):
    for variant, seed in (("softmax", 0), ("softmax", 1), ("head_norm", 0), ("head_norm", 1)):
        options = ("--variant", variant, "--seed", seed, "--out", f"{variant}-{seed}", "--evaluate-every", 2)
        result = sinkscope("pretrain", "--data", tokens, *SHORT, "--probe-every", 6, *options)
        assert result.code == 0, result.err
    runs = ("softmax-0", "softmax-1", "head_norm-0", "head_norm-1")
    result = sinkscope("compare", *runs, "--out", "page.html")
    assert result.code == 0, result.err
    assert "softmax's final validation loss" in result.out
    table = read_table(tmp_path / "page-tables" / "training_runs")
    assert table["variant"] == ["softmax"] * 2 + ["head_norm"] * 2
    for name, loss in zip(runs, table["validation_loss"], strict=True):
        assert loss == json.loads((tmp_path / name / "summary.json").read_text())["validation_loss"]
    births = read_table(tmp_path / "page-tables" / "births")
    assert len(births["link"]) == 4 * 2 * 7  # runs, batches, links
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(name in page for name in (*runs, "When each link appears", "Effective rank"))
    # Another batch, and a run that was stopped, are refused.
    assert sinkscope("pretrain", "--data", tokens, *SHORT, "--batch-size", 4, "--out", "smaller").code == 0
    refused = sinkscope("compare", "softmax-0", "smaller", "--out", "other.html")
    assert refused.code == 2
    assert "batch_size is 4 in smaller" in refused.err
    (tmp_path / "smaller" / "summary.json").unlink()
    refused = sinkscope("compare", "softmax-0", "smaller", "--out", "other.html")
    assert refused.code == 2
    assert "not complete" in refused.err
    assert not (tmp_path / "other.html").exists()
    assert not (tmp_path / "other-tables").exists()


BAD = {
    "empty text": (["--data", "empty.txt"], "empty"),
    "binary text": (["--data", "binary.txt"], "a zero byte"),
    "no such file": (["--data", "nowhere.txt"], "no file or folder 'nowhere.txt'"),
    "vocabulary": (["--data", "TOKENS", "--config", "vocabulary.yaml"], "and the data have 300 tokens"),
    "long sequence": (["--data", "TOKENS", "--sequence-length", "1000000"], "a train shard of at least 1000001"),
    "heads": (["--data", "TOKENS", "--config", "heads.yaml"], "3 heads do not divide hidden_size 64"),
    "variant": (["--data", "TOKENS", "--variant", "softmaxx"], "--variant cannot be 'softmaxx'. Choose one of softmax"),
    "config": (["--data", "TOKENS", "--config", "13b"], "no preset '13b'. Choose one of tiny"),
    "model key": (["--data", "TOKENS", "--config", "model_key.yaml"], "num_layers"),
    "training key": (["--data", "TOKENS", "--config", "training_key.yaml"], "Write learning_rate"),
    "top key": (["--data", "TOKENS", "--config", "top_key.yaml"], "the keys preset, model and training, not trainig"),
    "type": (["--data", "TOKENS", "--config", "type.yaml"], "tie_word_embeddings must be true or false, not 1"),
    "option": (["--data", "TOKENS", "--config", "option.yaml"], "Its options are per_head (bool)"),
    "bomb": (["--data", "TOKENS", "--config", "bomb.yaml"], "an alias or a tag"),
    "date": (["--data", "TOKENS", "--config", "date.yaml"], "--steps must be a whole number, not '2026-99-99'"),
    "wide": (["--data", "TOKENS", "--config", "wide.yaml"], "hidden_size must be a whole number from 1 to 16777216"),
    "many steps": (["--data", "TOKENS", "--steps", "1" + "0" * 30], "--steps must be at most 2147483648, not 1000"),
    "yaml": (["--data", "TOKENS", "--config", "broken.yaml"], "Cannot use broken.yaml"),
    "no yaml": (["--data", "TOKENS", "--config", "nowhere.yaml"], "nowhere.yaml"),
    "no number": (["--data", "TOKENS", "--learning-rate", "nan"], "--learning-rate must be a finite number, not nan"),
    "infinity": (["--data", "TOKENS", "--config", "infinity.yaml"], "infinity.yaml: it holds inf, not a number"),
    "beta": (["--data", "TOKENS", "--config", "beta.yaml"], "--beta2 must be below 1, not 1.0"),
    "seed": (["--data", "TOKENS", "--config", "seed.yaml"], "seed must be a whole number"),
    "large seed": (["--data", "TOKENS", "--seed", str(2**63)], "--seed must be below 9223372036854775808"),
    "torchrun": (["--data", "TOKENS", "--parallel", "ddp"], "torchrun"),
    "mode": (["--data", "TOKENS", "--parallel", "tensor"], "auto, single, ddp, fsdp"),
    "keep": (["--data", "TOKENS", "--keep", "0,ten"], "--keep 0,100,1000"),
    "tracker": (["--data", "TOKENS", "--track", "paper"], "trackio, wandb, tensorboard"),
    "device": (["--data", "TOKENS", "--device", "abacus"], "--device cannot be 'abacus'. Use auto, cpu"),
    "datasets": (["--data", "hf:some/name"], "pip install"),
    "shards and text": (
        ["--data", "TOKENS", "--data", "empty.txt"],
        "mixed with other sources. Give it alone as --data",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_and_nothing_is_written(sinkscope, tokens, tmp_path, monkeypatch, case):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"text\0" * 100)
    (tmp_path / "vocabulary.yaml").write_text("model: {vocab_size: 299}")
    (tmp_path / "heads.yaml").write_text("model: {num_attention_heads: 3}")
    (tmp_path / "model_key.yaml").write_text("model: {num_layers: 3}")
    (tmp_path / "training_key.yaml").write_text("training: {lerning_rate: 3}")
    (tmp_path / "top_key.yaml").write_text("trainig: {steps: 3}")
    (tmp_path / "type.yaml").write_text("model: {tie_word_embeddings: 1}")
    (tmp_path / "infinity.yaml").write_text("training: {clip: .inf}")
    (tmp_path / "seed.yaml").write_text("model: {seed: abc}")
    (tmp_path / "beta.yaml").write_text("training: {beta2: 1}")
    (tmp_path / "broken.yaml").write_text("model: {")
    (tmp_path / "option.yaml").write_text("model: {attention_variant: head_norm, variant_options: {per_haed: true}}")
    (tmp_path / "wide.yaml").write_text("model: {hidden_size: 1000000000000}")
    (tmp_path / "date.yaml").write_text("training: {steps: 2026-99-99}")
    bomb = ["    - &a0 [1]", *(f"    - &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30))]
    (tmp_path / "bomb.yaml").write_text("\n".join(["training:", "  steps:", *bomb]))
    arguments, message = BAD[case]
    result = sinkscope("pretrain", "--out", "run", *(str(tokens) if a == "TOKENS" else a for a in arguments))
    assert result.code == 2, result.err
    assert message in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "run").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_tokenize_refuses_a_tokenizer_that_is_not_there(sinkscope, text, tmp_path):
    result = sinkscope("tokenize", "--data", text, "--out", "tokens", "--tokenizer", "./nowhere")
    assert result.code == 2, result.err
    assert "no folder './nowhere', and it is not a Hugging Face name. Give another as --tokenizer" in result.err
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK, MASTER_ADDR, MASTER_PORT must be in the environment"),
        (TORCHRUN | {"RANK": "first"}, "RANK in the environment must be a number, not 'first'"),
        (TORCHRUN | {"RANK": "5"}, "below WORLD_SIZE, 2, not 5"),
        (TORCHRUN | {"MASTER_PORT": "none"}, "at 127.0.0.1:none"),
    ],
)
def test_processes_that_torchrun_did_not_start_are_refused(
    sinkscope, tokens, tmp_path, monkeypatch, environment, message
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for command in (("pretrain", "--data", tokens, "--out", "run"), ("trace", "--out", "run")):
        assert_refused(sinkscope(*command), message, tmp_path)


def test_a_tracker_gets_the_numbers(sinkscope, tokens, tmp_path, monkeypatch):
    seen = {}
    fake = types.SimpleNamespace(
        init=lambda **options: seen.update(options=options),
        log=lambda numbers, step: seen.setdefault(step, {}).update(numbers),
        finish=lambda: seen.update(finished=True),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert sinkscope("pretrain", "--data", tokens, "--out", "run", *SHORT, "--track", "wandb").code == 0
    assert seen["finished"]
    assert seen["options"]["name"] == "run"
    assert {"loss", "tokens_per_second", "validation_loss", "text/sink_rate", "text/largest_logit"} <= set(seen[12])
    first = seen["options"]
    (tmp_path / "run" / "summary.json").unlink()  # as if it had been stopped at its end
    assert sinkscope("pretrain", "--data", tokens, "--out", "run", *SHORT, "--track", "wandb").code == 0
    assert (seen["options"]["id"], seen["options"]["resume"]) == (first["id"], "allow")
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused = sinkscope("pretrain", "--data", tokens, "--out", "other", *SHORT, "--track", "wandb")
    assert refused.code == 2
    assert "pip install wandb" in refused.err


def test_sink_probe_in_the_hugging_face_trainer(tmp_path):
    model = tiny_model("llama")
    ids = torch.randint(3, 90, (16, 32), generator=torch.Generator().manual_seed(0))
    dataset = [{"input_ids": row, "labels": row} for row in ids]

    class Recorder(TrainerCallback):
        """What a tracker would be given: it comes before the probe, as those of report_to do."""

        def __init__(self):
            self.logged = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.logged.append({"step": state.global_step, **logs})

    def train(model, every):
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"), max_steps=4, per_device_train_batch_size=4, report_to=[], use_cpu=True,
            save_strategy="no", logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        recorder = Recorder()
        trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[recorder])
        if every:
            trainer.add_callback(probe := package.SinkProbe(trainer.log, every=every, num_sequences=4))
        trainer.train()
        assert trainer.state.log_history == recorder.logged
        losses = [(entry["step"], entry["loss"]) for entry in recorder.logged if "loss" in entry]
        return losses, recorder.logged, probe if every else None

    plain, logged, _ = train(tiny_model("llama"), 0)
    assert not any(name.startswith("sinkscope/") for entry in logged for name in entry), "control"
    losses, logged, probe = train(model, 2)
    assert losses == plain, "probing changes nothing, and hides no loss"
    assert [row["step"] for row in probe.rows] == [0, 2, 4]
    assert [row["tokens"] for row in probe.rows] == [0, 2 * 4 * 32, 4 * 4 * 32]
    assert read_rows(tmp_path / "out" / "probes.jsonl") == probe.rows
    probed = [entry for entry in logged if "sinkscope/sink_rate" in entry]
    assert [(entry["step"], entry["num_input_tokens_seen"]) for entry in probed] == [(0, 0), (2, 256), (4, 512)]
    positions = [row["whole"]["sink_position"] for row in probe.rows]
    assert [entry["sinkscope/sink_position"] for entry in probed] == positions
    assert set(probe.rows[0]["layers"]) == set(QUANTITIES)
    assert probe.rows[0]["layers"] != probe.rows[2]["layers"]
    with pytest.raises(package.InputError, match="at least 1 step"):
        package.SinkProbe(print, every=0)
    assert os.listdir(tmp_path / "out") == ["probes.jsonl"]
