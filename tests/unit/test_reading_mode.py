"""Reading leaves a model as it was: its modules' modes, and whether it can be trained."""

import pytest
import torch
from tiny_models import tiny_model

from sinkscope.models.given_ids import given_batch
from sinkscope.models.loading import load
from sinkscope.tracing.observables import CHAIN
from sinkscope.tracing.recorder import record, without_autograd
from sinkscope.tracing.single_reader import evaluation_mode


class Keeping(torch.nn.Module):
    """Keeps a buffer that it made in its last pass, as rotary embeddings of growing length do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, *args, **kwargs):
        found = self.inner(x, *args, **kwargs)
        if not hasattr(self, "factor"):
            self.factor = torch.full((1,), 1.0) * 1
        return found * self.factor


def model_that_keeps():
    model = tiny_model("llama")
    model.model.norm = Keeping(model.model.norm)
    return model


def read(loaded):
    ids = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(0))
    return record(loaded, given_batch(ids, model=loaded.model), CHAIN), ids


def test_a_model_can_be_trained_after_it_was_read():
    model = model_that_keeps().requires_grad_(True)
    _, ids = read(load(model))
    model(ids, labels=ids).loss.backward()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


def test_control_inference_mode_would_have_forbidden_it():
    model = model_that_keeps().requires_grad_(True)
    loaded = load(model)
    with torch.inference_mode():
        _, ids = read(loaded)
    with pytest.raises(RuntimeError, match=r"[Ii]nference tensors"):
        model(ids.clone(), labels=ids.clone()).loss.backward()


def test_both_modes_read_the_same():
    found = {}
    for trained in (True, False):
        model = tiny_model("llama").requires_grad_(trained)
        with without_autograd(load(model)):
            assert torch.is_inference_mode_enabled() is not trained
            assert not torch.is_grad_enabled()
        found[trained] = read(load(model))[0]
    assert torch.equal(found[True]["received"], found[False]["received"])


def test_the_reference_model_is_read_in_inference_mode():
    with without_autograd(load("reference:softmax")):
        assert torch.is_inference_mode_enabled()


def test_each_module_gets_its_own_mode_back():
    model = tiny_model("llama").train()
    model.model.layers[1].eval()
    before = [module.training for module in model.modules()]
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    assert True in before
    assert False in before
