"""What a sink is for: texts of different documents, and what heads are worth against a plain definition in float64."""

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast

from sinkscope import load
from sinkscope.errors import InputError
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.token_batches import token_batch
from sinkscope.studies.purpose import Purpose, head_worths
from sinkscope.studies.texts import CODE, PROSE, text_batches

SINK, LAYER = 0, 1
DORMANT_HEAD, ACTIVE_HEAD = 0, 1
LETTERS = " etaoinshrdlucmfwypvbgkqjxzETAOINSHRDLUCMFWYPVBGKQJXZ.,;"


def of_letters() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each letter, and one for all else."""
    vocabulary = {letter: number for number, letter in enumerate(LETTERS)} | {"[UNK]": len(LETTERS)}
    letters = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=letters)


def planted() -> torch.nn.Module:
    """A tiny model in float64; one head of a layer writes nothing, another far more than the rest."""
    model = tiny_model("llama").double()
    layer = anatomy_of(model).layers[LAYER]
    with torch.no_grad():
        columns = layer.output_projection.weight.unflatten(1, (anatomy_of(model).num_heads, -1))
        columns[:, DORMANT_HEAD] = 0
        columns[:, ACTIVE_HEAD] *= 20
    return model


def loss_with(model, ids_BT, part: float, means_E, head: int) -> np.ndarray:
    """[B] the loss with part of the way gone from one head's aggregation to its mean, at all tokens but the sink."""
    anatomy = anatomy_of(model)

    def replaced(module, args):
        x_BTHD = args[0].clone().unflatten(-1, (anatomy.num_heads, -1))
        mean_D = means_E.unflatten(0, (anatomy.num_heads, -1))[head]
        x_BTHD[:, SINK + 1 :, head] += part * (mean_D - x_BTHD[:, SINK + 1 :, head])
        return (x_BTHD.flatten(2),)

    hook = anatomy.layers[LAYER].output_projection.register_forward_pre_hook(replaced)
    with torch.no_grad():
        logits = model(ids_BT).logits[:, :-1]
    hook.remove()
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids_BT), -1).mean(1).numpy()


def test_what_a_head_is_worth_is_the_slope_of_the_loss_on_the_way_to_its_mean():
    model = planted()
    batch, others = (token_batch(model, length=16, num_sequences=6, seed=seed) for seed in (0, 1))
    worth_BLH = head_worths(load(model), batch, others, SINK)
    read = []
    layer = anatomy_of(model).layers[LAYER]
    hook = layer.output_projection.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    with torch.no_grad():
        model(others.ids)
    hook.remove()
    mean_E = read[0][:, SINK + 1 :].mean((0, 1))
    baseline_B = loss_with(model, batch.ids, 0.0, mean_E, 0)
    step = 3e-3
    for head in range(anatomy_of(model).num_heads):
        after_B, before_B = (loss_with(model, batch.ids, part, mean_E, head) for part in (step, -step))
        # Norms of this family compute in float32, which leaves 1e-7 of the loss over the step.
        np.testing.assert_allclose(worth_BLH[:, LAYER, head], (after_B - before_B) / (2 * step), rtol=1e-2, atol=3e-4)
    assert not worth_BLH[:, LAYER, DORMANT_HEAD].any()
    # The control: what is planted to be active is worth something, whole way and slope alike.
    whole_B = loss_with(model, batch.ids, 1.0, mean_E, ACTIVE_HEAD) - baseline_B
    assert abs(whole_B.mean()) > 0
    assert abs(worth_BLH[:, LAYER, ACTIVE_HEAD].mean()) > 10 * abs(worth_BLH[:, LAYER, DORMANT_HEAD].mean())


def test_a_head_is_dormant_active_or_depends_on_the_text():
    random = np.random.default_rng(0)

    def worth(*by_head: float) -> np.ndarray:
        return np.array(by_head) * random.normal(1, 0.1, (32, 1, 5))

    wide = np.where(np.arange(32)[:, None, None] % 2, 1.0, 0.0) * np.array([0, 0, 0, 0, 0.12])
    by_kind = {"text": worth(1, 0.001, 1, 1, 0) + wide, "code": worth(1, 0.001, 0.001, 1, 0) + wide}
    purpose = Purpose(losses={"baseline": np.ones(2)}, worth=by_kind, heads=tuple((0, head) for head in range(5)))
    assert [each.role for each in purpose.roles] == ["active", "dormant", "depends", "active", "undecided"]
    assert purpose.summary()["heads"] == {"dormant": 1, "active": 2, "depends": 1, "undecided": 1}
    assert "Of its 5 heads, 1 dormant, 2 active, 1 depends, 1 undecided on text and code." in purpose.in_words()


def test_sets_of_a_text_are_of_different_documents(tmp_path):
    loaded = load(tiny_model("llama", vocab_size=64), tokenizer=of_letters())
    text = "<|endoftext|>".join(letter * 400 for letter in "etaoinshrdlu")
    (tmp_path / "a.txt").write_text(text)
    batches = text_batches(loaded, tmp_path / "a.txt", bos=None, length=64, counts=(8, 8, 16))
    held = [set(batch.ids.unique().tolist()) for batch in batches]
    assert [len(batch.ids) for batch in batches] == [8, 8, 16]
    assert not held[0] & held[1]
    assert not (held[0] | held[1]) & held[2]
    for file in (PROSE, CODE):
        assert text_batches(loaded, file, bos=None, length=64, counts=(32, 16))[0].ids.shape == (32, 64)
    (tmp_path / "b.txt").write_text("short")
    with pytest.raises(InputError, match=r"b\.txt is too short for 32 sequences"):
        text_batches(loaded, tmp_path / "b.txt", bos=None, length=64, counts=(8, 8, 16))
