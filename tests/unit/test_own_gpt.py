"""The example of a model that is not from Hugging Face: traced as eager attention has it, and through interventions."""

import runpy
from pathlib import Path

import pytest
import torch

import sinkscope

OwnGPT = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "own_gpt.py"))["OwnGPT"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return OwnGPT().double()


def test_what_each_key_receives_is_that_of_attention_written_out(model):
    ids = torch.randint(100, (2, 24), generator=torch.Generator().manual_seed(1))
    before = model(ids)
    found = sinkscope.trace(model, ids)
    block = model.blocks[0]
    x = model.tokens(ids) + model.positions.weight[:24]
    q, k, _ = (
        block.attention.queries_keys_values(block.attention_norm(x)).unflatten(-1, (3, 4, 8)).transpose(1, 3).unbind(2)
    )
    weights = (q @ k.mT * 8**-0.5).masked_fill(torch.ones(24, 24).triu(1).bool(), float("-inf")).softmax(-1)
    alpha = (weights.sum(-2) / (24 - torch.arange(24))).mean(0)
    torch.testing.assert_close(found.recording["received"][0].double(), alpha.detach(), rtol=1e-5, atol=1e-6)
    uncausal = (q @ k.mT * 8**-0.5).softmax(-1).sum(-2).mean(0) / (24 - torch.arange(24))
    assert not torch.allclose(found.recording["received"][0].double(), uncausal.detach(), rtol=1e-2)
    assert torch.equal(model(ids), before)


def test_a_model_that_says_nothing_of_itself_is_refused():
    for call in (sinkscope.load, sinkscope.anatomy_of, lambda silent: sinkscope.mask_to_self(silent, 3)):
        with pytest.raises(sinkscope.InputError, match="sinkscope_anatomy"):
            call(torch.nn.Linear(2, 2))


def test_interventions_and_probes_work_on_it(model):
    ids = torch.randint(100, (4, 32), generator=torch.Generator().manual_seed(2))
    with sinkscope.mask_to_self(model, 10):
        masked = sinkscope.trace(model, ids)
    assert float(masked.recording["mixing"][:, 10].min()) == pytest.approx(1.0)
    assert float(sinkscope.trace(model, ids).recording["mixing"][:, 10].max()) < 0.9
    assert sinkscope.probe(model, ids).whole["sink_position"] is not None


def test_a_study_of_it_is_refused(model):
    with pytest.raises(sinkscope.InputError, match="OwnGPT has no `config`"):
        sinkscope.study(model)


def test_a_module_without_config_takes_the_head_norm(model):
    ids = torch.arange(24)[None]
    before = model(ids)
    norms = sinkscope.insert_head_norm(model)
    assert len(norms) == len(sinkscope.anatomy_of(model).layers)
    assert not torch.equal(model(ids), before)
    sinkscope.remove_head_norm(model)
    assert torch.equal(model(ids), before)
