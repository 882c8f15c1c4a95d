"""Remedies: what each does to the weights or the cache, and what is said where there is nothing to do."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from planted_models import planted_chain, random_tokens
from safetensors.torch import load_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

import sinkscope
from sinkscope.audits import prefix
from sinkscope.audits.damage import losses
from sinkscope.audits.prefix import LOADER, other_prefix
from sinkscope.audits.remedy_result import ModelLosses, card, write_model
from sinkscope.audits.texts import _generate_texts
from sinkscope.models.anatomy import Neuron, anatomy_of
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.decoder_config import DecoderConfig
from sinkscope.pretrain.presets import preset
from sinkscope.results.run import read_run
from sinkscope.results.run_folder import run_folder


@pytest.fixture(scope="module")
def chain():
    model, facts = planted_chain(0)
    return model, random_tokens(facts, num_sequences=20, length=48)


@pytest.fixture(scope="module")
def told():
    """What each long part of a remedy told of its progress, by its name."""
    return {}


@pytest.fixture(scope="module")
def remedied(chain, told):
    def work(what):
        calls = told.setdefault(what, [])
        calls.clear()  # damage is predicted twice
        return lambda done, total: calls.append((done, total))

    return sinkscope.remedy(chain[0], chain[1], prefix=True, rotate=True, exempt=True, work=work)


def test_after_its_prefix_texts_have_hardly_a_sink_of_their_own(chain):
    model, ids = chain
    found = sinkscope.sink_prefix(model, ids[:8])
    assert len(found.ids) == 1
    assert found.fired[0] == 1
    assert found.fired[1] < 0.5
    after = torch.cat([torch.tensor(found.ids).expand(4, -1), ids[8:12]], 1)
    assert int(sinkscope.sink_tokens(model, after).mask[:, 1:].sum()) < 2
    assert int(sinkscope.sink_tokens(model, ids[8:12]).mask.sum()) == 4
    # The cache stands for the tokens.
    by_cache, by_tokens = losses(model, ids[8:12], prefix=found.cache), losses(model, after)[:, 1:]
    assert np.allclose(by_cache, by_tokens, atol=1e-4)
    # Control: after a token that is no sink, the text has a sink of its own, as it has without.
    other = other_prefix(sinkscope.load(model), found)
    assert other.layers[0][0].shape == found.layers[0][0].shape
    assert not np.allclose(losses(model, ids[8:12], prefix=other.cache), by_cache, atol=1e-2)


@pytest.mark.parametrize(("losses_after", "chosen"), [((4, 2, 3), (4, 5)), ((3, 4, 5), (3,)), ((4, 0.5, -1), (4, 5))])
def test_the_prefix_that_keeps_8_bits_nearest_to_the_model_is_chosen(chain, monkeypatch, losses_after, chosen):
    """16 bits give 2 without a prefix; a loss far below is no better than one above."""
    found = dict(zip([(3,), (4, 5), (6,)], losses_after, strict=True))

    def losses_of(loaded, ids, cache):
        head = cache.__self__.ids
        assert len(ids) == (7 if head in ((4, 5), (6,)) else 8)  # a text does not judge its own head
        return np.full((len(ids), ids.shape[1] - 1), found[head], dtype=float)

    monkeypatch.setattr(prefix, "_heads", lambda *_: [((3,), None), ((4, 5), 0), ((6,), 1)])
    monkeypatch.setattr(prefix, "_static_losses", losses_of)
    monkeypatch.setattr(prefix, "losses", lambda model, ids: np.full((len(ids), ids.shape[1] - 1), 2.0))
    assert sinkscope.sink_prefix(chain[0], chain[1][:8]).ids == chosen


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_oss", "deepseek_v3"])
def test_unplugging_is_ablation_in_the_weights(family):
    model = tiny_model(family)
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    last = anatomy_of(model).layers[-1]
    neurons = [Neuron(last.index, expert, 3) for expert, _ in last.down_weights()][-2:]
    with torch.no_grad():
        before = model(ids).logits
        with sinkscope.ablate_neurons(model, neurons):
            ablated = model(ids).logits
        assert torch.allclose(sinkscope.unplug(model, neurons)(ids).logits, ablated, atol=1e-3)
        assert torch.equal(model(ids).logits, before)  # a copy was changed
        assert not torch.allclose(ablated, before, atol=1e-3)


def test_each_remedy_is_measured_alone_beside_its_control_and_all_together(remedied, tmp_path):
    names = [(entry.name, entry.is_control) for entry in remedied.measurements]
    assert names == [
        ("baseline", False),
        ("rotate", False),
        ("norm gains folded in, the basis as it was", True),
        ("prefix", False),
        ("the cache of as many tokens that are no sinks", True),
        ("exempt", False),
        ("random groups of as many weights", True),
        ("all together", False),
    ]
    assert len(remedied.summary["losses"]) == 3 * len(names)
    assert remedied.table("losses").num_rows == 3 * len(names)
    assert "All together: " in repr(remedied)
    assert "What 8-bit activations cost, before and after" in remedied.report(tmp_path / "page.html").read_text(
        encoding="utf-8"
    )
    assert remedied.plot().axes


def test_every_long_part_is_counted_from_the_first_to_the_last(remedied, told):
    assert list(told) == [
        "prefixes tried",
        "texts that predict damage",
        "prefixes tried beside the other remedies",
        "texts that predict damage beside the other remedies",
        "models measured",
    ]
    for calls in told.values():
        total = calls[0][1]
        assert (calls[0], calls[-1]) == ((0, total), (total, total))
        assert calls == sorted(calls)
    assert told["models measured"][0] == (0, len(remedied.measurements))


def test_modules_left_in_16_bits_are_those_that_read_the_super_neuron(chain, remedied):
    by_name = {entry.name: entry.losses for entry in remedied.measurements}
    left, other = (by_name[name]["W8A8_STATIC"] for name in ("exempt", "random groups of as many weights"))
    baseline, damaged = by_name["baseline"]["16 bits"], by_name["baseline"]["W8A8_STATIC"]
    assert np.square(left - baseline).mean() < 0.2 * np.square(damaged - baseline).mean()
    assert np.square(other - baseline).mean() > 0.8 * np.square(damaged - baseline).mean()  # the control
    found = sinkscope.remedy(chain[0], chain[1], exempt=True)
    assert found.modules_in_16_bits == ("model.layers.2.mlp.down_proj",)
    assert found.loaded.model is chain[0]


def test_what_is_written_loads_in_plain_transformers_and_the_loader_fills_the_cache(chain, remedied, tmp_path):
    ids = chain[1]
    with run_folder(tmp_path / "out") as folder:
        remedied.write(folder)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    space = {"model": again, "ids": ids[16:]}
    assert len(LOADER.splitlines()) == 5
    exec(LOADER.replace("prefix.safetensors", str(tmp_path / "out" / "prefix.safetensors")), space)
    with torch.no_grad():
        loaded = again(ids[16:], past_key_values=space["cache"]).logits
        expected = remedied.loaded.model(ids[16:], past_key_values=remedied.prefix.cache(4)).logits
    assert torch.allclose(loaded, expected, atol=1e-4)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert LOADER in card
    guide = (Path(__file__).parents[2] / "docs" / "remedy.md").read_text(encoding="utf-8")
    assert LOADER in guide.replace("\n\n", "\n")
    assert "| the cache of as many tokens that are no sinks (control) |" in card
    ignored = json.loads((tmp_path / "out" / "torchao-W8A8_STATIC.json").read_text(encoding="utf-8"))
    assert ignored == {"modules_to_not_convert": ["lm_head", *remedied.modules_in_16_bits]}
    assert load_file(tmp_path / "out" / "prefix.safetensors")["key.0"].shape[0] == 1


def test_the_card_of_a_decoder_of_our_own_says_what_to_import(remedied):
    own = replace(remedied.loaded, model=sinkscope.load("reference:head_norm").model)
    assert "`import sinkscope.pretrain.decoder`" in card(replace(remedied, loaded=own))
    assert "import sinkscope" not in card(remedied), "the control: a Llama"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_calls_of_the_card_read_and_write_after_the_prefix(chain, remedied, tmp_path, dtype):
    """In other numbers than those of the file too; what is written is what greedy steps by hand give."""
    with run_folder(tmp_path / "out") as folder:
        remedied.write(folder)
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "has no BOS of its own" in text
    read, write = (block.split("```")[0] for block in text.split("```python\n")[1:])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    model.generation_config.max_new_tokens = 12
    ids = chain[1][16:, :12]

    def run(code):
        space = {"model": model, "ids": ids}
        with torch.no_grad():
            exec(code.replace("prefix.safetensors", str(tmp_path / "out" / "prefix.safetensors")), space)
        return space

    found = run(read)
    assert found["logits"].dtype == found["cache"].layers[0].keys.dtype == dtype
    cache, rows = run(LOADER)["cache"], [ids]
    for _ in range(12):
        with torch.no_grad():
            rows.append(model(rows[-1], past_key_values=cache).logits[:, -1:].argmax(-1))
    by_hand = torch.cat(rows, 1)
    assert torch.equal(run(LOADER + write)["written"][:, len(remedied.prefix.ids) :], by_hand)
    alone = run(f"{LOADER}written = model.generate(ids, attention_mask=ids.ne(-1).long(), past_key_values=cache)")
    assert not torch.equal(alone["written"], by_hand), "the control: ids without the tokens of the cache"


def test_shares_of_hand_worked_losses(remedied):
    def measurement(name, plain, static, dynamic, is_control=False):
        schemes = ("16 bits", "W8A8_STATIC", "W8A8_TENSOR")
        values = {scheme: np.full((4, 3), loss) for scheme, loss in zip(schemes, (plain, static, dynamic), strict=True)}
        return ModelLosses(name=name, is_control=is_control, losses=values)

    def result(*measurements):
        return replace(remedied, prefix=None, measurements=measurements, num_tokens=(4, 4))

    good, bad = measurement("good", 2.0, 2.1, 2.0), measurement("bad", 2.2, 3.0, 2.4)
    found = result(measurement("baseline", 2.0, 3.0, 2.005), good, bad)
    # Dynamic scales cost next to nothing here: there is no share of it to recover.
    (of_good,), (of_bad,) = found.shares(good).values(), found.shares(bad).values()
    assert (of_good.share, of_good.low, of_good.high) == pytest.approx((0.9, 0.9, 0.9))
    assert of_bad.share == pytest.approx(0)
    assert found.verdicts[0].startswith("W8A8_TENSOR: no damage to recover, it costs +0.0050 nats a token")
    assert found.verdicts[0].endswith("less than 0.01")
    assert found.verdicts[1].startswith("good: helps, recovers 90% (90% to 90%) of the damage of W8A8_STATIC")
    assert found.verdicts[2].startswith("bad: does not help")
    assert found.change_in_16_bits(bad) == pytest.approx(0.1)
    control = result(found.baseline, measurement("other", 2.0, 2.9, 2.0, is_control=True)).verdicts[-1]
    assert control.startswith("other, a control: recovers 10% (10% to 10%) of the damage of W8A8_STATIC")
    # It recovers three quarters in the mean, and all of it in one text of four.
    lucky = measurement("lucky", 2.0, 3.0, 2.0)
    lucky.losses["W8A8_STATIC"][0] -= 3
    assert result(found.baseline, lucky).shares(lucky)["W8A8_STATIC"].share == pytest.approx(0.75)
    assert result(found.baseline, lucky).verdicts[-1].startswith("lucky: does not help")
    undamaged = result(measurement("baseline", 2.0, 2.0, 2.0), good)
    assert "good: no damage to recover" in undamaged.verdicts[2]
    # Static scales cost 0.02 on average, and as little as -0.5 in some texts: no share of that means anything.
    original = measurement("baseline", 2.0, 2.0, 2.0)
    original.losses["W8A8_STATIC"] += np.array([-0.5, 0.3, -0.3, 0.58])[:, None]
    assert result(original, bad).damage("W8A8_STATIC").change == pytest.approx(0.02)
    assert result(original, bad).shares(bad) == {}
    assert "which may be chance" in result(original, bad).verdicts[0]
    assert "bad: no damage to recover" in result(original, bad).verdicts[2]


def test_a_model_without_sinks_is_told_that_there_is_nothing_to_do():
    model = tiny_model("llama", scale=1.0)
    ids = torch.randint(97, (18, 24), generator=torch.Generator().manual_seed(0))
    result = sinkscope.remedy(model, ids, prefix=True, unplug=True, rotate=True, exempt=True)
    not_needed = ["unplug: nothing to do, no super neuron writes a sink", "prefix: nothing to do, no token is a sink"]
    assert result.verdicts[:2] == not_needed
    assert [entry.name for entry in result.measurements][-1] == "all together"
    assert all(f"- {said}." in card(result) for said in not_needed)
    assert result.prefix is None


def test_a_prefix_that_the_other_remedies_make_needless_is_told(chain):
    """Without its super neuron the planted chain has no sink; with it, one."""
    result = sinkscope.remedy(chain[0], chain[1], prefix=True, unplug=True)
    assert result.verdicts[0] == "prefix: nothing to do beside the others, no token is a sink"
    assert {"prefix", "unplug", "all together"} <= {entry.name for entry in result.measurements}
    assert result.prefix is None


def test_what_cannot_be_done_is_refused(monkeypatch):
    with pytest.raises(sinkscope.InputError, match="at least one remedy"):
        sinkscope.remedy(tiny_model("llama"), torch.zeros(18, 24, dtype=torch.long))
    ids = torch.randint(97, (18, 24), generator=torch.Generator().manual_seed(0))
    with pytest.raises(sinkscope.InputError, match="norm with gains"):
        sinkscope.remedy(tiny_model("gemma3"), ids, rotate=True)
    with pytest.raises(sinkscope.InputError, match="sliding window"):
        sinkscope.sink_prefix(tiny_model("gemma3"), ids)
    monkeypatch.setattr(
        "sinkscope.audits.evaluation.Evaluation.check_finite", lambda *_: pytest.fail("read before it was refused")
    )
    with pytest.raises(sinkscope.InputError, match="sliding window"):
        sinkscope.remedy(tiny_model("gemma3"), ids, prefix=True)


def test_nothing_is_written_where_plain_transformers_cannot_load_it(remedied, tmp_path, monkeypatch):
    def differs(*args, **kwargs):
        model = AutoModelForCausalLM.from_config(remedied.loaded.model.config)
        return model.to(remedied.loaded.model.dtype)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", differs)
    with pytest.raises(sinkscope.InputError, match="loaded again"), run_folder(tmp_path / "out") as folder:
        remedied.write(folder)
    assert list(Path(tmp_path).iterdir()) == []


def test_neurons_whose_weights_are_worked_out_cannot_be_unplugged():
    config = DecoderConfig(**{**preset("tiny"), "feed_forward_variant": "bounded_swiglu"})
    with pytest.raises(sinkscope.InputError, match="computes its weights, so they cannot be set"):
        sinkscope.unplug(Decoder(config), [Neuron(0, None, 3)])


def test_dropout_is_off_while_a_model_writes_its_texts_and_is_checked(tmp_path):
    """Control: dropout changes the logits."""
    model = tiny_model("gpt2", resid_pdrop=0.5, scale=3.0)
    loaded, asked = sinkscope.load(model), dict(bos=None, length=24, num_sequences=4, seed=0)
    expected = _generate_texts(loaded, **asked).ids
    model.train()
    assert torch.equal(_generate_texts(loaded, **asked).ids, expected)
    with run_folder(tmp_path / "out") as folder:
        write_model(loaded, folder)
    assert model.training
    with torch.no_grad():
        assert not torch.equal(model(expected).logits, model(expected).logits)


def test_a_remedied_model_is_no_run_to_report(remedied, tmp_path):
    folder = remedied.save(tmp_path / "out")
    with pytest.raises(sinkscope.InputError, match="a remedied model, not a study or a trace"):
        read_run(folder, of=("study", "trace"))


def test_the_table_below_the_figure_names_models_as_they_are(remedied):
    (figure,) = remedied.figures()
    assert figure.rows[0][0] == "baseline"
