"""Models by name where origins matter: a run's first weights are those it trained from, and seeds give weights."""

import json
import shutil

import pytest
import torch
from tiny_models import CONFIGURATIONS, tiny_model
from training_folders import write_training_folder
from training_runs import short_run
from transformers import AutoConfig, LlamaConfig

from sinkscope.errors import InputError
from sinkscope.models.initial import draw, find_configuration
from sinkscope.models.loading import load
from sinkscope.models.weights import weight_hash


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return short_run(tmp_path_factory.mktemp("run"))


def weights(model) -> dict:
    """By the names that an exported model has."""
    return {name.replace(".variant.", "."): weight for name, weight in model.state_dict().items()}


@pytest.mark.parametrize("variant", ["softmax", "qk_norm", "head_norm_gate"])
def test_init_is_bit_for_bit_what_the_run_trained_from(tmp_path, variant):
    run = short_run(tmp_path, variant=variant)
    first, kept = load(f"init:{run}"), load(run / "snapshots" / "step-00000000")
    assert first.name == "init:run"
    assert first.tokenizer is not None
    assert weights(first.model).keys() == weights(kept.model).keys()
    assert all(torch.equal(weight, weights(kept.model)[name]) for name, weight in weights(first.model).items())
    # Control: two steps later they are others.
    later = weights(load(run / "snapshots" / "step-00000002").model)
    assert not torch.equal(weights(first.model)["model.embed_tokens.weight"], later["model.embed_tokens.weight"])


def test_init_needs_neither_an_exported_model_nor_the_folder_it_was_trained_in(run, tmp_path):
    expected = load(f"init:{run}").weight_hash
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    assert load(f"init:{moved}").weight_hash == expected
    for name in ("model", "snapshots"):
        shutil.rmtree(moved / name)
    assert load(f"init:{moved}").weight_hash == expected


def test_a_run_is_its_trained_model_and_its_configuration(run):
    trained = load(run)
    assert trained.weight_hash == load(run / "model").weight_hash != load(f"init:{run}").weight_hash
    found = find_configuration(str(run))
    assert found is not None
    assert (found.name, found.seed, found.run) == ("run", 11, run)
    assert draw(found, 11).weight_hash == load(f"init:{run}").weight_hash != draw(found, 12).weight_hash


def test_a_checkpoint_is_the_model_at_its_step(run, tmp_path):
    at_end = load(run / "checkpoints" / "step-00000004")
    exported = weights(load(run).model)
    assert all(torch.equal(weight, exported[name]) for name, weight in weights(at_end.model).items())
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-00000004" / "training.safetensors").unlink()
    with pytest.raises(InputError, match=r"training\.safetensors is missing"):
        load(str(tmp_path / "run" / "checkpoints" / "step-00000004"))


def test_a_checkpoint_that_left_its_run_is_refused_in_plain_words(run, tmp_path):
    alone = tmp_path / "moved" / "step-00000004"
    shutil.copytree(run / "checkpoints" / "step-00000004", alone)
    with pytest.raises(InputError) as refused:
        load(alone)
    assert str(refused.value).startswith(f"{alone} is not inside the folder of its training run")
    assert str(refused.value).endswith("copy its whole folder and give COPY/checkpoints/step-00000004.")
    # Control: what it says to do is taken.
    shutil.copytree(run, tmp_path / "COPY")
    expected = load(run / "checkpoints" / "step-00000004").weight_hash
    assert load(tmp_path / "COPY/checkpoints/step-00000004").weight_hash == expected


def test_names_stand_for_weights_or_for_a_configuration(tmp_path):
    model = tiny_model("gpt2")
    model.save_pretrained(tmp_path / "whole")
    (tmp_path / "bare").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "bare")
    assert find_configuration(tmp_path / "whole") is None
    assert find_configuration("init:anything") is None
    for source in (tmp_path / "bare", tmp_path / "bare" / "config.json", tmp_path / "whole" / "config.json"):
        found = find_configuration(source)
        assert found is not None
        assert found.config.model_type == "gpt2"
    tiny = find_configuration("tiny")
    assert tiny is not None
    assert tiny.config.hidden_size == 64
    default = find_configuration(None)
    assert default is not None
    assert default.config.num_hidden_layers == 16
    assert draw(default, 2).weight_hash == load("init:reference:softmax").weight_hash


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mixtral", "gemma3"])
def test_a_seed_decides_every_drawn_weight_and_leaves_the_global_state(family):
    config = AutoConfig.for_model({"gemma3": "gemma3_text"}.get(family, family), **CONFIGURATIONS[family])
    found = find_configuration(config)
    assert found is not None
    before = torch.get_rng_state()
    first, again, other = draw(found, 3), draw(found, 3), draw(found, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.weight_hash == again.weight_hash != other.weight_hash
    drawn = [name for name, weight in first.model.named_parameters() if weight.ndim > 1]
    theirs = dict(other.model.named_parameters())
    assert all(not torch.equal(first.model.get_parameter(name), theirs[name]) for name in drawn)


def test_a_drawn_model_follows_its_dtype_and_its_configuration_is_not_changed():
    config = LlamaConfig(**CONFIGURATIONS["llama"], quantization_config={"quant_method": "mxfp4"})
    found = find_configuration(config)
    assert found is not None
    model = draw(found, 0, dtype="float64").model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert config.quantization_config == {"quant_method": "mxfp4"}
    assert weight_hash(model.float()) == draw(found, 0).weight_hash


def test_what_is_no_run_is_refused(run, tmp_path):
    (tmp_path / "empty").mkdir()
    for name, found in (
        (tmp_path / "empty", "no config.yaml of a training run"),
        (tmp_path / "none", "There is no folder"),
    ):
        with pytest.raises(InputError, match=found):
            load(f"init:{name}")
    with pytest.raises(InputError, match="Another version of sinkscope wrote the training run in"):
        load(f"init:{write_training_folder(tmp_path / 'older')}")
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run, unfinished, ignore=shutil.ignore_patterns("model"))
    with pytest.raises(InputError, match="has no model yet"):
        load(unfinished)
    (tmp_path / "empty" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(InputError, match="not a causal language model"):
        find_configuration(tmp_path / "empty")
    with pytest.raises(InputError, match=r"`seed` must be from 0 to 2\^63 - 1, not -1"):
        draw(find_configuration("tiny"), -1)
    for options, refused in (
        ({"revision": "main"}, "on the Hub"),
        ({"device_map": "auto"}, "not loaded from a model folder"),
    ):
        with pytest.raises(InputError, match=refused):
            load(f"init:{run}", **options)


def test_a_seed_that_a_generator_would_cut_short_is_refused():
    found = find_configuration(LlamaConfig(**CONFIGURATIONS["llama"]))
    assert found is not None
    with pytest.raises(InputError, match=r"2\^32 - 1"):
        draw(found, 1 << 32)
    decoder = find_configuration("tiny")
    assert decoder is not None
    assert draw(decoder, 1 << 32).weight_hash != draw(decoder, 0).weight_hash
