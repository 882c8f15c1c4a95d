"""Texts as they are: one prompt, several of any length, down to two tokens; and each text's own sinks, by token."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sinkscope
from sinkscope.models import token_batches, tokenized_text
from sinkscope.models.anatomy import anatomy_of
from sinkscope.tracing.sequences import Sequences, TokenSink
from sinkscope.tracing.story import hidden_sinks

LONG = "The cat sat on the mat, and the dog sat on the rug. Then the cat went away, and the dog slept for a long time."
TEXTS = [
    LONG,
    "The dog saw the cat on the mat and sat there with it for a very long time, until it was dark.",
    LONG[4:],
]


@pytest.fixture(scope="module")
def model():
    return sinkscope.load("reference:softmax")


def test_a_text_is_what_its_tokens_are(model):
    of_text = sinkscope.trace(model, LONG)
    of_ids = sinkscope.trace(model, model.tokenizer(LONG, add_special_tokens=False)["input_ids"])
    assert str(of_text.summary["sinks"]) == str(of_ids.summary["sinks"])
    assert of_text.summary["tokens"]["kind"] == "text"
    assert of_text.table("tokens").column("text").to_pylist()[1] == " cat"


def test_texts_of_unequal_length_are_read_as_each_alone(model):
    together = sinkscope.trace(model, TEXTS, effective_rank=False)
    assert len(set(together.summary["tokens"]["whole"])) == 3
    assert together.recording.batch.length == min(together.summary["tokens"]["whole"])
    assert "as many as the shortest has" in together.story
    for number, text in enumerate(TEXTS):
        alone = sinkscope.trace(model, text, effective_rank=False).sequences
        assert torch.equal(together.sequences.ids[number], alone.ids[0])
        torch.testing.assert_close(together.sequences.rates[number], alone.rates[0])
        torch.testing.assert_close(together.sequences.received[number], alone.received[0])
    cut = sinkscope.trace(model, LONG[:40], effective_rank=False).sequences
    num_common = len(cut.ids[0]) - 1
    assert not torch.allclose(together.sequences.received[0][:num_common], cut.received[0][:num_common])


@pytest.mark.parametrize("length", [2, 5, 16, 17])
def test_short_prompts_say_what_they_cannot_show(model, length, tmp_path):
    ids = model.tokenizer(LONG, add_special_tokens=False)["input_ids"][:length]
    found = sinkscope.trace(model, [ids])
    assert ("needs 16 later queries" in found.story) == (length < 17)
    assert (found.summary["sink_rate"] != found.summary["sink_rate"]) == (length < 17)
    assert ("There is no sink rate" in found.report(tmp_path / "page.html").read_text()) == (length < 17)
    received = found.plot("received").axes[0].lines[0].get_ydata()
    assert len(received) == (length if length < 17 else 1), "no empty plot"


def test_what_is_no_text_of_two_tokens_is_refused(model):
    with pytest.raises(sinkscope.InputError, match="at least 2 tokens"):
        sinkscope.trace(model, [LONG, "."])
    with pytest.raises(sinkscope.InputError, match="tokenizer"):
        sinkscope.trace(model.model, LONG)


def test_bytes_that_are_no_text_are_refused(model):
    with pytest.raises(sinkscope.InputError, match="UTF-8"):
        sinkscope.trace(model, "caf\udce9 au lait is good")


def test_a_key_with_too_few_later_queries_has_no_sink_rate(model, tmp_path):
    found = sinkscope.intervene(model, {"mask_to_self": ["3", "25"]}, prompt=LONG)
    means = found.tables["means"]
    rows = zip(means["quantity"], means["position"], means["after"], strict=True)
    rates = {position: rate for quantity, position, rate in rows if quantity == "sink_rate"}
    assert found.after.recording.batch.length - 16 <= 25
    assert rates[25] != rates[25]
    assert rates[3] == rates[3], "the control"
    for texts, is_judged in (([LONG, "The cat"], False), ([LONG], True)):
        page = sinkscope.trace(model, texts).report(tmp_path / "page.html", overwrite=True).read_text(encoding="utf-8")
        assert ("Sink rate by head" in page) == is_judged


def test_texts_of_unequal_length_have_no_common_mask(model):
    assert sinkscope.sink_tokens(model, LONG).positions() == [0]
    with pytest.raises(sinkscope.InputError, match="one length"):
        sinkscope.sink_tokens(model, TEXTS)


def test_standard_input_is_a_text(model, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(LONG.encode())))
    tokenized_text._standard_input.cache_clear()
    read = sinkscope.token_batch(model, "text:-", num_sequences=2, length=10)
    ids = model.tokenizer(LONG, add_special_tokens=False)["input_ids"]
    assert read.ids.flatten().tolist() == ids[:20]
    assert read.source == "standard input"
    tokenized_text._standard_input.cache_clear()


def test_sinks_within_texts_are_grouped_by_token():
    """Four texts of 40 tokens; token 7 is a sink in three of the four that have it, elsewhere each time."""
    ids = [torch.full((40,), 1) for _ in range(4)]
    rates = [torch.zeros(40) for _ in range(4)]
    for number, place in enumerate((5, 9, 14, 20)):
        ids[number][place] = 7
        rates[number][0] = 0.5
        if number < 3:
            rates[number][place] = 0.5
        rates[number][30] = 0.9  # too few later queries
    found = Sequences(ids, [torch.arange(40)] * 4, rates, rates)
    assert found.by_token(besides=[0]) == [TokenSink(7, 3, 4, (5, 9, 14))]
    told = hidden_sinks(found.by_token(besides=[0]), lambda token: " the")
    assert "' the' in 3 of the 4 texts with it (positions 5 to 14)" in told
    assert found.by_token(besides=[0, 5, 9, 14]) == []
    # The mean by position shows none of it: at most 0.125 of heads in each place, and here not even that.
    mean = torch.stack(rates).mean(0)[[5, 9, 14]]
    assert bool((mean < 0.13).all())
    assert {(sink.sequence, sink.position) for sink in found.sinks} == {(n, 0) for n in range(4)} | {
        (0, 5),
        (1, 9),
        (2, 14),
    }


def test_intervening_on_a_prompt_says_what_it_was_calibrated_on(model, tmp_path):
    found = sinkscope.intervene(model, {"amplify": ["3:2"]}, prompt=LONG)
    assert found.before.recording.batch.num_sequences == 1
    assert found.calibrated_on == f"64 other sequences of {found.before.recording.batch.length} random tokens"
    assert found.table("means").num_rows == len(set(found.tables["means"]["quantity"])) * len(found.listed_positions)
    page = found.report(tmp_path / "page.html").read_text()
    assert "DomRatio at position 3, \N{OPEN BOX}on" in page
    assert "one sequence of" in page
    assert "of each run" not in page
    assert "position %{x}, %{text}" in page  # the token in the hover
    assert "<td>\N{OPEN BOX}on</td>" in page.replace("<bdi>", "").replace("</bdi>", "")  # and in the table
    with pytest.raises(sinkscope.InputError, match="one length"):
        sinkscope.intervene(model, {"amplify": ["3:2"]}, prompt=TEXTS)


def test_neurons_are_named_in_any_way(model):
    (neuron,) = [u for u in sinkscope.trace(model, LONG).findings.super_neurons if (u.layer, u.neuron) == (6, 348)][:1]
    for named in (neuron, (6, 348), (6, None, 348), "6:348"):
        with sinkscope.ablate_neurons(model, [named]) as edit:
            assert edit.place.items == {sinkscope.Neuron(6, None, 348)}
    for wrong in ("5", "5:1:2:3", "five:1", (5,), 148):
        with pytest.raises(sinkscope.InputError, match="5:148"):
            sinkscope.ablate_neurons(model, [wrong])


def test_generating_under_an_intervention(model):
    ids = torch.tensor([model.tokenizer(LONG[:40], add_special_tokens=False)["input_ids"]])

    def generated(**options):
        return model.model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0, **options)

    with sinkscope.ablate_neurons(model, ["6:348"]):  # at every token: a cache is no harm
        assert torch.equal(generated(), generated(use_cache=False))
    with sinkscope.ablate_neurons(model, ["6:348"], positions=0):
        with pytest.raises(sinkscope.InputError, match="use_cache=False"):
            generated()
        assert generated(use_cache=False).shape[1] == ids.shape[1] + 3
    with sinkscope.mask_to_self(model, 3), pytest.raises(sinkscope.InputError, match="use_cache=False"):
        generated()
    generated()


def unequal(lengths):
    generator = torch.Generator().manual_seed(0)
    whole = tuple(torch.randint(3, 90, (length,), generator=generator) for length in lengths)
    ids = torch.stack([text[: min(lengths)] for text in whole])
    return token_batches.TokenBatch(ids=ids, kind="text", whole=whole)


def test_numbered_sequences_of_texts_of_unequal_length_are_refused(model):
    """They are read whole by length, so that a sequence has another number. Control: at all sequences, and of equal
    texts."""
    batch = unequal((44, 40, 44, 40))
    with sinkscope.mask_to_self(model, 10, sequences=[1]):
        with pytest.raises(
            sinkscope.InputError, match="mask_to_self acts on numbered sequences, so all texts must have one length"
        ):
            sinkscope.trace(model, batch)
        assert sinkscope.trace(model, batch.ids).recording["mixing"][:, 10].min() < 1
    with sinkscope.mask_to_self(model, 10):
        assert sinkscope.trace(model, batch).recording["mixing"][:, 10].min() == pytest.approx(1.0)


def test_texts_of_unequal_length_keep_to_chunks_and_keys(model):
    batch, sizes = unequal((40, 41) * 4), []
    decoder = anatomy_of(model.model).decoder
    hook = decoder.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    found = sinkscope.trace(model, batch, chunk_tokens=90, keys=[0, 3])
    hook.remove()
    assert max(sizes) <= 90
    received = found.tables["tokens"]["attention_received"]
    whole = sinkscope.trace(model, batch).tables["tokens"]["attention_received"]
    known = ~np.isnan(received)
    assert known.sum() == 2 * 8
    np.testing.assert_allclose(received[known], whole[known], rtol=1e-5)


def test_the_short_text_of_chosen_keys_names_the_one_that_receives_most(model):
    found = sinkscope.trace(
        model, torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0)), keys=[0, 1]
    )
    received = found.recording["received"].mean((0, 1))
    most = f"position {int(received.argmax())} receives the most attention among the recorded keys (0 and 1)"
    assert f"{most}, {float(received.max()):.2f} of" in found.story


def test_a_batch_made_for_another_model_is_refused(model):
    batch = token_batches.TokenBatch(ids=torch.full((2, 20), 100_000), kind="given")
    for read in (sinkscope.trace, lambda model, ids: sinkscope.clamp(model, ids.ids, norms=True)):
        with pytest.raises(sinkscope.InputError, match="100000"):
            read(model, batch)


def test_a_model_by_name_is_refused_while_an_intervention_is_on(model):
    """What is loaded anew would be read untouched. Control: the object is read, and names are afterwards."""
    with sinkscope.mask_to_self(model, 10):
        for named in ("reference:softmax", None):
            with pytest.raises(sinkscope.InputError, match="mask_to_self is on and acts on a model object"):
                sinkscope.trace(named)
        sinkscope.trace(model, torch.arange(3, 23)[None])
    assert sinkscope.trace("reference:softmax", torch.arange(3, 23)[None]).findings


def test_the_name_of_a_file_is_no_text(model, tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text("A text. " * 40)
    monkeypatch.chdir(tmp_path)
    for named in ("book.txt", "text:book.txt", str(tmp_path / "book.txt")):
        with pytest.raises(sinkscope.InputError, match="is the name of a file"):
            sinkscope.trace(model, named)
    assert sinkscope.trace(model, "a book.txt that I read").findings


def test_numbers_as_notebooks_have_them(model):
    batch = sinkscope.token_batch(model, length=np.int64(24), num_sequences=2, seed=np.int64(3))
    assert torch.equal(batch.ids, sinkscope.token_batch(model, length=24, num_sequences=2, seed=3).ids)
    assert type(batch.seed) is int
    assert torch.equal(sinkscope.trace(model, list(batch.ids)).recording.batch.ids, batch.ids)
    asked = {"mask_to_self": [np.int64(3)]}
    found = sinkscope.intervene(model, asked, layers=0, length=24, num_sequences=2)
    assert found.after.recording["mixing"][0, 3] == pytest.approx(1.0)
    assert found.after.recording["mixing"][1, 3] < 0.99


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (
            lambda model: sinkscope.trace(model, keys=0),
            "`keys` must be a list of whole numbers such as `keys=[0, 10]`, not 0.",
        ),
        (lambda model: sinkscope.trace(model, keys="0-3"), "such as `keys=[0, 10]`, not '0-3'."),
        (lambda model: sinkscope.trace(model, keys=[0.9]), "such as `keys=[0, 10]`, not [0.9]."),
        (lambda model: sinkscope.token_batch(model, length=32.0), "`length` must be a whole number, not 32.0."),
        (lambda model: sinkscope.token_batch(model, length="32"), "`length` must be a whole number, not '32'."),
        (lambda model: sinkscope.token_batch(model, seed=1.5), "`seed` must be a whole number, not 1.5."),
        (lambda model: sinkscope.token_batch(model, sinkscope), "Use random, text:FILE or repeat:ID."),
        (lambda model: sinkscope.trace(model, [None]), "Texts or token ids"),
        (lambda model: sinkscope.trace(model, [[1, 2, 3], [1]]), "shape [1]"),
        (lambda model: sinkscope.intervene(model, {"mask_to_self": 3}, prompt=[]), "Give at least one text."),
        (lambda model: sinkscope.bias(model, controls="none"), "`controls` cannot be 'none'."),
        (lambda model: sinkscope.fingerprint("reference:softmax"), "a list of at least two models, not 1."),
        (lambda model: sinkscope.fingerprint(model), "a list of at least two models, not 1."),
        (
            lambda model: sinkscope.sink_tokens(model, "The cat sat.", neurons=[(7, 438)]),
            "must be what `sink_neurons` returns",
        ),
        (lambda model: sinkscope.transplant_neurons(model, "1:3", 0.0, 5), "`source` must be a whole number, not 0.0."),
    ],
)
def test_what_is_of_another_kind_is_refused(model, call, found):
    with pytest.raises(sinkscope.InputError) as refused:
        call(model)
    assert found in str(refused.value)


def test_one_neuron_needs_no_list_and_ids_calibrate(model):
    batch = sinkscope.token_batch(model, length=24, num_sequences=64, seed=1)
    with torch.no_grad():
        for one, several in (("1:3", ["1:3"]), ((1, 3), [(1, 3)])):
            with sinkscope.ablate_neurons(model, one):
                first = model.model(batch.ids[:2]).logits
            with sinkscope.ablate_neurons(model, several):
                assert torch.equal(model.model(batch.ids[:2]).logits, first)
    for calibration in (batch, batch.ids):
        with sinkscope.amplify_variance(model, 5, 2.0, calibration=calibration):
            assert sinkscope.trace(model, batch.ids[:2]).findings
