"""The audit of a model whose sink is planted: what is predicted, measured, advised and written; each with a control.

Axes: N texts, T positions, V vocabulary.
"""

import json
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import peft
import pytest
import torch
import yaml
from planted_models import planted_chain, random_tokens
from tiny_models import tiny_model
from torch.nn.functional import kl_div, linear

from sinkscope.audits.advice import Trial
from sinkscope.audits.audit import audit
from sinkscope.audits.audit_page import write_page
from sinkscope.audits.cli import show
from sinkscope.audits.damage import Damage, damage, losses
from sinkscope.audits.evaluation import Evaluation, ModelSetup, as_many
from sinkscope.audits.prediction import InputStatistics, predict
from sinkscope.audits.prefix import SinkPrefix
from sinkscope.audits.recipe import recipe
from sinkscope.audits.schemes import SCHEMES, linear_layers, rounded_input
from sinkscope.audits.static_scales import least_error_ranges
from sinkscope.audits.texts import texts_to_measure
from sinkscope.errors import InputError
from sinkscope.models.given_ids import given_batch
from sinkscope.models.loading import load

SUPER = "model.layers.2.mlp.down_proj"
"""What reads the super neuron of the planted chain."""


@pytest.fixture(scope="module")
def told():
    """What an audit told of its progress."""
    return []


@pytest.fixture(scope="module")
def audited(told):
    model, _ = planted_chain(0)
    model.lm_head.weight.data *= 12  # predictions sharp enough to be spoilt
    return audit(model, length=64, num_sequences=24, progress=lambda *numbers: told.append(numbers))


@pytest.fixture(scope="module")
def tiny():
    model = tiny_model("llama", scale=3.0)
    ids_NT = torch.randint(97, (4, 40), generator=torch.Generator().manual_seed(0))
    return model, ids_NT, least_error_ranges(model, ids_NT)


def test_a_prediction_is_half_the_squared_product_of_noise_and_gradient(tiny):
    model, ids_NT, ranges = tiny
    name, scheme = "model.layers.1.mlp.up_proj", SCHEMES["activations-8-dynamic"]
    found = predict(model, ids_NT, ranges=ranges, is_sink=torch.zeros_like(ids_NT).bool(), seed=3)
    layer, generator, expected = linear_layers(model)[name], torch.Generator().manual_seed(3), 0.0
    for ids_T in ids_NT:
        kept = {}

        def keep(module, args, output, kept=kept):
            output.retain_grad()
            kept.update(x=args[0], y=output)

        handle = layer.register_forward_hook(keep)
        logits_TV = model(ids_T[None]).logits[0, :-1]
        handle.remove()
        targets = torch.multinomial(logits_TV.detach().softmax(-1), 1, generator=generator)[:, 0]
        torch.nn.functional.cross_entropy(logits_TV, targets, reduction="sum").backward()
        noise = linear(rounded_input(scheme, kept["x"]) - kept["x"], layer.weight)
        expected += float((kept["y"].grad * noise.detach()).sum(-1).square().sum()) / 2 / 39 / 4
    model.zero_grad()
    assert found.damages[name, scheme.name] == pytest.approx(expected, rel=1e-4)
    assert all(not layer._forward_hooks for layer in linear_layers(model).values()), "left as it was"


def test_the_prediction_is_the_divergence_that_a_small_noise_makes(tiny):
    """In the last layer no token sees another's noise, and the formula is exact to second order."""
    model, ids_NT, ranges = tiny
    ids_NT = torch.randint(97, (16, 64), generator=torch.Generator().manual_seed(1))
    prediction = predict(model, ids_NT, ranges=ranges, is_sink=torch.zeros_like(ids_NT).bool())
    scheme, last = SCHEMES["weights-4-channel"], "model.layers.2.mlp.down_proj"
    with torch.no_grad():
        plain = model(ids_NT).logits[:, :-1].log_softmax(-1)
        with scheme.on(model, [last]):
            rounded = model(ids_NT).logits[:, :-1].log_softmax(-1)
    divergence = float(kl_div(rounded, plain, log_target=True, reduction="none").sum(-1).mean())
    # A thousand tokens with one drawn target each leave an error of about 5 %.
    assert prediction.damages[last, scheme.name] == pytest.approx(divergence, rel=0.25)
    assert prediction.damages[last, "weights-8-channel"] < 0.01 * divergence, "the control: other noise"


@pytest.mark.parametrize("family", ["gpt2", "opt", "falcon", "gemma2"])
def test_every_kind_of_module_is_predicted(family):
    """Conv1D, flattened texts, fused projections whose output is changed in place, soft-capping and windows."""
    model, ids_NT = tiny_model(family, scale=3.0), torch.arange(40)[None]
    found = predict(model, ids_NT, ranges=least_error_ranges(model, ids_NT), is_sink=torch.zeros_like(ids_NT).bool())
    for scheme in SCHEMES.values():
        assert found.damage(scheme, scheme.modules(model)) > 0
        assert all(np.isfinite(found.damages[name, scheme.name]) for name in scheme.modules(model))


def test_a_window_with_its_sinks_is_one_that_keeps_them(tiny, audited):
    model, ids_NT, ranges = tiny
    first = torch.zeros_like(ids_NT).bool()
    first[:, 0] = True
    (plain, none), (_, kept) = (
        [found.damage(SCHEMES[name], SCHEMES[name].modules(model)) for name in ("window", "window-with-sinks")]
        for found in (predict(model, ids_NT, ranges=ranges, is_sink=sinks) for sinks in (~first & first, first))
    )
    assert none == plain
    assert kept != plain
    evaluation, measured = audited.evaluation, {cell.scheme: cell.measured for cell in audited.at("model")}
    kept_NT = evaluation.losses(
        SCHEMES["window"], ModelSetup(model=evaluation.model, tokens_in_16_bits=evaluation.is_sink)
    )
    by_hand = damage(kept_NT, evaluation.baseline, SCHEMES["window"])
    assert measured["window-with-sinks"].change == by_hand.change < measured["window"].change
    assert "window-with-sinks" not in {trial.scheme for trial in audited.trials}, "nothing is left to keep"


def test_statistics_of_inputs_by_hand():
    x_BTE, statistics = torch.tensor([[[3.0, -1.0], [0.0, 2.0]], [[1.0, 1.0], [1.0, 1.0]]]), InputStatistics()
    is_sink_BT = torch.tensor([[True, False], [False, False]])
    for text in range(2):  # in two passes
        statistics.add(x_BTE[text : text + 1], is_sink_BT[text : text + 1])
    values = x_BTE.flatten().double().numpy()
    central = values - values.mean()
    row = statistics.row()
    assert row["largest"] == 3
    assert row["channel_ratio"] == 1.5, "3 over the lower one of two"
    assert row["token_ratio"] == 3, "of 3, 2, 1 and 1 the lower median is 1"
    assert row["kurtosis"] == pytest.approx((central**4).mean() / (central**2).mean() ** 2)
    assert row["sink_energy"] == pytest.approx(10 / 18)
    assert row["massive_energy"] == 0


def test_the_module_that_reads_the_super_neuron_is_worst_and_in_16_bits_recovers_the_damage(audited):
    assert SUPER in [cell.place for cell in audited.at("module")]
    trials = {(trial.remedy, trial.scheme): trial for trial in audited.trials}
    for scheme in ("activations-8-static", "activations-8-dynamic"):
        modules_in_16_bits = trials["leave modules in 16 bits", scheme]
        assert modules_in_16_bits.what.split(", ")[0] == SUPER, "the worst first"
        assert modules_in_16_bits.holds
        assert modules_in_16_bits.share > 0.8
        assert abs(modules_in_16_bits.control.change) < 0.1 * modules_in_16_bits.damage.change, (
            "random modules win nothing back"
        )
        kept = trials["keep tokens", scheme]
        assert kept.holds
        assert kept.share > 0.7
        assert kept.control.change < 0.3 * kept.damage.change, "random positions win next to nothing back"
    assert audited.evaluation.is_sink[:, 0].all()
    assert audited.evaluation.is_sink[:, 1:].sum() < 4, "hardly any token inside a text"
    assert [trial.recovered.change for trial in audited.advice] == sorted(
        (trial.recovered.change for trial in audited.advice), reverse=True
    )


def test_torchao_is_asked_where_it_is_installed(audited):
    assert (audited.by_torchao is not None) == (find_spec("torchao") is not None)
    assert replace(audited, by_torchao=None).summary["torchao"] is None

    def says(*changes):
        found = (Damage(change=change, low=0.0, high=0.0, by_text=()) for change in changes)
        return replace(audited, by_torchao=tuple(found)).summary["torchao"]

    assert says(0.66, 0.68) == (
        "torchao agrees: 8-bit activations (per tensor, dynamic) with 8-bit weights (per channel) cost "
        "+0.6600 for real, +0.6800 emulated."
    )
    assert says(-0.002, 0.003).startswith("torchao agrees")
    assert says(0.02, 0.04).startswith("torchao does not agree")
    assert says(0.6, 0.68).startswith("torchao does not agree")
    if audited.by_torchao is not None:
        emulated = audited.by_torchao[1].change
        assert "torchao agrees" in audited.torchao_says
        by_weights = next(cell.measured for cell in audited.at("model") if cell.scheme == "weights-8-channel")
        assert "does not agree" in says(by_weights.change, emulated), "weights alone do not make this damage"


def test_texts_may_begin_with_bos_which_no_prefix_is_followed_by():
    model, facts = planted_chain(0)
    model.config.bos_token_id = 5
    loaded = load(model)
    for bos in (True, False):
        written = texts_to_measure(loaded, None, bos=bos, length=4, num_sequences=1, seed=0)
        assert written.bos == bos == bool((written.ids[:, 0] == 5).all())
    ids = random_tokens(facts, num_sequences=20, length=32)
    with pytest.raises(InputError, match="Leave `bos` out"):
        texts_to_measure(loaded, ids, bos=True, length=32, num_sequences=4, seed=0)
    ids[:, 0] = 5
    evaluation = Evaluation(loaded=loaded, batch=given_batch(ids, model=model))
    held_out_NT, prefix = evaluation.held_out.ids, evaluation.prefix
    assert np.array_equal(evaluation.baseline, losses(model, held_out_NT)[:, 1:]), "what follows BOS is not counted"
    sixteen = SCHEMES["activations-8-dynamic"].control()
    after = losses(model, torch.cat([torch.tensor(prefix.ids).expand(4, -1), held_out_NT[:, 1:]], 1))
    after_prefix = evaluation.losses(sixteen, ModelSetup(model=model, prefix=prefix))
    assert np.allclose(after_prefix, after[:, len(prefix.ids) :], atol=1e-3)
    assert evaluation.losses(sixteen).shape == evaluation.baseline.shape


def test_sixteen_bits_and_all_keys_change_nothing(audited):
    for cell in audited.at("model"):
        assert abs(cell.control) < 1e-3
        assert audited.evaluation.prediction.damage(SCHEMES[cell.scheme], []) == 0
    held_out = least_error_ranges(audited.evaluation.model, audited.evaluation.held_out.ids, bits=16)
    assert all(largest < audited.evaluation.control_ranges[name] for name, largest in held_out.items()), "nor clips"
    worst = max(audited.at("model"), key=lambda cell: cell.measured.change)
    assert worst.measured.low > 1e-3, "the control of the control"
    assert len(audited.at("group")) == 33


def test_the_sums_of_groups_are_those_of_the_model(audited):
    for cell in audited.at("model"):
        parts = [part.predicted for part in audited.at("group") if part.scheme == cell.scheme]
        assert sum(parts) == pytest.approx(cell.predicted)


def test_a_run_folder_holds_the_recipe_and_the_page(audited, tmp_path, capsys):
    folder = audited.save(tmp_path / "run")
    assert SUPER in json.loads((folder / "torchao.json").read_text())["modules_to_not_convert"]
    assert f"- {SUPER}" in (folder / "llm-compressor.yaml").read_text()
    kept = json.loads((folder / "kept_positions.json").read_text())
    assert kept == [row.nonzero().flatten().tolist() for row in audited.evaluation.is_sink]
    assert [0] in kept
    written = json.loads((folder / "recipe.json").read_text())
    assert not written["nothing_needed"]
    first = written["schemes"]["activations-8-static"][0]
    assert 0 < first["recovers_low"] < first["recovers"] < first["recovers_high"]
    assert written["schemes"]["weights-8-channel"] == []
    assert json.loads((folder / "summary.json").read_text())["kind"] == "audit"
    run = replace(audited.as_run(), config={"command": "sinkscope audit <b>"})
    write_page(run, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert SUPER in page
    assert "sinkscope audit <b>" not in page, "escaped"
    show(audited, folder)
    said = " ".join(capsys.readouterr().out.split())
    assert "leave modules in 16 bits" in said
    assert "24 held-out texts of 64 tokens, written by the model itself" in said
    show(replace(audited, batch=replace(audited.batch, source="book.txt")), folder)
    assert "24 held-out texts of 64 tokens, from book.txt" in " ".join(capsys.readouterr().out.split())


def test_the_page_shows_the_sinks_in_their_texts(audited, tmp_path):
    class Words:
        def decode(self, ids):
            return "".join(f" <w{number}>" for number in ids)

    told = replace(audited, loaded=replace(audited.loaded, tokenizer=Words()))
    text, position = audited.evaluation.is_sink.nonzero().tolist()[0]
    ids = audited.batch.ids[text].tolist()
    assert position == 0
    rows = told.tables["sink_tokens"]
    assert (rows["before"][0], rows["token_text"][0]) == ("", f" <w{ids[0]}>")
    assert rows["after"][0] == "".join(f" <w{number}>" for number in ids[1:9])
    told.report(tmp_path / "page.html", overwrite=True)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"text {text}, position 0: <bdi><mark>\N{OPEN BOX}&lt;w{ids[0]}&gt;</mark> &lt;w{ids[1]}&gt;" in page
    audited.report(tmp_path / "page.html", overwrite=True)
    assert "<mark>" not in (tmp_path / "page.html").read_text(encoding="utf-8"), "without a tokenizer"


@pytest.mark.parametrize("advised", ["activations-8-static", "activations-8-dynamic", "activations-8-token"])
def test_each_tool_is_given_the_modules_of_the_scheme_that_it_is_told_to_use(audited, tmp_path, advised):
    trials = [replace(trial, scheme=advised) for trial in audited.advice if trial.remedy == "leave modules in 16 bits"]
    folder = replace(audited, trials=tuple(trials[:1])).save(tmp_path / "run")
    by_torchao = json.loads((folder / "torchao.json").read_text())["modules_to_not_convert"]
    stage = yaml.safe_load((folder / "llm-compressor.yaml").read_text())["quant_stage"]["quant_modifiers"]
    modifier = stage["QuantizationModifier"]
    modules = {
        name: list(audited.evaluation.worst_modules(SCHEMES[name])) if name == advised else [] for name in SCHEMES
    }
    assert by_torchao == ["lm_head", *modules["activations-8-dynamic"]]
    assert modifier["ignore"] == ["lm_head", *modules["activations-8-static"]]
    assert "scheme" not in modifier, "a preset would take the place of the group"
    group = modifier["config_groups"]["group_0"]
    inputs, weights = group["input_activations"], group["weights"]
    assert (inputs["strategy"], weights["strategy"], group["targets"]) == ("tensor", "channel", ["Linear"])
    for each in (inputs, weights):
        assert (each["num_bits"], each["type"], each["symmetric"], each["dynamic"]) == (8, "int", True, False)


def test_the_recipe_names_the_tokens_of_a_prefix(audited):
    trial = replace(audited.advice[0], remedy="prefix", scheme="activations-8-static")
    prefix = SinkPrefix(ids=(3, 5), layers=(), fired=(1.0, 0.0), config=None)
    evaluation = replace(audited.evaluation)
    vars(evaluation)["prefix"] = prefix  # what a trial leaves there
    step = recipe(audited.loaded, evaluation, [trial])["schemes"]["activations-8-static"][0]
    assert step["token_ids"] == [3, 5]


def test_nothing_is_needed_only_where_no_scheme_costs_anything(audited, tmp_path):
    """Where schemes cost something and nothing is advised, the reason is said."""

    def written(found):
        found.report(tmp_path / "page.html", overwrite=True)
        told = json.loads((found.save(tmp_path / "run", overwrite=True) / "recipe.json").read_text())
        assert told["why_nothing"] == found.summary["why_nothing"]
        return told, (tmp_path / "page.html").read_text()

    trials = [replace(trial, recovered=replace(trial.recovered, low=-1.0)) for trial in audited.trials]
    told, page = written(replace(audited, trials=tuple(trials)))
    assert (told["nothing_needed"], told["why_nothing"]) == (False, "no remedy recovers more than its control")
    assert "Nothing helps: no remedy" in page
    no_sinks = replace(audited.evaluation)
    vars(no_sinks)["sinks"] = torch.zeros_like(audited.evaluation.sinks)
    told, page = written(replace(audited, trials=(), evaluation=no_sinks))
    assert (told["nothing_needed"], "no remedy was tried" in told["why_nothing"]) == (False, True)
    assert "Nothing to do: no token" in page
    unseen = [replace(cell, measured=replace(cell.measured, low=-1.0)) for cell in audited.cells]
    told, page = written(replace(audited, trials=(), cells=tuple(unseen)))
    assert (told["nothing_needed"], told["why_nothing"]) == (True, "no scheme clearly costs 0.01 nats a token")
    assert "Nothing needed: no scheme" in page
    told, page = written(audited)
    assert (told["nothing_needed"], told["why_nothing"]) == (False, None)
    assert "Nothing" not in page


def test_measurements_are_counted_from_before_the_prediction_to_the_last(audited, told):
    assert [done for done, _ in told] == list(range(len(told)))
    assert told[0] == (0, 60)
    assert told[-1] == (60 + len(audited.trials),) * 2


def test_a_trial_holds_only_above_its_control():
    def damage(change, low, high):
        return Damage(change=change, low=low, high=high, by_text=())

    def trial(recovered, beyond_control):
        others = {"damage": damage(1.0, 0.9, 1.1), "remaining": damage(0.0, 0.0, 0.0), "what": "", "control_is": ""}
        others |= {"recovered": recovered, "beyond_control": beyond_control, "control": damage(0.1, 0.0, 0.2)}
        return Trial(remedy="x", scheme="window", **others)

    assert trial(damage(0.5, 0.4, 0.6), damage(0.4, 0.3, 0.5)).holds
    assert not trial(damage(0.5, 0.4, 0.6), damage(0.1, -0.1, 0.3)).holds
    assert not trial(damage(0.1, -0.1, 0.3), damage(0.4, 0.3, 0.5)).holds


def test_as_many_random_tokens_are_none_of_the_sinks():
    mask_NT = torch.zeros(2, 40, dtype=torch.bool)
    mask_NT[0, :3] = True
    others_NT = as_many(mask_NT, torch.Generator().manual_seed(0))
    assert others_NT.sum(1).tolist() == [3, 0]
    assert not (others_NT & mask_NT).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 63}, "`length` must be at least 64, not 63"),
        ({"num_sequences": 1}, "`num_sequences` must be at least 2, not 1"),
        ({"text": "nowhere.txt"}, "no file nowhere.txt"),
        ({"text": torch.full((12, 64), 97)}, "Token ids must be from 0 to 96, not 97"),
        ({"text": torch.zeros(17, 64, dtype=torch.long)}, "17 texts, but at least 18 are needed"),
    ],
)
def test_what_cannot_be_audited_is_refused(tiny, options, message):
    with pytest.raises(InputError, match=message):
        audit(tiny[0], **options)


def test_a_model_whose_adapter_is_off_is_audited_as_it_is_without_it():
    """Its factors are modules that no pass calls; with the adapter on they are rounded as all linear layers are."""
    ids = torch.randint(10, 97, (22, 64), generator=torch.Generator().manual_seed(0))
    config = peft.LoraConfig(target_modules=["down_proj", "q_proj"], r=4, init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("llama"), config)
    with model.disable_adapter():
        off = audit(model, ids, length=64, num_sequences=4)
        assert not [name for name in linear_layers(model) if "lora" in name]
    assert off.summary["schemes"] == audit(tiny_model("llama"), ids, length=64, num_sequences=4).summary["schemes"]
    assert [name for name in linear_layers(model) if "lora" in name]


def test_a_model_that_overflows_is_refused():
    model = tiny_model("llama")
    model.model.layers[0].mlp.down_proj.weight.data[:] = np.inf
    with pytest.raises(InputError, match="infinity"):
        audit(model, torch.zeros(10, 64, dtype=torch.long), length=64)
