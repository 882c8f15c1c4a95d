"""The audit of a model whose sink is planted: what is predicted, measured, decided and written; each with a control.

Axes: N texts, T positions, V vocabulary.
"""

import json
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
import yaml
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.utils.match import is_match
from planted_models import planted_chain, random_tokens
from safetensors.torch import load_file
from tiny_models import tiny_model
from torch.nn.functional import kl_div, linear

from sinkscope.audits.advice import Trial, decide
from sinkscope.audits.audit import audit
from sinkscope.audits.audit_page import write_page
from sinkscope.audits.cli import show
from sinkscope.audits.damage import Damage, damage, losses
from sinkscope.audits.evaluation import Evaluation, ModelSetup, as_many
from sinkscope.audits.formats import rounded_input
from sinkscope.audits.prediction import InputStatistics, predict
from sinkscope.audits.prefix import SinkPrefix
from sinkscope.audits.recipe import recipe
from sinkscope.audits.schemes import FUSED, cache_scheme, linear_layers, linear_scheme, schemes_of
from sinkscope.audits.static_scales import largest_magnitudes
from sinkscope.audits.texts import texts_to_measure
from sinkscope.errors import InputError
from sinkscope.models.given_ids import given_batch
from sinkscope.models.loading import load

SUPER = "model.layers.2.mlp.down_proj"
"""What reads the super neuron of the planted chain."""
TRIED = {
    "schemes": ["W8A8_STATIC", "W8A8_TENSOR", "W8A8", "FP8_DYNAMIC", "W4A16"],
    "caches": ["fp8", "kivi-4", "window", "window-with-sinks"],
}


@pytest.fixture(scope="module")
def told():
    """What an audit told of its progress."""
    return []


@pytest.fixture(scope="module")
def audited(told):
    model, _ = planted_chain(0)
    model.lm_head.weight.data *= 12  # predictions sharp enough to be spoilt
    return audit(model, length=64, num_sequences=24, **TRIED, progress=lambda *numbers: told.append(numbers))


@pytest.fixture(scope="module")
def tiny():
    model = tiny_model("llama", scale=3.0)
    ids_NT = torch.randint(97, (4, 40), generator=torch.Generator().manual_seed(0))
    return model, ids_NT, largest_magnitudes(model, ids_NT)


def predicted(model, ids_NT, *schemes, is_sink=None, seed=0):
    """The prediction for some schemes, all with the largest magnitudes as their ranges."""
    largest = largest_magnitudes(model, ids_NT)
    is_sink = torch.zeros_like(ids_NT).bool() if is_sink is None else is_sink
    return predict(model, ids_NT, schemes, ranges={s.name: largest for s in schemes}, is_sink=is_sink, seed=seed)


@pytest.mark.parametrize("batch", [1, 4])  # a text a pass, or all at once
def test_a_prediction_is_half_the_squared_product_of_noise_and_gradient(tiny, batch, monkeypatch):
    monkeypatch.setattr("sinkscope.audits.damage.BATCH_TOKENS", 40 * batch)
    model, ids_NT, _ = tiny
    name, scheme = "model.layers.1.mlp.up_proj", linear_scheme("W8A8_TENSOR")
    found = predicted(model, ids_NT, scheme, seed=3)
    layer, generator, expected = linear_layers(model)[name], torch.Generator().manual_seed(3), 0.0
    with scheme.on(model):
        rounded_OI = layer.weight.detach().clone()
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
        rounded = rounded_input(scheme.groups[0].input_activations, kept["x"])
        noise = linear(rounded, rounded_OI) - linear(kept["x"], layer.weight)
        expected += float((kept["y"].grad * noise.detach()).sum(-1).square().sum()) / 2 / 39 / 4
    model.zero_grad()
    assert found.damages[name, scheme.name] == pytest.approx(expected, rel=1e-3)
    assert all(not layer._forward_hooks for layer in linear_layers(model).values()), "left as it was"


def test_the_prediction_is_the_divergence_that_a_small_noise_makes(tiny):
    """In the last layer no token sees another's noise, and the formula is exact to second order."""
    model = tiny[0]
    ids_NT = torch.randint(97, (16, 64), generator=torch.Generator().manual_seed(1))
    scheme, finer, last = linear_scheme("NVFP4A16"), linear_scheme("W8A8"), "model.layers.2.mlp.down_proj"
    prediction = predicted(model, ids_NT, scheme, finer)
    with torch.no_grad():
        plain = model(ids_NT).logits[:, :-1].log_softmax(-1)
        with scheme.on(model, [last]):
            rounded = model(ids_NT).logits[:, :-1].log_softmax(-1)
    divergence = float(kl_div(rounded, plain, log_target=True, reduction="none").sum(-1).mean())
    # A thousand tokens with one drawn target each leave an error of about 5 %.
    assert prediction.damages[last, scheme.name] == pytest.approx(divergence, rel=0.25)
    assert prediction.damages[last, finer.name] < 0.05 * divergence, "the control: other noise"


@pytest.mark.parametrize("family", ["gpt2", "opt", "falcon", "gemma2"])
def test_every_kind_of_module_is_predicted(family):
    """Conv1D, flattened texts, fused projections whose output is changed in place, soft-capping and windows."""
    model, ids_NT = tiny_model(family, scale=3.0), torch.arange(40)[None]
    schemes = schemes_of(["FP8", "W8A8"], ["fp8", "kivi-4", "window"])
    found = predicted(model, ids_NT, *schemes)
    for scheme in schemes:
        assert found.damage(scheme, scheme.modules(model)) > 0
        assert all(np.isfinite(found.damages[name, scheme.name]) for name in scheme.modules(model))


def test_a_window_with_its_sinks_is_one_that_keeps_them(tiny, audited):
    model, ids_NT, _ = tiny
    first = torch.zeros_like(ids_NT).bool()
    first[:, 0] = True
    windows = [cache_scheme("window"), cache_scheme("window-with-sinks")]
    (plain, none), (_, kept) = (
        [found.damage(window, window.modules(model)) for window in windows]
        for found in (predicted(model, ids_NT, *windows, is_sink=sinks) for sinks in (~first & first, first))
    )
    assert none == plain
    assert kept != plain
    evaluation, measured = audited.evaluation, {cell.scheme: cell.measured for cell in audited.at("model")}
    kept_NT = evaluation.losses(windows[0], ModelSetup(model=evaluation.model, tokens_in_16_bits=evaluation.is_sink))
    by_hand = damage(kept_NT, evaluation.baseline, windows[0])
    assert measured["window-with-sinks"].change == pytest.approx(by_hand.change, rel=1e-4)
    assert by_hand.change < measured["window"].change
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
    for scheme in ("W8A8_STATIC", "W8A8_TENSOR"):
        exempt = trials["leave modules in 16 bits", scheme]
        assert exempt.modules[0] == SUPER, "the worst first"
        assert exempt.holds
        assert exempt.share > 0.8
        assert abs(exempt.control.change) < 0.1 * exempt.damage.change, "random modules win nothing back"
    kept = trials["keep tokens", "window"]
    assert not kept.is_loaded
    assert kept.recovered.change > 0.2 * kept.damage.change
    assert kept.control.change < 0.5 * kept.recovered.change, "random positions win next to nothing back"
    assert audited.evaluation.is_sink[:, 0].all()
    assert audited.evaluation.is_sink[:, 1:].sum() < 4, "hardly any token inside a text"
    assert [trial.recovered.change for trial in audited.advice] == sorted(
        (trial.recovered.change for trial in audited.advice), reverse=True
    )


def test_what_is_decided_of_the_planted_sink(audited):
    """8 bits with a scale a token are safe, with a scale a tensor they can be repaired, and a window cannot."""
    verdicts = {decision.scheme: decision.verdict for decision in audited.decisions}
    assert (verdicts["W8A8"], verdicts["cache-fp8"]) == ("safe", "safe")
    assert verdicts["W8A8_STATIC"] == verdicts["W8A8_TENSOR"] == "repair"
    assert verdicts["window"] == "avoid"
    assert audited.best.scheme in ("W8A8", "FP8_DYNAMIC")
    assert audited.best.repair is None
    assert audited.summary["best"] == audited.best.scheme
    assert f"The cheapest for linear layers is {audited.best.scheme}, safe as it is" in audited.story
    assert "208 inputs" in audited.not_possible["W4A16"] or "64 inputs" in audited.not_possible["W4A16"]
    points = [point for point in audited.points if point.scheme == "W8A8_STATIC"]
    (trial,) = (t for t in audited.trials if (t.scheme, t.remedy) == ("W8A8_STATIC", "leave modules in 16 bits"))
    assert (points[-1].bits, points[-1].remaining) == (trial.bits, trial.remaining)
    assert [point.bits for point in points] == sorted(point.bits for point in points)


def cost(change, low, high):
    return Damage(change=change, low=low, high=high, by_text=())


@pytest.mark.parametrize(
    ("damage", "left", "is_loaded", "verdict"),
    [
        (cost(0.01, 0.005, 0.015), None, True, "safe"),
        (cost(0.01, -0.01, 0.03), None, True, "undecided"),
        (cost(0.5, -0.1, 1.1), None, True, "undecided"),
        (cost(0.5, 0.4, 0.6), cost(0.03, 0.02, 0.04), True, "repair"),
        (cost(0.5, 0.4, 0.6), cost(0.03, 0.02, 0.04), False, "avoid"),  # an experiment
        (cost(0.5, 0.4, 0.6), cost(0.2, 0.1, 0.3), True, "avoid"),
        (cost(0.5, 0.4, 0.6), None, True, "avoid"),
    ],
)
def test_a_decision_follows_from_intervals(damage, left, is_loaded, verdict):
    trials = []
    if left is not None:
        won = cost(0.4, 0.3, 0.5)
        others = {"damage": damage, "recovered": won, "beyond_control": won, "control": cost(0, -0.1, 0.1)}
        trials = [
            Trial(
                remedy="x", scheme="FP8", remaining=left, what="", control_is="", is_loaded=is_loaded, bits=9, **others
            )
        ]
    decision = decide(linear_scheme("FP8"), damage, 8.0, trials)
    assert decision.verdict == verdict
    assert decision.bits == (9 if verdict == "repair" else 8)
    assert decide(linear_scheme("FP8_DYNAMIC"), damage, 8.0, trials).repair is None, "the control: of another scheme"


def test_one_group_of_one_layer_is_guilty_and_stays_in_16_bits_as_a_whole():
    """A channel of what q, k and v of layer 1 read is large, and only v depends on the others."""
    model = tiny_model("llama", scale=4.0)
    attention, norm = model.model.layers[1].self_attn, model.model.layers[1].input_layernorm
    norm.weight.data[0] *= 3000
    for part in "qkv":
        getattr(attention, f"{part}_proj").weight.data[:, 0] = 0
    model.lm_head.weight.data *= 3
    found = audit(model, schemes=["W8A8_STATIC"], length=64, num_sequences=12, budget=2)
    (trial,) = (trial for trial in found.trials if trial.remedy == "leave modules in 16 bits")
    assert trial.modules[:3] == tuple(f"model.layers.1.self_attn.{part}_proj" for part in "qkv")
    assert "fused with a guilty one" in trial.what
    assert trial.share > 0.8
    assert abs(trial.control.change) < 0.2 * trial.damage.change
    small = replace(found.evaluation, budget=0.1)
    assert small.worst_groups(*small.schemes) == {}, "the control: nothing fits"


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
    sixteen = linear_scheme("W8A8_TENSOR").control()
    evaluation = Evaluation(loaded=loaded, batch=given_batch(ids, model=model), schemes=(sixteen,))
    held_out_NT, prefix = evaluation.held_out.ids, evaluation.prefix
    assert np.array_equal(evaluation.baseline, losses(model, held_out_NT)[:, 1:]), "what follows BOS is not counted"
    after = losses(model, torch.cat([torch.tensor(prefix.ids).expand(4, -1), held_out_NT[:, 1:]], 1))
    after_prefix = evaluation.losses(sixteen, ModelSetup(model=model, prefix=prefix))
    assert np.allclose(after_prefix, after[:, len(prefix.ids) :], atol=1e-3)
    assert evaluation.losses(sixteen).shape == evaluation.baseline.shape


def test_many_bits_and_all_keys_change_nothing_and_a_control_that_does_is_marked(audited, tmp_path, capsys):
    for cell in audited.at("model"):
        assert abs(cell.control) < 1e-3
        assert not cell.control_fails
    assert audited.failed_controls == []
    worst = max(audited.at("model"), key=lambda cell: cell.measured.change)
    assert worst.measured.low > 1e-3, "the control of the control"
    assert len(audited.at("group")) == 3 * len(audited.at("model"))
    cells = [replace(cell, control=0.034) if cell.scheme == "W8A8" else cell for cell in audited.cells]
    failing = replace(audited, cells=tuple(cells))
    assert "Don't trust W8A8: the control" in failing.story
    failing.report(tmp_path / "page.html", overwrite=True)
    assert "+0.0340, fails" in (tmp_path / "page.html").read_text()
    show(failing, tmp_path)
    assert "The control of W8A8, in 24 bits, changed the loss by +0.0340" in " ".join(capsys.readouterr().out.split())


def test_the_sums_of_groups_are_those_of_the_model(audited):
    for cell in audited.at("model"):
        parts = [part.predicted for part in audited.at("group") if part.scheme == cell.scheme]
        assert sum(parts) == pytest.approx(cell.predicted)


def test_a_run_folder_holds_the_recipe_and_the_page(audited, tmp_path, capsys):
    folder = audited.save(tmp_path / "run")
    written = json.loads((folder / "recipe.json").read_text())["schemes"]
    first = written["W8A8_STATIC"]["steps"][0]
    assert 0 < first["recovers_low"] < first["recovers"] < first["recovers_high"]
    assert written["W8A8"] | {"steps": []} == written["W8A8"]
    assert written["W8A8"]["verdict"] == "safe"
    assert json.loads((folder / "summary.json").read_text())["kind"] == "audit"
    run = replace(audited.as_run(), config={"command": "sinkscope audit <b>"})
    write_page(run, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert SUPER in page
    assert "No engine reads these" in page
    assert "sinkscope audit <b>" not in page, "escaped"
    show(audited, folder)
    said = " ".join(capsys.readouterr().out.split())
    assert "what helps, the largest effect first" in said
    assert "The cheapest for linear layers is" in said
    assert "24 held-out texts of 64 tokens, written by the model itself" in said
    show(replace(audited, batch=replace(audited.batch, source="book.txt")), folder)
    assert "24 held-out texts of 64 tokens, from book.txt" in " ".join(capsys.readouterr().out.split())


def is_fused_alike(model, ignore):
    """vLLM's rule: of the modules that it multiplies as one, all are left out or none is."""
    left_out = {name: is_match(name, part, ignore) for name, part in linear_layers(model).items()}
    for name in left_out:
        parent, _, last = name.rpartition(".")
        for parts in FUSED.values():
            siblings = [f"{parent}.{part}" for part in parts if last in parts]
            if len({left_out[sibling] for sibling in siblings if sibling in left_out}) > 1:
                return False
    return True


def test_every_file_is_read_by_its_package_and_by_the_rule_for_fused_layers(audited, tmp_path):
    folder, model = audited.save(tmp_path / "run"), audited.evaluation.model
    usable = [d for d in audited.decisions if d.what == "linear" and d.verdict in ("safe", "repair")]
    assert {path.name for path in folder.glob("compressed-tensors-*.json")} == {
        f"compressed-tensors-{decision.scheme}.json" for decision in usable
    }
    for decision in usable:
        content = json.loads((folder / f"compressed-tensors-{decision.scheme}.json").read_text())
        config, quantised = QuantizationConfig.model_validate(content), planted_chain(0)[0]
        apply_quantization_config(quantised, config, show_progress=False)
        left_out = {name for name in linear_layers(model) if not hasattr(quantised.get_submodule(name), "weight_scale")}
        modules = set(decision.repair.modules if decision.repair else ())
        assert left_out == modules
        assert not hasattr(quantised.lm_head, "weight_scale")
        assert config.config_groups["group_0"].weights.num_bits == 8
        recipe_of = yaml.safe_load((folder / f"llm-compressor-{decision.scheme}.yaml").read_text())
        modifier = recipe_of["quant_stage"]["quant_modifiers"]["QuantizationModifier"]
        by_torchao = json.loads((folder / f"torchao-{decision.scheme}.json").read_text())["modules_to_not_convert"]
        assert modifier["ignore"] == by_torchao == config.ignore
        assert QuantizationConfig.model_validate(modifier).config_groups == config.config_groups
        assert is_fused_alike(model, config.ignore)
    assert not is_fused_alike(model, ["model.layers.0.self_attn.q_proj"]), "the control"
    assert yaml.safe_load((folder / "vllm.yaml").read_text()) == {"kv-cache-dtype": "fp8"}
    scales = load_file(folder / "kv_cache_scales.safetensors")
    largest = audited.evaluation.largest["model.layers.1.self_attn"]
    assert float(scales["model.layers.1.self_attn.k_scale"]) == pytest.approx(float(largest[0].max()) / 448)


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


def test_the_recipe_names_the_tokens_of_a_prefix(audited):
    trial = replace(audited.advice[0], remedy="prefix", scheme="W8A8_STATIC")
    evaluation = replace(audited.evaluation)
    vars(evaluation)["prefix"] = SinkPrefix(ids=(3, 5), layers=(), fired=(1.0, 0.0), config=None)  # what a trial leaves
    step = recipe(audited.loaded, evaluation, audited.decisions, [trial])["schemes"]["W8A8_STATIC"]["steps"][0]
    assert step["token_ids"] == [3, 5]


def test_too_few_texts_to_decide_are_said_first(audited):
    def wide(cell):
        return replace(cell, measured=replace(cell.measured, change=0.01, low=-1.0, high=1.0))

    story = replace(audited, cells=tuple(map(wide, audited.cells)), trials=()).story
    assert story.split("nats a token. ")[1].startswith("Too few texts to decide on W8A8_STATIC")
    assert "No scheme of linear layers is safe" in story
    assert "Too few" not in audited.story, "the control"


def test_progress_counts_what_is_left_from_the_first_pass_on(told):
    """Before the prediction every scheme may need remedies; after it, and after the measurements, fewer are left."""
    done, totals = [number for number, _ in told], [total for _, total in told]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] == totals[-1]
    assert totals[0] >= totals[-1]


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
        ({"budget": -1}, "`budget` must be from 0 to 16"),
        ({"schemes": ["W4A16"]}, "W4A16 cannot be audited here: in model.layers.0"),
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
        off = audit(model, ids, length=64, num_sequences=4, schemes=["FP8"])
        assert not [name for name in linear_layers(model) if "lora" in name]
    plain = audit(tiny_model("llama"), ids, length=64, num_sequences=4, schemes=["FP8"])
    assert off.summary["schemes"] == plain.summary["schemes"]
    assert [name for name in linear_layers(model) if "lora" in name]


def test_a_model_that_overflows_is_refused():
    model = tiny_model("llama")
    model.model.layers[0].mlp.down_proj.weight.data[:] = np.inf
    with pytest.raises(InputError, match="infinity"):
        audit(model, torch.zeros(10, 64, dtype=torch.long), length=64)
