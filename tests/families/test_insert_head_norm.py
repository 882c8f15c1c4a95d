"""Head-wise RMSNorm before the output projection of every family: what it computes, training, saving, taking it out."""

import contextlib
import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import CONFIGURATIONS, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import sinkscope
from sinkscope.attention.head_norm import HeadRMSNorm
from sinkscope.errors import InputError
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.given_ids import given_batch
from sinkscope.models.insert_head_norm import insert_head_norm, remove_head_norm
from sinkscope.tracing.replay import Replay

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from own_gpt import OwnGPT

OPTIONS = dict(initial_lambda=0.7)
SHARED = dict(per_head=False, offset=False)


def tokens() -> Tensor:
    return torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(0))


def logits(model) -> Tensor:
    with torch.no_grad():
        return model(tokens()).logits


def shaken(model) -> None:
    """Lambdas and offsets away from their initial values."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, HeadRMSNorm):
                for parameter in module.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("options", [SHARED, OPTIONS], ids=["shared", "per head with offset"])
@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_the_projection_reads_normalised_heads(family, options):
    model, before, after = tiny_model(family), {}, {}
    anatomy = anatomy_of(model)
    for layer in anatomy.layers:  # this hook runs before the norm's, the next one sees what the projection got
        layer.output_projection.register_forward_pre_hook(
            lambda module, args, i=layer.index: before.update({i: args[0].double()})
        )
        layer.output_projection.register_forward_hook(
            lambda module, args, output, i=layer.index: after.update({i: args[0].double()})
        )
    plain = logits(model)
    for layer in anatomy.layers:
        assert torch.equal(before[layer.index], after[layer.index])  # the control: without the norm nothing changes
    norms = insert_head_norm(model, **options)
    shaken(model)
    assert (logits(model) - plain).abs().max() > 1e-3
    for layer, norm in zip(anatomy.layers, norms, strict=True):
        o = before[layer.index].unflatten(-1, (anatomy.num_heads, -1))
        expected = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
        expected = expected if norm.offset is None else expected + norm.offset.double()
        torch.testing.assert_close(after[layer.index], expected.flatten(-2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_taken_out_again_the_model_is_as_it_was(family):
    model = tiny_model(family)
    plain, names, config = logits(model), list(model.state_dict()), model.config.to_dict()
    insert_head_norm(model)
    assert not torch.equal(logits(model), plain)
    remove_head_norm(model)
    assert torch.equal(logits(model), plain)
    assert list(model.state_dict()) == names
    assert model.config.to_dict() == config
    assert not any(isinstance(module, HeadRMSNorm) for module in model.modules())
    assert not any(layer.output_projection._forward_pre_hooks for layer in anatomy_of(model).layers)


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_saves_and_loads(family, tmp_path):
    model = tiny_model(family)
    insert_head_norm(model, **OPTIONS)
    shaken(model)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(sinkscope.load(tmp_path).model), logits(model), rtol=0, atol=0)

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).eval()
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-5, atol=1e-5)
    theirs.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True).eval()
    assert torch.equal(logits(again), logits(theirs))


def test_transformers_loads_no_model_without_its_norms(tmp_path):
    model = tiny_model("llama")
    insert_head_norm(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)
    with pytest.raises(Exception, match="has norms that its class does not know"):
        type(model).from_pretrained(tmp_path)
    # The control: of a configuration that says nothing of the norms, transformers makes a model without them.
    model.config.save_pretrained(tmp_path)
    assert not torch.equal(logits(type(model).from_pretrained(tmp_path).eval()), logits(model))
    model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    program = f"""
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "parts")!r}, trust_remote_code=True, dtype="bfloat16")
assert "sinkscope" not in sys.modules
print(sum(str(p.dtype) == "torch.float32" for _, p in model.named_parameters()))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["6"]


def test_a_module_without_a_configuration_takes_a_fixed_norm():
    model = OwnGPT()
    norms = insert_head_norm(model, fixed=True, offset=False)
    assert [parameter.requires_grad for norm in norms for parameter in norm.parameters()] == [False] * 3
    model(tokens()).square().mean().backward()
    assert norms[0].weight.grad is None
    remove_head_norm(model)
    assert "save_pretrained" not in vars(model)


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "deepseek_v3"])
def test_can_be_traced(family):
    model = tiny_model(family)
    insert_head_norm(model)
    trace = sinkscope.trace(model, tokens(), effective_rank=False)
    second_LT = trace.recording["second_moment"]
    torch.testing.assert_close(second_LT, torch.ones_like(second_LT), rtol=1e-2, atol=0)
    remove_head_norm(model)
    control_LT = sinkscope.trace(model, tokens(), effective_rank=False).recording["second_moment"]
    assert (control_LT - 1).abs().max() > 0.1


def test_trains_with_the_hugging_face_trainer(tmp_path):
    model = tiny_model("llama", scale=1.0)
    norms = insert_head_norm(model, initial_lambda=0.25)
    data = [{"input_ids": row, "labels": row} for row in tokens().repeat(8, 1)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=30,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]
    assert all((norm.weight - 0.25).abs().max() > 1e-3 for norm in norms)
    trainer.save_model(str(tmp_path / "saved"))
    again = sinkscope.load(tmp_path / "saved").model
    assert torch.equal(logits(again), logits(model.eval()))


def test_a_copy_of_the_model_has_norms_of_its_own():
    model = tiny_model("llama")
    insert_head_norm(model)
    other = copy.deepcopy(model)
    remove_head_norm(other)
    assert torch.equal(logits(other), logits(tiny_model("llama")))
    assert not torch.equal(logits(model), logits(other))


def test_compiles_into_one_graph():
    model = tiny_model("llama")
    insert_head_norm(model)
    block, calls = model.model.layers[0].self_attn.o_proj, torch.randn(2, 5, 48)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(calls), block(calls))


def test_lambdas_stay_in_float32():
    norms = insert_head_norm(tiny_model("llama", dtype=torch.bfloat16))
    assert norms[0].weight.dtype == torch.float32


def test_refusals(tmp_path):
    model = tiny_model("llama")
    with pytest.raises(InputError, match="insert_head_norm"):
        remove_head_norm(model)
    insert_head_norm(model)
    with pytest.raises(InputError, match="remove_head_norm"):
        insert_head_norm(model)
    model.save_pretrained(tmp_path)
    model.config.sinkscope_head_norm = dict(SHARED)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"o_proj.head_norm.weight is of shape \[4, 12\].*must have shape \[12\]"):
        sinkscope.load(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_edit_before_the_norm_is_normalised_and_one_behind_it_is_not(family):
    model, entering = tiny_model(family), {}
    calibration = given_batch(torch.randint(3, 97, (64, 20), generator=torch.Generator().manual_seed(2)))
    with pytest.raises(InputError, match="Layer 0 has no norm on the value aggregation"):
        sinkscope.amplify_variance(model, 5, 4.0, calibration=calibration, before_norm=True)
    (layer, *_), (norm, *_) = anatomy_of(model).layers, insert_head_norm(model)
    norm.register_forward_pre_hook(lambda module, args: entering.update(norm=args[0].clone()))
    layer.output_projection.register_forward_hook(lambda module, args, output: entering.update(projection=args[0]))
    where = dict(calibration=calibration, layers=[0])
    with torch.no_grad():
        model(calibration.ids)
    mean = entering["norm"][:, 5].mean(0)
    untouched = logits(model)
    plain = entering["norm"].clone()
    with sinkscope.amplify_variance(model, 5, 4.0, before_norm=True, **where):
        assert (logits(model) - untouched).abs().max() > 1e-3
    changed = plain.clone()
    changed[:, 5] = mean + 4 * (plain[:, 5] - mean)
    with torch.no_grad():
        torch.testing.assert_close(entering["projection"], norm(changed), rtol=1e-4, atol=1e-5)
    # Scale is what the norm takes away: before it nothing changes, behind it all does.
    with sinkscope.scale_norm(model, 5, 4.0, before_norm=True, **where):
        torch.testing.assert_close(logits(model), untouched, rtol=1e-3, atol=1e-3)
    with sinkscope.scale_norm(model, 5, 4.0, **where):
        assert (logits(model) - untouched).abs().max() > 1e-2


def test_variance_is_matched_on_the_side_of_the_norm_that_is_asked_for():
    model, entering = tiny_model("llama"), []
    batch = given_batch(torch.randint(3, 97, (64, 20), generator=torch.Generator().manual_seed(2)))
    (norm, *_) = insert_head_norm(model)
    norm.register_forward_hook(lambda module, args, output: entering.append(args[0][:, 5].var(0).mean()))

    def variance(*on):
        with contextlib.ExitStack() as stack, torch.no_grad():
            for intervention in on:
                stack.enter_context(intervention)
            model(batch.ids)
        return float(entering[-1])

    mask, where = sinkscope.mask_to_self(model, 5), dict(calibration=batch, layers=[0])
    with mask:
        before, behind = (sinkscope.match_variance(model, 5, before_norm=side, **where) for side in (True, False))
    # The control: what is matched behind the norm leaves what enters it as the mask made it.
    untouched, masked, matched, control = (variance(*on) for on in ((), (mask,), (mask, before), (mask, behind)))
    assert matched == pytest.approx(untouched, rel=1e-3)
    assert control == pytest.approx(masked, rel=1e-3)
    assert masked > 1.5 * untouched


def test_both_sides_of_the_norm_are_read_as_an_edit_before_it_leaves_them():
    model, entering = tiny_model("llama"), {}
    batch = given_batch(torch.randint(3, 97, (64, 20), generator=torch.Generator().manual_seed(2)))
    (norm, *_) = insert_head_norm(model)
    replay = Replay(anatomy_of(model), model, batch.ids)
    norm.register_forward_hook(lambda module, args, output: entering.update(before=args[0], behind=output))
    with sinkscope.amplify_variance(model, 5, 4.0, calibration=batch, layers=[0], before_norm=True) as edit:
        squares_BS2T = replay.read(edit.first_layer).squares_LBS2T[0]
    for side, name in enumerate(("behind", "before")):
        o_BC = entering[name].reshape(64, 20, -1)[:, 5]
        torch.testing.assert_close(squares_BS2T[:, side, 0, 5].mean(), o_BC.var(0).mean(), rtol=1e-4, atol=0)
        torch.testing.assert_close(squares_BS2T[:, side, 1, 5].mean(), o_BC.square().mean(), rtol=1e-4, atol=0)
    before_BS2T = replay.baseline.squares_LBS2T[0]
    raised_S = squares_BS2T[:, :, 0, 5].mean(0) / before_BS2T[:, :, 0, 5].mean(0)
    assert float(raised_S[1]) == pytest.approx(16, rel=1e-3)
    assert float(raised_S[0]) < 8  # the control: the norm takes scale away again
