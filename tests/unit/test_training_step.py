"""The parts of an update against plain definitions: the loss and its gradients, schedules, optimisers, counting."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import short_run

from sinkscope.errors import InputError
from sinkscope.pretrain import step as loss_module
from sinkscope.pretrain import train as train_module
from sinkscope.pretrain.config import TrainingConfig
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.optimisers import CapturableMuon, build_optimisers, learning_rate, set_learning_rate
from sinkscope.pretrain.parallel import Processes
from sinkscope.pretrain.presets import TRAINING_PRESETS, changed, decoder_config, preset, resolve
from sinkscope.pretrain.runs import num_machines
from sinkscope.pretrain.step import TrainingStep, flops_per_token, vocabulary_loss
from sinkscope.pretrain.train import _note_changed_set_up, train
from sinkscope.results.run_folder import RunFolder

TINY = TRAINING_PRESETS["tiny"]
ALONE = Processes(mode="single", rank=0, num_processes=1, device=torch.device("cpu"))


def problem(dtype, num_tokens=37, width=16, vocab_size=101):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size, width, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab_size, (num_tokens,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def plain(hidden, weight, targets):
    """(loss, gradients) in float64, by the definition."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    loss = functional.cross_entropy(hidden @ weight.T, targets)
    return loss, *torch.autograd.grad(3 * loss, (hidden, weight))


def relative_error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


# float64 to rounding; float32 sums some hundred products; bfloat16 keeps 8 bits of each logit and gradient.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("chunk", [1, 10, 37, 1000])
def test_the_loss_and_its_gradients(monkeypatch, dtype, tolerance, chunk):
    monkeypatch.setattr(loss_module, "CHUNK_TOKENS", chunk)
    hidden, weight, targets = problem(dtype)
    expected = plain(hidden, weight, targets)
    loss = vocabulary_loss(hidden, weight, targets)
    found = loss, *torch.autograd.grad(3 * loss, (hidden, weight))
    assert [x.dtype for x in found[1:]] == [dtype, dtype]
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < tolerance


def test_control_other_targets_are_another_loss():
    hidden, weight, targets = problem(torch.float32)
    assert relative_error(vocabulary_loss(hidden, weight, targets.roll(1)), plain(hidden, weight, targets)[0]) > 1e-2


@pytest.mark.parametrize("whole", [False, True])
def test_logits_of_all_tokens_are_never_held(monkeypatch, whole):
    """With whole=True, the control, the plain definition is watched instead, and is seen."""
    monkeypatch.setattr(loss_module, "CHUNK_TOKENS", 10)
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            largest.extend(x.numel() for x in [result] if isinstance(x, torch.Tensor))
            return result

    hidden, weight, targets = problem(torch.float32, num_tokens=80)
    with Watch():
        if whole:
            functional.cross_entropy(hidden @ weight.T, targets).backward()
        else:
            vocabulary_loss(hidden, weight, targets).backward()
    padded = 128
    assert (max(largest) <= 10 * padded + weight.numel()) is not whole


class Fixed:
    """A stream whose batches are given."""

    def __init__(self, vocab_size, batch_size, length):
        self.num_windows = batch_size
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(vocab_size, (batch_size, length + 1), generator=generator)

    def batch(self, step, rows=slice(None)):
        return self.tokens[rows, :-1], self.tokens[rows, 1:]

    def evenly_spaced(self, count, rows=slice(None)):
        return self.batch(0, rows)


def tiny_step(**changes):
    config = changed(TINY, {"batch_size": 8, "sequence_length": 32, "evaluation_sequences": 8, **changes})
    return TrainingStep(Decoder(decoder_config(preset("tiny"))), config, ALONE, compile=False)


def test_accumulation_is_the_whole_batch():
    stream = Fixed(512, 8, 32)
    whole, parts = tiny_step(), tiny_step(micro_batch_size=2)
    assert len(parts.rows) == 4
    for step in range(3):
        for ours, theirs in zip(parts.update(step, stream), whole.update(step, stream), strict=True):
            assert float(ours) == pytest.approx(float(theirs), rel=1e-5)


def test_the_held_out_loss_is_the_models_own():
    stream, step = Fixed(512, 8, 32), tiny_step(micro_batch_size=4)
    tokens, targets = stream.batch(0)
    with torch.no_grad():
        logits = step.model(tokens).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert step.evaluate(stream) == pytest.approx(float(expected), rel=1e-5)


def test_skipped_targets_are_out_of_the_loss_and_its_gradients():
    stream, step = Fixed(512, 8, 32), tiny_step(skipped_targets=3)
    tokens, targets = stream.batch(0)
    logits = step.model(tokens).logits
    expected = functional.cross_entropy(logits[:, 3:].flatten(0, 1), targets[:, 3:].flatten())
    assert step.evaluate(stream) == pytest.approx(float(expected.detach()), rel=1e-5)
    wanted = torch.autograd.grad(expected, list(step.parameters.values()))
    step.loss(tokens, targets).backward()
    for parameter, gradient in zip(step.parameters.values(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    # Control: with all of them the loss is another.
    assert tiny_step().evaluate(stream) != pytest.approx(float(expected.detach()), rel=1e-5)


def test_the_gradient_is_clipped_and_its_norm_reported():
    stream, step = Fixed(512, 8, 32), tiny_step(clip=1e-3)
    seen = []
    step.optimisers[0].step = lambda: seen.append([p.grad.norm() for p in step.parameters.values()])
    _, norm = step.update(0, stream)
    assert float(norm) > 1e-2
    assert float(torch.stack(seen[0]).norm()) == pytest.approx(1e-3, rel=1e-3)


def test_a_deterministic_update_asks_torch_for_one_order_and_puts_back_what_was():
    stream, step, plain = Fixed(512, 8, 32), tiny_step(deterministic=True), tiny_step()
    seen = []
    for trained in (step, plain):
        trained.optimisers[0].register_step_pre_hook(
            lambda *_: seen.append(torch.are_deterministic_algorithms_enabled())
        )
    assert float(step.update(0, stream)[0]) == float(plain.update(0, stream)[0])
    assert seen == [True, False]
    step.optimisers[0].register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step.update(1, stream)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_schedules_by_hand():
    base = {**asdict(TINY), "steps": 100, "warmup_steps": 10, "learning_rate": 1.0, "final_learning_rate_share": 0.1}
    cosine = TrainingConfig(**base)
    assert [learning_rate(step, cosine) for step in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert learning_rate(55, cosine) == pytest.approx(0.55)
    assert learning_rate(100, cosine) == pytest.approx(0.1)
    constant = TrainingConfig(**base | {"schedule": "constant", "decay_share": 0.2})
    assert [learning_rate(step, constant) for step in (5, 50, 80, 90, 100)] == pytest.approx([0.6, 1, 1, 0.55, 0.1])


def test_weight_decay_acts_on_matrices_and_muon_on_those_of_the_blocks():
    norm = {"attention_variant": "head_norm", "variant_options": {"per_head": True, "offset": True}}
    model = Decoder(decoder_config(preset("tiny") | norm))
    names = {parameter: name for name, parameter in model.named_parameters()}
    (adamw,) = build_optimisers(model, model.blocks, TINY)
    decayed, plain_group = ([names[p] for p in group["params"]] for group in adamw.param_groups)
    assert [group["weight_decay"] for group in adamw.param_groups] == [TINY.weight_decay, 0.0]
    assert all("norm" in name for name in plain_group)
    assert not any("norm" in name for name in decayed)
    adamw, muon = build_optimisers(model, model.blocks, changed(TINY, {"optimiser": "muon"}))
    by_muon = [names[p] for group in muon.param_groups for p in group["params"]]
    by_adamw = [names[p] for group in adamw.param_groups for p in group["params"]]
    assert sorted(by_muon + by_adamw) == sorted(names.values())
    assert len(by_muon) == 7 * len(model.blocks)
    assert "model.embed_tokens.weight" in by_adamw


def test_muon_learns():
    stream, step = Fixed(512, 8, 32), tiny_step(optimiser="muon", warmup_steps=0)
    losses = [float(step.update(number, stream)[0]) for number in range(10)]
    assert losses[-1] < losses[0] - 0.5


def test_a_muon_that_a_graph_can_record_takes_the_steps_of_torchs():
    shapes = [(32, 48), (48, 32), (32, 48), (24, 24), (48, 32)]
    theirs = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    ours, at_one_rate = ([torch.nn.Parameter(weight.detach().clone()) for weight in theirs] for _ in range(2))
    decay = {"weight_decay": 0.5, "adjust_lr_fn": "match_rms_adamw"}
    plain = torch.optim.Muon(theirs, lr=0.1, **decay)
    capturable = CapturableMuon(ours, lr=torch.tensor(0.1), **decay)  # type: ignore[arg-type]
    control = torch.optim.Muon(at_one_rate, lr=0.1, **decay)
    for rate in (0.1, 0.03, 0.2):
        gradients = [torch.randn(shape) for shape in shapes]
        set_learning_rate([plain, capturable], rate)
        for optimiser, weights in ((plain, theirs), (capturable, ours), (control, at_one_rate)):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient.clone()
            optimiser.step()
    for weight, expected, wrong in zip(ours, theirs, at_one_rate, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)
        assert (wrong - expected).abs().max() > 0.01
    assert isinstance(capturable.param_groups[0]["lr"], torch.Tensor)


def test_flops_by_hand():
    with torch.device("meta"):
        model = Decoder(decoder_config(preset("152m")))
        untied = Decoder(decoder_config(preset("152m") | {"tie_word_embeddings": False}))
    blocks = 12 * (4 * 768**2 + 3 * 768 * 3072 + 2 * 768) + 768
    expected = 6 * (blocks + 50257 * 768) + 6 * 12 * 1024 * 768
    assert flops_per_token(model, 1024) == flops_per_token(untied, 1024) == expected


def test_processes_share_each_batch():
    config = changed(TINY, {"batch_size": 12, "micro_batch_size": 2})
    rows = [range(12)[part] for rank in range(3) for part in config.rows(rank, 3)]
    assert [list(part) for part in rows] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    with pytest.raises(InputError, match="`batch_size` must be divisible by the 5 processes"):
        config.rows(0, 5)
    with pytest.raises(InputError, match="`micro_batch_size` must be a divisor of the 3 sequences"):
        config.rows(0, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "`steps` must be at least 1, not 0"),
        ({"learning_rate": 0.0}, "`learning_rate` must be above 0, not 0"),
        ({"optimiser": "sgd"}, "`optimiser` must be 'adamw' or 'muon', not 'sgd'"),
        ({"schedule": "linear"}, "`schedule` must be 'cosine' or 'constant', not 'linear'"),
        ({"steps": "many"}, "`steps` must be a whole number, not 'many'"),
        ({"lerning_rate": 1.0}, "Write learning_rate"),
        ({"snapshots": [0, 300]}, "steps from 0 to 200"),
        ({"micro_batch_size": True}, "`micro_batch_size` must be a whole number, not True"),
        ({"sequence_length": 16}, "A probe needs more than 16 tokens in a sequence, not 16"),
        ({"learning_rate": "fast"}, "`learning_rate` must be a number, not 'fast'"),
        ({"learning_rate": True}, "`learning_rate` must be a number, not True"),
        ({"learning_rate": 1e101}, r"`learning_rate` must be at most 1e\+100, not 1e\+101"),
        ({"clip": float("inf")}, "`clip` must be a finite number, not inf"),
        ({"beta1": 1}, "`beta1` must be below 1, not 1.0"),
        ({"snapshots": [0, True]}, r"`snapshots\[1\]` must be a whole number, not True"),
        ({"steps": torch.tensor(3)}, r"`steps` must be a whole number, not 'tensor\(3\)'"),
        ({"skipped_targets": -1}, "`skipped_targets` must be at least 0, not -1"),
        ({"skipped_targets": 128}, "`skipped_targets` must be below `sequence_length=128`, not 128"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        changed(TINY, changes)


def test_a_yaml_file_changes_a_preset(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "preset: tiny\n"
        "model: {num_hidden_layers: 3, variant_options: {initial_lambda: 0.5}}\n"
        "training: {steps: 7, learning_rate: 1, weight_decay: 1e-3, micro_batch_size: null, snapshots: [3, 1]}\n"
    )
    config = resolve(str(path), variant="head_norm", data=["x"], training={"seed": 5})
    assert config.model["num_hidden_layers"] == 3
    assert config.model["attention_variant"] == "head_norm"
    assert (config.model["seed"], config.training.seed) == (5, 5)
    assert (config.training.steps, config.training.learning_rate, config.training.snapshots) == (7, 1.0, (1, 3))
    assert config.training.weight_decay == 1e-3, "which YAML reads as text"
    assert config.training.batch_size == TINY.batch_size


def test_the_configuration_of_a_run_is_its_recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("preset: 30m\nmodel: {num_hidden_layers: 3}\ntraining: {steps: 9, snapshots: [1]}\n")
    first = resolve(str(path), variant="gate", data=["x"], training={"learning_rate": 0.5})
    written = tmp_path / "config.yaml"
    written.write_text(yaml.safe_dump(first.plain()))
    assert resolve(str(written), data=["x"], training={}) == first
    other = resolve(str(written), variant="softmax", data=["y"], training={"seed": 5, "steps": 8})
    assert other.data == ["y"]
    assert (other.model["seed"], other.training.seed) == (5, 5), "a seed is of the weights too"
    assert other.model == first.model | {"seed": 5, "attention_variant": "softmax"}
    assert other.training == replace(first.training, seed=5, steps=8)


@pytest.mark.parametrize(
    ("entry", "value", "found"),
    [
        ("training", {"stepz": 3}, "stepz"),
        ("training", {"steps": "many"}, "many"),
        ("vocab_size", "big", "big"),
    ],
)
def test_a_run_configuration_with_a_mistake_is_refused(entry, value, found, tmp_path):
    saved = resolve("tiny", data=["x"], training={}).plain()
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(saved | {entry: value}))
    with pytest.raises(InputError, match=found):
        resolve(str(path), data=["x"], training={})


@pytest.mark.parametrize(
    ("key", "next_step"),
    [("variant", "Write attention_variant"), ("num_layers", "Write num_hidden_layers"), ("colour", "Leave it out")],
)
def test_an_unknown_key_of_the_model_is_told_its_nearest(tmp_path, key, next_step):
    path = tmp_path / "mine.yaml"
    path.write_text(f"model: {{{key}: head_norm}}")
    with pytest.raises(InputError, match=rf"The model has no key '{key}'\. {next_step}\. The keys are: .*seed"):
        resolve(str(path), data=["x"], training={})


def test_both_variants_are_chosen_in_yaml(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: {feed_forward_variant: bounded_swiglu, attention_variant: gate}")
    chosen = {"feed_forward_variant": "bounded_swiglu", "attention_variant": "gate"}
    assert chosen.items() <= resolve(str(path), data=["x"], training={}).model.items()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": 5}, "`data` must be a path, or a list of them, as text or a Path, not 5"),
        ({"data": ["text.txt", None]}, "`data` must be .* as text or a Path, not None"),
        ({"validation": 5}, "`validation` must be .* as text or a Path, not 5"),
        ({"out": None}, "`out` must be a path as text or a Path, not None"),
        ({"config": {"preset": "tiny"}}, r"`config` must be a preset \(tiny, .*\) or a YAML file as .*, not {'preset'"),
    ],
)
def test_train_refuses_other_types(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        train(**{"data": "text.txt", "out": tmp_path / "run"} | changes)
    assert not any(tmp_path.iterdir())


def test_train_takes_paths(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(train_module, "pretrain", lambda config, out, group, **options: asked.append((config, out)))
    path = tmp_path / "mine.yaml"
    path.write_text("training: {steps: 7}")
    for data, validation in ((path, path), (str(path), [str(path)]), ([path], (path,))):
        assert train(data, tmp_path / "run", config=path, validation=validation, device="cpu") == tmp_path / "run"
        config, out = asked.pop()
        assert (config.data, config.validation, out) == ([str(path)], [str(path)], tmp_path / "run")
        assert config.training.steps == 7


def test_a_yaml_file_with_a_mistake_says_where_and_is_to_be_corrected(tmp_path):
    path = tmp_path / "mine.yaml"
    with pytest.raises(InputError, match=r"mine\.yaml: there is no such file\. Correct it, or give another `config`\."):
        resolve(str(path), data=["x"], training={})
    path.write_text("training:\n  steps: 3\npreset: [tiny\n")
    with pytest.raises(InputError, match=r"mine\.yaml: line 4, column 1: .*\. Correct it, or give another `config`\."):
        resolve(str(path), data=["x"], training={})


@pytest.mark.parametrize("text", ["", "{}", "# preset: 30m", "preset:"])
def test_a_yaml_file_without_an_entry_trains_nothing(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"mine\.yaml has none of the keys preset, model and training"):
        resolve(str(path), data=["x"], training={})


def test_a_seed_for_the_weights_alone(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: {seed: 3}\n")
    config = resolve(str(path), data=["x"], training={})
    assert (config.model["seed"], config.training.seed) == (3, TINY.seed)


def test_the_held_out_windows_depend_on_no_batch_size(tmp_path):
    """7 windows, in passes of 8, 4 and 3."""

    class Counted(Fixed):
        def evenly_spaced(self, count, rows=slice(None)):
            seen.append((count, rows.start, rows.stop))
            return self.batch(0, rows)

    found = []
    for size in (None, 4, 2):
        seen = []
        step = tiny_step(micro_batch_size=size, evaluation_sequences=7)
        found.append(step.evaluate(Counted(512, 8, 32)))
        assert {count for count, *_ in seen} == {7}
        assert seen[-1][2] == 7
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)


@pytest.mark.parametrize("training", [{"micro_batch_size": 1}, {"micro_batch_size": 2}, {"batch_size": 1}])
def test_a_variance_across_sequences_needs_all_of_them_in_one_pass(tmp_path, training):
    """Control: another variant, and the whole batch."""
    asked = {"batch_size": 4} | training
    refused, softmax, whole = (tmp_path / name for name in ("refused", "softmax", "whole"))
    for folder in (refused, softmax, whole):
        folder.mkdir()
    with pytest.raises(
        InputError, match=r"equal_variance uses the variance .* must be in one forward pass\. .* use one process"
    ):
        short_run(refused, variant="equal_variance", **asked)
    assert not (refused / "run").exists()
    short_run(softmax, **asked)
    short_run(whole, variant="equal_variance", batch_size=4)


def test_held_out_text_beside_shards_is_refused(tmp_path):
    run = short_run(tmp_path)
    with pytest.raises(InputError, match=r"`validation` does nothing beside them\. Leave held_out\.txt out here"):
        train(run / "tokens", tmp_path / "other", validation="held_out.txt", steps=1)


def test_an_entry_of_a_file_is_taken_back_by_none(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("training: {batch_size: 4, micro_batch_size: 2}")
    changed_back = resolve(str(path), data=["x"], training={"micro_batch_size": None})
    assert (changed_back.training.batch_size, changed_back.training.micro_batch_size) == (4, None)


def test_a_run_that_goes_on_with_another_set_up_shares_its_seconds_with_none(tmp_path):
    run = short_run(tmp_path)
    folder, before = RunFolder(run), json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps(before | {"num_threads": 99}))
    short_run(tmp_path)  # it is complete, so nothing runs
    assert json.loads((run / "environment.json").read_text())["num_threads"] == 99
    folder.write_json("environment.json", before)
    _note_changed_set_up(folder, before | {"started_at": "later"})
    assert json.loads((run / "environment.json").read_text()) == before
    _note_changed_set_up(folder, before | {"parallel": "ddp", "num_processes": 2})
    after = json.loads((run / "environment.json").read_text())
    assert (after["parallel"], after["num_processes"]) == ("single, then ddp", "1, then 2")
    same, other = SimpleNamespace(environment=before), SimpleNamespace(environment=after)
    assert [num_machines(runs) for runs in ([same, same], [same, other], [other, other])] == [1, 2, 2]
