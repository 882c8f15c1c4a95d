"""The texts of an audit: spread over a file, some to calibrate, the others from another part of it."""

import pytest
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sinkscope.audits.texts import texts_to_measure
from sinkscope.errors import InputError
from sinkscope.models.loading import load
from sinkscope.pretrain.text_sources import SEPARATOR


def words_are_tokens(vocabulary):
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, **vocabulary}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>")


@pytest.fixture(scope="module")
def loaded():
    """A model whose words are w2 to w96, each a token."""
    return load(tiny_model("llama"), tokenizer=words_are_tokens({f"w{number}": number for number in range(2, 97)}))


def windows(loaded, path, text, *, bos=False, length=8, num_sequences=4):
    path.write_text(text, encoding="utf-8")
    return texts_to_measure(loaded, path, bos=bos, length=length, num_sequences=num_sequences, seed=0)


def test_windows_are_spread_over_the_text(loaded, tmp_path):
    # Words of three letters count up: a window's first word says where in the text it is.
    words = [10 + number // 20 for number in range(20 * 60)]
    found = windows(loaded, tmp_path / "a.txt", " ".join(f"w{word}" for word in words))
    assert found.ids.shape == (20, 8)
    assert found.ids[:, 0].tolist() == [10 + 3 * part for part in range(20)]
    assert (found.kind, found.source, found.bos) == ("text", "a.txt", False)
    with_bos = windows(loaded, tmp_path / "a.txt", " ".join(f"w{word}" for word in words), bos=True)
    assert with_bos.ids[:, 0].tolist() == [1] * 20
    assert with_bos.ids[:, 1:].tolist() == found.ids[:, :-1].tolist()


def test_no_document_both_calibrates_and_is_held_out(loaded, tmp_path):
    """Three documents, of which the first is not a whole number of parts."""
    documents = [" ".join(["w10"] * 900), " ".join(["w20"] * 100), " ".join(["w30"] * 300)]
    found = windows(loaded, tmp_path / "a.txt", SEPARATOR.join(documents)).ids
    assert set(found[:16].flatten().tolist()) == {10, 20}
    assert set(found[16:].flatten().tolist()) == {30}
    assert all(len(set(row)) == 1 for row in found.tolist()), "no window holds two documents"
    # Where no document ends near the share of the calibration, another part of the same one is held out.
    found = windows(loaded, tmp_path / "a.txt", SEPARATOR.join([documents[0], "w20"])).ids
    assert set(found.flatten().tolist()) == {10}


def test_few_windows_are_title_pages(loaded, tmp_path):
    """Each part holds two documents or three: the window is of the one that began before."""
    documents = [" ".join(["w5"] * 8 + ["w10"] * (60 + number**2 % 37)) for number in range(52)]
    found = windows(loaded, tmp_path / "a.txt", SEPARATOR.join(documents)).ids
    assert int((found[:, 0] == 5).sum()) <= len(found) / 3


def test_what_is_too_short_is_refused_with_sizes_that_fit(loaded, tmp_path):
    text = " ".join(["w10"] * 2600)
    advice = r"36 parts of a\.txt needs 100 tokens, but one has 71\. Use at most `num_sequences=9` or `length=71`, or"
    with pytest.raises(InputError, match=advice):
        windows(loaded, tmp_path / "a.txt", text, length=100, num_sequences=20)
    assert windows(loaded, tmp_path / "a.txt", text, length=100, num_sequences=9).length == 100
    assert windows(loaded, tmp_path / "a.txt", text, length=71, num_sequences=20).length == 71
    with pytest.raises(InputError, match=r"parts of a\.txt needs .* but one has \d+\. Use a longer text"):
        windows(loaded, tmp_path / "a.txt", text, length=300, num_sequences=200)


@pytest.mark.parametrize(("context", "length"), [(256, 128), (128, 96), (64, 64)])
def test_a_short_context_leaves_a_prefix_room_unless_a_length_is_asked_for(context, length):
    short = load(tiny_model("llama", num_hidden_layers=1, max_position_embeddings=context))
    assert texts_to_measure(short, None, bos=None, length=None, num_sequences=2, seed=0).length == length
    asked = {"bos": None, "length": context, "num_sequences": 2, "seed": 0}
    assert texts_to_measure(short, None, **asked).length == context
    way_out = "Leave `prefix` out" if length == context else "Give `length="
    with pytest.raises(InputError, match=f"room for a prefix in the model's context of {context}.*{way_out}"):
        texts_to_measure(short, None, **asked, prefix=True)


def test_ids_of_another_tokenizer_are_refused(loaded, tmp_path):
    with pytest.raises(InputError, match="Token ids must be from 0 to 96"):
        other = load(tiny_model("llama"), tokenizer=words_are_tokens({"w10": 97}))
        windows(other, tmp_path / "a.txt", " ".join(["w10"] * 200))
