"""Text becomes shards whose every token is accounted for, and batches whose order depends on seed and step alone."""

import contextlib
import gzip
import io
import json
import lzma
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sinkscope.errors import InputError
from sinkscope.pretrain import text_sources
from sinkscope.pretrain import tokenize as tokenize_module
from sinkscope.pretrain.text_sources import check_sources, documents
from sinkscope.pretrain.tokenize import TokenizeConfig, load_tokenizer, tokenize
from sinkscope.pretrain.tokens import ShardWriter, TokenStream, open_shards, permuted
from sinkscope.results.run_folder import RunFolder, run_folder

TEXTS = [f"Document {n}: the quick brown fox jumps over {n} lazy dogs.\nIt ends here." for n in range(40)]


def silent(text):
    pass


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n<|endoftext|>\n".join(TEXTS), encoding="utf-8")
    return path


@pytest.fixture
def shards(tmp_path):
    """1,000 training tokens that count up, over three shards, and 100 validation tokens."""
    with run_folder(tmp_path / "counting") as folder:
        writer = ShardWriter(folder, 2000, shard_tokens=300)
        for start in range(0, 1000, 100):
            writer.add("train", range(start, start + 100))
        writer.add("validation", range(1000, 1100))
        writer.finish()
    return open_shards(tmp_path / "counting")


# Documents


def test_documents_are_what_lies_between_separators(text_file):
    assert list(documents([str(text_file)])) == TEXTS


@pytest.mark.parametrize("block", [1, 7, 12, 13, 14, 100])
def test_a_separator_across_blocks_is_seen(text_file, monkeypatch, block):
    monkeypatch.setattr(text_sources, "BLOCK_CHARACTERS", block)
    assert list(documents([str(text_file)])) == TEXTS


def test_folders_json_lines_and_compressed_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("two")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("zero", "one")))
    with gzip.open(tmp_path / "c.txt.gz", "wt") as file:
        file.write("three")
    with lzma.open(tmp_path / "d.md.xz", "wt") as file:
        file.write("four")
    (tmp_path / "picture.png").write_bytes(b"\0\1\2")
    assert list(documents([str(tmp_path)])) == ["zero", "one", "two", "three", "four"]


ZIPPED = gzip.compress(np.random.default_rng(0).bytes(200).hex().encode(), mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("empty.txt", b"", "There is no text in"),
        ("blank.txt", b" \n\n<|endoftext|>\n", "There is no text in"),
        ("zeros.txt", b"text\0text", "a zero byte"),
        ("latin.txt", b"caf\xe9", "not UTF-8"),
        ("rows.jsonl", b'{"title": "x"}\n', "line 1"),
        (
            "half.jsonl",
            b'{"text": "fine"}\n{"text": "half of a pair: \\ud800"}\n',
            "the text of line 2 holds a lone surrogate",
        ),
        ("deep.jsonl", b"[" * 100_000, "line 1"),
        ("cut.txt.gz", gzip.compress(b"text" * 1000, mtime=0)[:20], "end-of-stream"),
        ("broken.txt.gz", b"".join([ZIPPED[:40], b"\xff" * 20, ZIPPED[60:]]), "while decompressing"),
    ],
)
def test_a_file_without_text_is_refused(tmp_path, name, content, found):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=found):
        list(documents([str(tmp_path / name)]))


def test_missing_sources_are_refused_before_any_reading(tmp_path):
    with pytest.raises(InputError, match="No text was given"):
        check_sources([])
    with pytest.raises(InputError, match=r"no file or folder '.*nowhere\.txt'"):
        check_sources([str(tmp_path / "nowhere.txt")])
    with pytest.raises(InputError, match=r"folder .* has no files that end in \.txt"):
        check_sources([str(tmp_path)])


def test_hugging_face_datasets_are_asked_for_only_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="sinkscope\\[train\\]"):
        check_sources(["hf:some/name"])
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return iter([{"text": "one"}, {"text": "two"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset, __spec__=True))
    assert list(documents(["hf:some/name:config"])) == ["one", "two"]
    (tmp_path / "rows.parquet").write_bytes(b"")
    assert list(documents([f"hf:{tmp_path / 'rows.parquet'}"])) == ["one", "two"]
    streaming = {"split": "train", "streaming": True}
    assert calls == [
        (("some/name", "config"), streaming),
        (("parquet",), streaming | {"data_files": str(tmp_path / "rows.parquet")}),
    ]


def test_a_dataset_that_breaks_while_it_streams_is_refused(monkeypatch):
    def load_dataset(*args, **kwargs):
        yield {"text": "one"}
        raise ValueError("no Parquet.\nand more")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset, __spec__=True))
    read = documents(["hf:some/name"])
    assert next(read) == "one"
    with pytest.raises(InputError, match=r"Cannot read the dataset hf:some/name: no Parquet\. Give"):
        next(read)


# Shards


def test_every_document_is_in_one_split_and_comes_back_as_it_was(text_file, tmp_path):
    config = TokenizeConfig(data=(str(text_file),), vocab_size=400, validation_share=0.2, shard_tokens=150)
    shards = tokenize(config, tmp_path / "tokens", progress=silent)
    shards.verify()
    tokenizer = load_tokenizer(shards.path)
    found = {}
    for split in ("train", "validation"):
        tokens = np.concatenate(shards.tokens(split)).astype(np.int64)
        assert len(tokens) == shards.num_tokens(split)
        assert tokens.max() < shards.vocab_size <= 400
        ends = np.flatnonzero(tokens == tokenizer.eos_token_id)
        pieces = np.split(tokens, ends + 1)
        found[split] = [tokenizer.decode(piece[:-1]) for piece in pieces[:-1]]
        assert len(pieces[-1]) == 0, "the last document ends with the end-of-text token too"
    assert sorted(found["train"] + found["validation"]) == sorted(TEXTS)
    assert 2 <= len(found["validation"]) <= 16, "about a fifth of 40 documents"
    assert len(shards.tokens("train")) > 1, "the control: several shards were in play"


def test_the_split_depends_on_the_document_alone(text_file, tmp_path):
    """Reversed and repeated, the same documents are held out."""
    other = tmp_path / "other.txt"
    other.write_text("<|endoftext|>".join([*reversed(TEXTS), *TEXTS]), encoding="utf-8")

    def held_out(path):
        config = TokenizeConfig(data=(str(path),), validation_share=0.2)
        pairs = list(tokenize_module._split_documents(config))
        train, validation = ({text for split, text in pairs if split == name} for name in ("train", "validation"))
        assert not train & validation
        return validation

    assert held_out(text_file) == held_out(other) != set()


def test_few_documents_still_leave_one_to_hold_out(tmp_path):
    path = tmp_path / "text.txt"

    def splits(text):
        path.write_text(text)
        return list(tokenize_module._split_documents(TokenizeConfig(data=(str(path),), validation_share=0.1)))

    assert splits("one" * 20 + "<|endoftext|>two") == [("train", "one" * 20), ("validation", "two")]
    assert splits("one<|endoftext|>two") == [("train", "one"), ("train", "two")], "a tenth of six letters is none"
    words = [("train", "one"), ("train", "two " * 9), ("validation", "three")]
    assert splits("one<|endoftext|>" + "two " * 9 + "three") == words, "cut at the end of a word"
    lines = [f"line {number}\n" for number in range(100)]
    (train, first), (validation, second) = splits("".join(lines))
    assert (train, validation) == ("train", "validation")
    assert first + second == "".join(lines).rstrip("\n")
    assert first.endswith("\n"), "cut at a line end"


def test_no_more_than_twice_the_share_is_held_out(tmp_path):
    """Documents that are drawn, one of them as long as all others together."""

    def drawn(texts):
        return [text for text in texts if tokenize_module._hash(text) < 0.1 * 2**64]

    (long, *_), few = drawn("x" * number for number in range(9000, 9100)), drawn(map(str, range(2000)))[:20]
    path = tmp_path / "text.txt"
    path.write_text("<|endoftext|>".join([long, *few, *(f"plain {number} " * 20 for number in range(20))]))
    pairs = list(tokenize_module._split_documents(TokenizeConfig(data=(str(path),), validation_share=0.1)))
    sizes = {split: sum(len(text) for own, text in pairs if own == split) for split in ("train", "validation")}
    assert 0 < sizes["validation"] <= 0.2 * sum(sizes.values())
    assert len(pairs) == 41
    # With `max_tokens` less text is read than was drawn from: here the long document comes first.
    config = TokenizeConfig(data=(str(path),), vocab_size=300, validation_share=0.4, max_tokens=500)
    shards = tokenize_module.tokenize(config, tmp_path / "out", progress=lambda text: None)
    assert 0 < shards.num_tokens("validation") <= 0.8 * 500


@pytest.mark.parametrize("validation", [False, True])
def test_the_bound_on_tokens_is_kept_and_something_is_held_out(tmp_path, monkeypatch, validation):
    """Whatever a batch holds; the control without the bound has more of both."""
    path = tmp_path / "text.txt"
    path.write_text("<|endoftext|>".join(f"{number} words of a text\n" * 200 for number in range(40)))
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("<|endoftext|>".join(f"{number} words held out\n" * 200 for number in range(40)))
    given = dict(data=(str(path),), validation=(str(held_out),) * validation, vocab_size=300, validation_share=0.01)

    monkeypatch.setattr(tokenize_module, "BATCH_CHARACTERS", 10**4)  # held out is what lies many batches further on

    def counts(name, **changes):
        shards = tokenize(TokenizeConfig(**given, **changes), tmp_path / name, progress=silent)
        return {split: shards.num_tokens(split) for split in ("train", "validation")}

    whole, bounded = counts("whole"), counts("bounded", max_tokens=3000)
    assert bounded["train"] == 3000 < whole["train"]
    if validation:
        assert bounded["validation"] >= 40 * 200, "all that was given, however few training tokens are wanted"
    else:
        assert 30 <= bounded["validation"] <= 60 < whole["validation"]


def test_a_bound_on_tokens_that_leaves_nothing_to_hold_out_is_named(text_file, tmp_path):
    config = TokenizeConfig(data=(str(text_file),), vocab_size=300, validation_share=0.01, max_tokens=40)
    with pytest.raises(InputError, match="Raise `max_tokens`, or give"):
        tokenize(config, tmp_path / "tokens", progress=silent)


def test_validation_can_be_given(text_file, tmp_path):
    (tmp_path / "held.txt").write_text("held out")
    config = TokenizeConfig(data=(str(text_file),), validation=(str(tmp_path / "held.txt"),), vocab_size=300)
    pairs = list(tokenize_module._split_documents(config))
    assert [text for split, text in pairs if split == "validation"] == ["held out"]
    assert [text for split, text in pairs if split == "train"] == TEXTS


def test_the_tokenizer_never_sees_what_is_held_out(tmp_path):
    """A word that stands in the held-out text alone is no token; in the training text it becomes one."""
    word = "zyzzyva"
    (tmp_path / "train.txt").write_text("some other words " * 50)
    (tmp_path / "held.txt").write_text(f"{word} " * 50)
    vocabularies = []
    for name in ("train", "held"):
        rest = "held" if name == "train" else "train"
        config = TokenizeConfig(
            data=(str(tmp_path / f"{name}.txt"),), validation=(str(tmp_path / f"{rest}.txt"),), vocab_size=300
        )
        shards = tokenize(config, tmp_path / f"tokens-{name}", progress=silent)
        vocabularies.append(load_tokenizer(shards.path).get_vocab())
    assert not any(word in token for token in vocabularies[0])
    assert any(word in token for token in vocabularies[1])


def test_code_beside_a_tokenizer_never_runs(text_file, tmp_path, monkeypatch):
    """Whatever stands on standard input: transformers asks there whether to run it."""
    shards = tokenize(TokenizeConfig(data=(str(text_file),), vocab_size=300), tmp_path / "tokens", progress=silent)
    (shards.path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Planted: pass\n")
    config = json.loads((shards.path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Planted", "auto_map": {"AutoTokenizer": ["planted.Planted", None]}}
    (shards.path / "tokenizer_config.json").write_text(json.dumps(config))
    for module in ("transformers.dynamic_module_utils", "transformers.utils.hub"):
        monkeypatch.setattr(f"{module}.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(InputError, match="custom code"):
        load_tokenizer(shards.path)  # as `pretrain` does with shards from anywhere
    with pytest.raises(InputError, match="custom code"):
        config = TokenizeConfig(data=(str(text_file),), tokenizer=str(shards.path))
        tokenize(config, tmp_path / "others", progress=silent)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "others").exists()
    # The control: asked and answered, transformers runs it.
    with contextlib.suppress(AttributeError):
        AutoTokenizer.from_pretrained(shards.path)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(("owner", "name"), [(RunFolder, "write_json"), (PreTrainedTokenizerFast, "save_pretrained")])
def test_a_full_disk_is_told_and_leaves_nothing(text_file, tmp_path, monkeypatch, owner, name):
    def full(*args, **kwargs):
        # As the operating system tells it, and as the tokenizer's own library does.
        raise OSError(28, "No space left on device") if owner is RunFolder else Exception("No space (os error 28)")

    monkeypatch.setattr(owner, name, full)
    with pytest.raises(InputError, match=r"No space left on device\. Free some space"):
        tokenize(TokenizeConfig(data=(str(text_file),), vocab_size=260), tmp_path / "tokens", progress=print)
    assert list(tmp_path.glob("*tokens*")) == list(tmp_path.glob(".*")) == []


def test_wide_tokens_for_a_large_vocabulary(tmp_path):
    for vocab_size, width in ((1 << 16, 2), ((1 << 16) + 1, 4)):
        with run_folder(tmp_path / str(vocab_size)) as folder:
            writer = ShardWriter(folder, vocab_size, 1000)
            writer.add("train", [0, vocab_size - 1])
            with pytest.raises(InputError, match=r"Token ids from .* do not fit a vocabulary of"):
                writer.add("train", [vocab_size])
            writer.finish()
        (tokens,) = open_shards(tmp_path / str(vocab_size)).tokens("train")
        assert tokens.itemsize == width
        assert tokens.tolist() == [0, vocab_size - 1]


def test_damaged_shards_are_named(shards):
    file = shards.path / shards.shards[1].file
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    open_shards(shards.path)  # the size is right: only the hash can tell
    with pytest.raises(InputError, match=f"{file.name} has other bytes"):
        shards.verify()
    file.write_bytes(content[:-1])
    with pytest.raises(InputError, match="does not have the size that the manifest says"):
        open_shards(shards.path)
    (shards.path / "manifest.json").write_text("{")
    with pytest.raises(InputError, match=r"manifest\.json"):
        open_shards(shards.path)


@pytest.mark.parametrize(
    ("changes", "shard", "found"),
    [
        ({"dtype": ">f8"}, {}, "dtype must be '<u2' or '<u4', not '>f8'"),
        ({"dtype": ["<u2"]}, {}, "dtype must be '<u2' or '<u4', not a list of 1"),
        ({"vocab_size": 10**12}, {}, "vocab_size must be at most 16777216, not 1000000000000"),
        ({"vocab_size": "many"}, {}, "vocab_size must be a whole number, not 'many'"),
        ({"version": 2}, {}, "version 2"),
        ({"shards": {"file": 1}}, {}, "shards must be a list, not a dict of 1"),
        ({}, {"file": "../../etc/passwd"}, "passwd' is not the name of a file in the folder"),
        ({}, {"file": 3}, r"shards\[0\]\.file must be text, not 3"),
        ({}, {"split": "test"}, r"shards\[0\]\.split must be 'train' or 'validation', not 'test'"),
        ({}, {"num_tokens": -4}, r"shards\[0\]\.num_tokens must be at least 1, not -4"),
        ({}, {"num_tokens": 10**12}, "does not have the size that the manifest says"),
    ],
)
def test_a_manifest_that_cannot_be_true_is_refused(shards, changes, shard, found):
    manifest = json.loads((shards.path / "manifest.json").read_text())
    manifest["shards"][0] |= shard
    (shards.path / "manifest.json").write_text(json.dumps(manifest | changes))
    with pytest.raises(InputError, match=f"{shards.path.name}.*{found}"):
        open_shards(shards.path)


def test_tokens_beyond_the_vocabulary_are_refused(shards):
    manifest = json.loads((shards.path / "manifest.json").read_text())
    largest = max(int(tokens.max()) for tokens in shards.tokens("train"))
    open_shards(shards.path).verify()
    (shards.path / "manifest.json").write_text(json.dumps(manifest | {"vocab_size": largest}))
    with pytest.raises(InputError, match=f"has a token {largest}, beyond a vocabulary of {largest}"):
        open_shards(shards.path).verify()


# Order


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 1000])
def test_an_epoch_is_a_permutation(size):
    assert sorted(permuted(np.arange(size), size, (0, 0))) == list(range(size))


def test_permutations_look_random_and_differ_by_seed_and_epoch():
    size = 10_000
    orders = [permuted(np.arange(size), size, key) for key in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        # Two independent orders have |r| below 5 / sqrt(n) all but always; a shifted range would have r near 1.
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.05
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05
    assert not any((a == b).mean() > 0.01 for a, b in zip(orders, orders[1:] + orders[:1], strict=True))


def test_an_epoch_visits_every_window_once_and_targets_follow_tokens(shards):
    stream = TokenStream(shards, "train", length=9, batch_size=5, seed=3)
    assert stream.num_windows == sum((len(array) - 1) // 9 for array in shards.tokens("train"))
    firsts = []
    for step in range(-(-stream.num_windows // 5)):
        tokens, targets = stream.batch(step)
        assert torch.equal(targets, tokens + 1), "the tokens count up"
        firsts += tokens[:, 0].tolist()
    epoch = firsts[: stream.num_windows]
    assert len(set(epoch)) == stream.num_windows
    assert epoch != sorted(epoch)


def test_batches_depend_on_seed_and_step_alone(shards):
    def stream(seed=3):
        return TokenStream(shards, "train", length=9, batch_size=6, seed=seed)

    later = stream()
    for step in (40, 7, 0):
        later.batch(step)
    for step in (0, 7, 40):  # 40 is in the third epoch
        assert torch.equal(later.batch(step)[0], stream().batch(step)[0])
        assert not torch.equal(later.batch(step)[0], stream(seed=4).batch(step)[0])
    rows = torch.cat([later.batch(7, slice(start, start + 2))[0] for start in (0, 2, 4)])
    assert torch.equal(rows, later.batch(7)[0]), "processes and micro-batches see the rows of the one batch"


def test_a_sequence_longer_than_every_shard_is_refused(shards):
    with pytest.raises(InputError, match="Sequences of 300 tokens need a train shard of at least 301"):
        TokenStream(shards, "train", length=300, batch_size=1, seed=0)
    TokenStream(shards, "train", length=299, batch_size=1, seed=0)


def test_held_out_windows_are_the_same_at_every_call(shards):
    stream = TokenStream(shards, "validation", length=9, batch_size=2, seed=0)
    tokens, targets = stream.evenly_spaced(4)
    assert tokens[:, 0].tolist() == [1000, 1027, 1063, 1090]
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(stream.evenly_spaced(4, slice(1, 3))[0], tokens[1:3])
    assert len(stream.evenly_spaced(100)[0]) == 11


def test_what_is_held_out_is_not_trained_on(tmp_path):
    """Control: the other documents are."""
    both, others = tmp_path / "both.txt", tmp_path / "others.txt"
    both.write_text("\n<|endoftext|>\n".join(TEXTS))
    others.write_text("\n<|endoftext|>\n".join(TEXTS[:10]))
    config = TokenizeConfig(data=(str(both),), validation=(str(others),), vocab_size=300)
    shards = tokenize(config, tmp_path / "tokens", progress=silent)
    documents = {
        split: sum(x.num_documents for x in shards.shards if x.split == split) for split in ("train", "validation")
    }
    assert documents == {"train": 30, "validation": 10}
    with pytest.raises(InputError, match="There is no train document"):
        tokenize(replace(config, data=config.validation), tmp_path / "none", progress=silent)
