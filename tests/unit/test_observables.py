"""Observables: a user's own is recorded, joined, tabulated and written like ours; what nobody knows is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

import sinkscope
from sinkscope.models.anatomy import anatomy_of
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.decoder_config import DecoderConfig
from sinkscope.results.run_folder import run_folder
from sinkscope.results.tables import read_table
from sinkscope.tracing.observables import CHAIN, HookPoint, Observable
from sinkscope.tracing.recorder import Recorder
from sinkscope.tracing.reducers import Cosine, Largest, Mean, Moments, Rows, Total

IDS = torch.randint(3, 97, (5, 24), generator=torch.Generator().manual_seed(0))

# The example of CONTRIBUTING.md.
RESIDUAL_NORM = Observable(
    name="residual_norm",
    hook_point=HookPoint.RESIDUAL_OUT,
    value=lambda call: call.residual.norm(dim=-1),
    reducer=Mean(),
    axes="LT",
    meaning="Euclidean norm of the residual that leaves the layer, mean over sequences",
)


@pytest.fixture(scope="module")
def expected():
    """[L, T] by plain hooks."""
    model, leaving = tiny_model("llama"), []
    handles = [
        block.register_forward_hook(lambda *call: leaving.append(call[2].double())) for block in model.model.layers
    ]
    with torch.no_grad():
        model(IDS)
    for handle in handles:
        handle.remove()
    return torch.stack([hidden.square().sum(-1).sqrt().mean(0) for hidden in leaving])


@pytest.mark.parametrize("chunk_tokens", [1 << 17, 2 * 24])
def test_a_users_own_observable_stands_in_tables_and_in_parquet(expected, chunk_tokens, tmp_path):
    found = sinkscope.trace(tiny_model("llama"), IDS, observables=[*CHAIN, RESIDUAL_NORM], chunk_tokens=chunk_tokens)
    torch.testing.assert_close(found.recording["residual_norm"].double(), expected, rtol=1e-5, atol=0)
    np.testing.assert_array_equal(
        found.tables["positions"]["residual_norm"], found.recording["residual_norm"].flatten()
    )
    with run_folder(tmp_path / "run") as folder:
        found.write(folder)
    table = read_table(tmp_path / "run" / "positions")
    np.testing.assert_allclose(table["residual_norm"], expected.flatten(), rtol=1e-5)
    assert "dom_ratio" in table, "and those of the chain are still there"
    assert found.story


def test_observables_by_name_are_all_that_is_recorded(tmp_path):
    found = sinkscope.trace(tiny_model("llama"), IDS, observables=["dom_ratio", "entropy_by_head", RESIDUAL_NORM])
    whole = sinkscope.trace(tiny_model("llama"), IDS)
    assert set(found.recording.by_layer) == {"dom_ratio", "entropy_by_head", "residual_norm"}
    assert found.tables.keys() == {"positions", "heads"}
    np.testing.assert_array_equal(found.tables["positions"]["dom_ratio"], whole.tables["positions"]["dom_ratio"])
    assert list(found.tables["heads"]) == ["layer", "head", "entropy"]
    with run_folder(tmp_path / "run") as folder:
        found.write(folder)
    assert sorted(path.name for path in (tmp_path / "run").glob("*.parquet")) == ["heads.parquet", "positions.parquet"]
    with pytest.raises(sinkscope.InputError, match="sink_heads"):
        _ = found.summary


def test_observables_that_nobody_knows_or_that_share_a_name_are_refused():
    with pytest.raises(sinkscope.InputError, match="dom_ration"):
        sinkscope.trace(tiny_model("llama"), IDS, observables=["dom_ration"])
    impostor = Observable(
        name="dom_ratio",
        hook_point=HookPoint.NEURONS,
        value=lambda call: None,
        reducer=Mean(),
        axes="LT",
        meaning="another",
    )
    with pytest.raises(sinkscope.InputError, match="two observables named dom_ratio"):
        sinkscope.trace(tiny_model("llama"), IDS, observables=[*CHAIN, impostor])


def test_a_column_without_a_meaning_is_refused():
    with pytest.raises(sinkscope.InputError, match=r"residual_norm becomes a column of the table .* has no `meaning`"):
        sinkscope.trace(tiny_model("llama"), IDS, observables=[replace(RESIDUAL_NORM, meaning="")])
    silent = replace(RESIDUAL_NORM, axes="", meaning="")
    found = sinkscope.trace(tiny_model("llama"), IDS, observables=["dom_ratio", silent])
    assert "residual_norm" in found.recording, "what fills no table needs none"
    assert "residual_norm" not in found.tables["positions"]


def test_every_observable_says_what_it_means_and_has_a_name_of_its_own():
    assert len({observable.name for observable in CHAIN}) == len(CHAIN)
    assert all(len(observable.meaning) > 10 for observable in CHAIN)


def joined(reducer, values, parts):
    found = [
        reducer.of(tuple(x[part] for x in values) if isinstance(values, tuple) else values[part], True)
        for part in parts
    ]
    while len(found) > 1:
        found[:2] = [reducer.join(found[0], found[1])]
    return reducer.result(found[0])


PARTS = ([slice(0, 7)], [slice(0, 3), slice(3, 4), slice(4, 7)])


@pytest.mark.parametrize("parts", PARTS, ids=["whole", "in parts"])
def test_reducers_against_their_definitions(parts):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 4, 5, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(joined(Mean(), x, parts)[""], x.mean(0))
    torch.testing.assert_close(joined(Rows(), x, parts)[""], x)
    torch.testing.assert_close(joined(Rows(2), x, parts)[""], x[:2])
    moments = joined(Moments(), x, parts)
    torch.testing.assert_close(moments[""], x.var(0).mean(-1))
    torch.testing.assert_close(moments["_by_channel"], x.var(0).mean(0))
    largest = joined(Largest("place"), (x, torch.arange(7)[:, None, None].expand(7, 4, 5)), parts)
    torch.testing.assert_close(largest[""], x.amax(0))
    assert torch.equal(largest["_place"], x.argmax(0))
    unit = torch.nn.functional.normalize(x, dim=-1)
    pairs = [(a, b) for a in range(7) for b in range(a)]
    cosine = torch.stack([(unit[a] * unit[b]).sum(-1) for a, b in pairs]).mean(0)
    torch.testing.assert_close(joined(Cosine(), unit, parts)[""], cosine)


def test_totals_add_up():
    reducer = Total()
    assert reducer.result(reducer.join(reducer.of(torch.ones(3), True), reducer.of(torch.ones(3), True)))[
        ""
    ].tolist() == [
        2,
        2,
        2,
    ]


@pytest.mark.parametrize("parts", PARTS, ids=["whole", "in parts"])
def test_empty_values_are_left_out_of_a_mean_and_states_of_zeros_out_of_a_cosine(parts):
    x = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[2, 1], x[:, 3] = float("nan"), float("nan")
    ratios = joined(Mean(of_ratios=True), x, parts)[""]
    torch.testing.assert_close(ratios, x.nanmean(0), equal_nan=True)
    assert ratios.isnan().tolist() == [False, False, False, True]
    assert joined(Mean(), x, parts)[""].isnan().tolist() == [False, True, False, True], (
        "elsewhere it is no value to drop"
    )
    unit = torch.nn.functional.normalize(torch.randn(7, 4, 5, dtype=torch.float64), dim=-1)
    unit[2, 1] = 0
    others = unit[[0, 1, 3, 4, 5, 6], 1]
    cosine = ((others @ others.T).sum() - 6) / 30
    torch.testing.assert_close(joined(Cosine(), unit, parts)[""][1], cosine)


@pytest.mark.parametrize("variant", ["inserted", "decoder"])
def test_the_aggregation_is_read_on_both_sides_of_a_norm(variant):
    """Of layer 0, whose attention no norm has changed yet: before it, what the plain model has; behind it, its norm."""
    if variant == "inserted":
        model = tiny_model("llama")
        plain = sinkscope.trace(model, IDS)
        sinkscope.insert_head_norm(model)
        projections = [block.self_attn.o_proj for block in model.model.layers]
    else:
        shape = dict(vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
        model, bare = (
            Decoder(DecoderConfig(**shape, attention_variant=name)).eval() for name in ("head_norm", "softmax")
        )
        bare.load_state_dict({name: x for name, x in model.state_dict().items() if "head_norm" not in name})
        plain = sinkscope.trace(bare, IDS)
        projections = [layer.output_projection for layer in anatomy_of(model).layers]
    entering = []
    handle = projections[0].register_forward_hook(lambda module, args, output: entering.append(args[0]))
    found = sinkscope.trace(model, IDS)
    handle.remove()
    (whole,) = (x for x in entering if x.shape[:2] == IDS.shape)  # a few tokens are read again for the receipt
    before, behind = found.recording["value_variance_before_norm"], found.recording["value_variance"]
    torch.testing.assert_close(before[0], plain.recording["value_variance"][0])
    torch.testing.assert_close(behind[0], whole.var(0).mean(-1), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(before[0], behind[0], rtol=0.1)
    np.testing.assert_allclose(
        found.tables["layers"]["variance_ratio_before_norm"][0], plain.tables["layers"]["variance_ratio"][0], rtol=1e-4
    )
    law = [run.tables["layers"] for run in (found, plain)]
    np.testing.assert_allclose(
        law[0]["averaging_law_r_squared_before_norm"][0], law[1]["averaging_law_r_squared"][0], rtol=1e-4
    )
    # Without a norm there is no other side.
    assert "value_variance_before_norm" not in plain.recording
    assert plain.tables["layers"]["variance_ratio_before_norm"] == [None] * len(projections)


def test_a_reading_ends_after_the_last_layer_that_is_listened_at():
    model, run = tiny_model("llama"), []
    anatomy = anatomy_of(model)
    for layer in anatomy.layers:
        layer.block.register_forward_pre_hook(lambda module, args, index=layer.index: run.append(index))

    def norms(layers):
        return Recorder(anatomy, [replace(RESIDUAL_NORM, layers=layers)]).read(model, IDS)["residual_norm"]

    first, every = norms(range(2)), norms(range(len(anatomy.layers)))
    assert run == [0, 1, *range(len(anatomy.layers))]
    assert list(first) == [0, 1]
    assert all(torch.equal(first[layer], every[layer]) for layer in first)
    assert model(IDS).logits.isfinite().all()  # later passes run to their end


@pytest.mark.parametrize("left_out", ["by_distance", "value_variance", "projected_variance", "kurtosis"])
def test_a_trace_without_an_observable_shows_the_rest_and_has_no_page(left_out, tmp_path):
    """Control: the whole one has a page."""
    batch = sinkscope.token_batch(tiny_model("llama"), num_sequences=2, length=20)
    found = sinkscope.trace(tiny_model("llama"), batch, observables=[o for o in CHAIN if o.name != left_out])
    assert "heads" in repr(found)
    assert "<p>" in found._repr_html_()
    assert found.summary
    assert ("distances" in found.tables) == (left_out != "by_distance")
    for drawn in (lambda: found.report(tmp_path / "page.html"), found.plot):
        with pytest.raises(sinkscope.InputError, match=f"this one lacks {left_out}.*Leave `observables` out"):
            drawn()
    assert list(tmp_path.iterdir()) == []
    assert sinkscope.trace(tiny_model("llama"), batch, effective_rank=False).report(tmp_path / "page.html").is_file()


def test_tables_are_of_the_weights_that_were_traced():
    model = tiny_model("llama")
    batch = sinkscope.token_batch(model, num_sequences=4, length=24)
    expected, found = sinkscope.trace(model, batch).tables, sinkscope.trace(model, batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    for name, columns in found.tables.items():
        for column, values in columns.items():
            np.testing.assert_equal(np.asarray(values), np.asarray(expected[name][column]), err_msg=f"{name}.{column}")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_in_float64(family):
    ids = torch.randint(3, 90, (4, 24), generator=torch.Generator().manual_seed(0))
    wide, usual = (sinkscope.trace(model, ids) for model in (tiny_model(family).double(), tiny_model(family)))
    torch.testing.assert_close(
        wide.recording["largest_write"].float(), usual.recording["largest_write"], rtol=1e-3, atol=1e-4
    )


def test_a_recording_that_fills_no_table_is_not_saved(tmp_path):
    found = sinkscope.trace(tiny_model("llama"), torch.arange(3, 23)[None], observables=["received"])
    with pytest.raises(sinkscope.InputError, match="no table to save: none has a column for received"):
        found.save(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
