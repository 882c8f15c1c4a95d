"""Token batches: the right ids at the right places, independent of what they should not depend on, or a refusal."""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    BatchEncoding,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import sinkscope
from sinkscope.arguments import memory_bytes
from sinkscope.errors import InputError
from sinkscope.models.given_ids import given_batch
from sinkscope.models.loading import LoadedModel, load
from sinkscope.models.token_batches import (
    batch_with_others,
    special_ids,
    token_batch,
)
from sinkscope.models.tokenized_text import first_ids, read_text

NUM_ROWS, NUM_TOKENS, BOS, EOS = 96, 83, 1, 2
"""The embedding has rows beyond the tokenizer's vocabulary, as padded checkpoints do."""


def word_tokenizer(*, adds_bos: bool = False, has_bos: bool = True) -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, NUM_TOKENS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.add_special_tokens([AddedToken("w5", special=True)])
    names = {"unk_token": "<unk>", "eos_token": "</s>"} | ({"bos_token": "<s>"} if has_bos else {})
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def loaded_llama(tokenizer: PreTrainedTokenizerFast | None, **changes) -> LoadedModel:
    config = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": NUM_ROWS,
        "max_position_embeddings": 128,
    }
    return load(LlamaForCausalLM(LlamaConfig(**config | changes)), tokenizer=tokenizer)


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return loaded_llama(word_tokenizer())


@pytest.fixture(scope="session")
def bare() -> LoadedModel:
    return loaded_llama(None)


def refused(call, *parts: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


class TestRandom:
    def test_what_it_says_of_itself(self, loaded):
        batch = token_batch(loaded)
        assert (batch.ids.shape, batch.ids.dtype, batch.ids.device.type) == ((32, 64), torch.int64, "cpu")
        assert batch.describe() == {
            "kind": "random",
            "length": 64,
            "count": 32,
            "seed": 0,
            "bos": False,
            "left_out": 13,
        }
        assert (batch.num_sequences, batch.length, batch.source, batch.shared_first_token) == (32, 64, None, False)

    def test_uniform_over_ordinary_tokens(self, loaded):
        ids = token_batch(loaded, length=128, num_sequences=400).ids
        assert special_ids(loaded) == {0, BOS, EOS, 5}
        ordinary = set(range(NUM_TOKENS)) - {0, BOS, EOS, 5}
        counts = torch.bincount(ids.flatten(), minlength=NUM_ROWS)
        assert set(counts.nonzero().flatten().tolist()) == ordinary
        # 51,200 draws over 79 tokens: 648 each with a standard deviation of 25; six of them on either side.
        assert counts[list(ordinary)].min() > 648 - 153
        assert counts[list(ordinary)].max() < 648 + 153

    def test_without_a_tokenizer_all_rows_but_the_configured_ids(self, bare):
        ids = token_batch(bare, length=128, num_sequences=100).ids
        assert set(ids.unique().tolist()) == set(range(NUM_ROWS)) - {BOS, EOS}

    def test_unused_rows_are_left_out_and_counted(self):
        """As padded checkpoints have them: a zero row, rows alike, an id without a token."""
        loaded = loaded_llama(None)
        weight = loaded.model.get_input_embeddings().weight
        before = token_batch(loaded, length=128, num_sequences=100)
        assert before.left_out == 0
        with torch.no_grad():
            weight[7] = 0
            weight[[20, 40, 95]] = weight[20].clone()
        batch = token_batch(loaded, length=128, num_sequences=100)
        assert set(range(NUM_ROWS)) - set(batch.ids.unique().tolist()) == {BOS, EOS, 7, 20, 40, 95}
        assert batch.describe()["left_out"] == 4
        assert {7, 20, 40, 95} <= set(before.ids.unique().tolist())  # the control

    def test_ids_without_a_token_are_left_out(self):
        tokenizer = word_tokenizer()
        vocabulary = {token: token_id for token, token_id in tokenizer.get_vocab().items() if token_id != 30}
        holed = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        batch = token_batch(
            loaded_llama(PreTrainedTokenizerFast(tokenizer_object=holed, unk_token="<unk>")),
            length=128,
            num_sequences=100,
        )
        assert batch.left_out == 1 + NUM_ROWS - NUM_TOKENS
        assert set(range(NUM_TOKENS)) - set(batch.ids.unique().tolist()) == {0, BOS, EOS, 30}

    @pytest.mark.parametrize("seed", [-1, 2**32, 2**63])
    def test_a_seed_that_draws_anothers_tokens_is_refused(self, loaded, seed):
        refused(lambda: token_batch(loaded, seed=seed), "`seed` must be from 0 to 4294967295", str(seed))
        assert token_batch(loaded, seed=2**32 - 1).seed == 2**32 - 1

    def test_several_end_tokens(self):
        loaded = loaded_llama(None, eos_token_id=[2, 7], pad_token_id=9)
        assert special_ids(loaded) == {1, 2, 7, 9}

    def test_a_sequence_depends_on_seed_and_place_alone(self, loaded):
        few, many = token_batch(loaded, num_sequences=8).ids, token_batch(loaded, num_sequences=32).ids
        assert torch.equal(few, many[:8])
        assert not torch.equal(many[0], many[1])
        assert not torch.equal(few, token_batch(loaded, num_sequences=8, seed=1).ids)
        with_bos = token_batch(loaded, num_sequences=8, bos=True)
        assert torch.equal(with_bos.ids[:, 1:], few[:, 1:])
        assert (with_bos.ids[:, 0] == BOS).all()
        assert with_bos.shared_first_token
        assert with_bos.describe()["bos"] is True

    def test_leaves_the_global_random_state(self, loaded):
        torch.manual_seed(3)
        before = torch.random.get_rng_state()
        first = token_batch(loaded).ids
        assert torch.equal(torch.random.get_rng_state(), before)
        torch.manual_seed(4)
        assert torch.equal(token_batch(loaded).ids, first)

    def test_ids_that_are_none_in_a_strangers_file(self):
        loaded = loaded_llama(None)
        loaded.model.generation_config.pad_token_id = "x"
        assert token_batch(loaded).ids.shape == (32, 64)

    def test_special_tokens_only(self):
        loaded = loaded_llama(None, vocab_size=3, pad_token_id=0)
        refused(lambda: token_batch(loaded), "no ordinary tokens", "only special ones, unused ones")


class TestRepeat:
    def test_one_token_everywhere(self, loaded):
        batch = token_batch(loaded, "repeat:7", length=5, num_sequences=2)
        assert batch.ids.tolist() == [[7] * 5] * 2
        assert batch.describe() == {"kind": "repeat", "length": 5, "count": 2, "seed": None, "bos": False}
        assert batch.shared_first_token
        assert token_batch(loaded, "repeat:7", length=3, num_sequences=1, bos=True).ids.tolist() == [[BOS, 7, 7]]

    @pytest.mark.parametrize("argument", ["96", "2147483647"])
    def test_outside_the_vocabulary(self, loaded, argument):
        refused(lambda: token_batch(loaded, f"repeat:{argument}"), "Token ids must be from 0 to 95", "vocabulary")
        assert token_batch(loaded, "repeat:95").ids[0, 0] == 95  # the control: the last row

    @pytest.mark.parametrize("argument", ["-1", "x", "1.5", "2147483648"])
    def test_no_id(self, loaded, argument):
        refused(lambda: token_batch(loaded, f"repeat:{argument}"), "token id", f"repeat:{argument}", "repeat:42")


class TestText:
    WORDS = [f"w{i}" for i in range(10, 40)]  # noqa: RUF012

    @pytest.fixture
    def text(self, tmp_path):
        path = tmp_path / "words.txt"
        path.write_text(" ".join(self.WORDS))
        return path

    def test_consecutive_windows(self, loaded, text):
        batch = token_batch(loaded, f"text:{text}", length=10, num_sequences=3)
        assert batch.ids.tolist() == [list(range(10, 20)), list(range(20, 30)), list(range(30, 40))]
        assert batch.describe() == {"kind": "text", "length": 10, "count": 3, "seed": None, "bos": False}
        assert batch.source == "words.txt"

    def test_bos_counts_in_the_length(self, loaded, text):
        batch = token_batch(loaded, f"text:{text}", length=10, num_sequences=3, bos=True)
        assert batch.ids.tolist() == [[BOS, *range(start, start + 9)] for start in (10, 19, 28)]

    def test_bos_is_by_default_what_the_tokenizer_does(self, text):
        adds = loaded_llama(word_tokenizer(adds_bos=True))
        batch = token_batch(adds, f"text:{text}", length=10, num_sequences=2)
        assert (batch.bos, batch.ids[:, 0].tolist(), batch.ids[0, 1].item()) == (True, [BOS, BOS], 10)
        without = token_batch(adds, f"text:{text}", length=10, num_sequences=2, bos=False)
        assert (without.bos, without.ids[0, 0].item()) == (False, 10)
        assert not token_batch(adds, num_sequences=2).bos  # random tokens have none unless asked

    def test_too_short(self, loaded, text):
        def batch(**options):
            return token_batch(loaded, f"text:{text}", **options)

        found = "words.txt has 30."
        refused(lambda: batch(length=8, num_sequences=4), "32 tokens", found, "`num_sequences=3` or `length=7`")
        batch(length=8, num_sequences=3)
        batch(length=7, num_sequences=4)
        refused(lambda: batch(length=8, num_sequences=5, bos=True), found, "`num_sequences=4` or `length=7`")
        batch(length=8, num_sequences=4, bos=True)
        batch(length=7, num_sequences=5, bos=True)
        refused(lambda: batch(length=64, num_sequences=31), found, "`length=30` with `num_sequences=1`")
        batch(length=30, num_sequences=1)

    def test_too_short_for_what_calibrates_too(self, loaded, text):
        """What is advised leaves room for the other sequences, and is no less than the caller needs."""

        def batch(length, num_sequences, least=(2, 1)):
            sizes = {"length": length, "num_sequences": num_sequences}
            return batch_with_others(loaded, f"text:{text}", bos=False, **sizes, seed=0, others=2, least=least)

        expected = "6 sequences of 5 and 2 others need 40 tokens"
        refused(lambda: batch(5, 6), expected, "Use at most `num_sequences=4` or `length=3`, or")
        assert batch(5, 4).ids.shape == (6, 5)
        assert batch(3, 6).ids.shape == (8, 3)
        refused(lambda: batch(5, 6, least=(4, 1)), "Use at most `num_sequences=4`, or")
        refused(lambda: batch(5, 6, least=(2, 5)), "Use at most `length=3`, or")
        refused(lambda: batch(20, 6, least=(4, 5)), "`length=4` with `num_sequences=5`")
        batch(4, 5)
        refused(lambda: batch(20, 6, least=(5, 5)), "Use a longer text")

    @pytest.mark.parametrize(
        ("call", "asked", "others", "least"),
        [
            (sinkscope.study, {"length": 64}, 96, (32, 16)),
            (sinkscope.intervene, {"length": 64, "interventions": {"mask_to_self": 3}}, 64, (2, 1)),
        ],
    )
    def test_a_short_text_is_refused_with_sizes_that_fit(self, call, asked, others, least, tmp_path):
        path = tmp_path / "short.txt"
        path.write_text("The cat sat on the mat, and the dog lay on the rug. " * 360)
        with pytest.raises(InputError) as refusal:
            call("reference:softmax", tokens=f"text:{path}", num_sequences=1000, **asked)
        (found,) = map(int, re.findall(r" has (\d+)\. ", str(refusal.value)))
        advised = {name: int(number) for name, number in re.findall(r"`(\w+)=(\d+)`", str(refusal.value))}
        sizes = {"length": asked["length"], "num_sequences": 1000} | advised
        assert advised
        assert sizes["length"] * (others + sizes["num_sequences"]) <= found
        assert (sizes["length"], sizes["num_sequences"]) >= least
        assert sizes["num_sequences"] >= least[1]

    @pytest.mark.parametrize(
        ("content", "parts"),
        [
            (b"", ["no text in", "empty", "Name a text file"]),
            (b" \n\t", ["empty"]),
            (b"w10 \xff w11", ["not UTF-8 at byte 4"]),
            (b"w10 \0 w11", ["a binary file", "UTF-8"]),
        ],
    )
    def test_not_text(self, loaded, tmp_path, content, parts):
        (tmp_path / "bad.txt").write_bytes(content)
        refused(lambda: token_batch(loaded, f"text:{tmp_path / 'bad.txt'}"), "bad.txt", *parts)

    def test_of_a_long_text_the_beginning_is_read(self, loaded, tmp_path):
        path = tmp_path / "long.txt"
        words = [f"w{10 + i % 60}" for i in range(100_000)]
        path.write_text(" ".join(words))
        read: list[int] = []

        class Watched(type(loaded.tokenizer)):
            def __call__(self, text, **options):
                read.append(len(text))
                return super().__call__(text, **options)

        tokenizer = word_tokenizer()
        tokenizer.__class__ = Watched
        found = token_batch(replace(loaded, tokenizer=tokenizer), f"text:{path}", length=16, num_sequences=2).ids
        assert found.flatten().tolist() == [10 + i % 60 for i in range(32)]
        assert max(read) < 1000

    @pytest.mark.parametrize("wanted", [1, 2, 3, 10, 33])
    def test_a_cut_changes_no_token(self, tmp_path, wanted):
        """Long words and letters of two bytes: whatever a cut leaves of one, the tokens before it are those of all."""
        path = tmp_path / "words.txt"
        text = " ".join(letter * 100 for letter in "abcde" * 20) + " é" * 50
        path.write_text(text, encoding="utf-8")
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        bpe.train_from_iterator(
            [text], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe)
        whole = tokenizer(text)["input_ids"]
        assert first_ids(tokenizer, partial(read_text, path), wanted)[:wanted] == whole[:wanted]

    def test_a_byte_order_mark_is_not_text(self, loaded, tmp_path):
        (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbfw10 w11")
        assert token_batch(loaded, f"text:{tmp_path / 'mark.txt'}", length=2, num_sequences=1).ids.tolist() == [
            [10, 11]
        ]

    def test_no_file(self, loaded, tmp_path):
        refused(
            lambda: token_batch(loaded, f"text:{tmp_path / 'none.txt'}"), "There is no file", "none.txt", "a text file"
        )
        refused(lambda: token_batch(loaded, f"text:{tmp_path}"), f"{tmp_path} is a folder", "a text file")

    def test_no_tokenizer(self, bare, text):
        refused(lambda: token_batch(bare, f"text:{text}"), "LlamaForCausalLM has no tokenizer", "`tokens='random'`")

    def test_a_tokenizer_of_another_model(self, text):
        small = loaded_llama(word_tokenizer(), vocab_size=20)
        refused(
            lambda: token_batch(small, f"text:{text}", length=10, num_sequences=2),
            "ids must be from 0 to 19",
            "39",
            "tokenizer",
        )


class TestSizes:
    @pytest.mark.parametrize(
        "tokens", ["words", "", "random:", "random:3", "text", "text:", "repeat", "repeat:", "Random"]
    )
    def test_unknown_forms(self, loaded, tokens):
        refused(lambda: token_batch(loaded, tokens), "random, text:FILE or repeat:ID", repr(tokens), "`tokens`")

    def test_too_small(self, loaded):
        refused(lambda: token_batch(loaded, length=1), "at least 2", "`length`")
        most = memory_bytes() // 32 // 64
        refused(lambda: token_batch(loaded, num_sequences=10**11), f"`num_sequences={most}`")
        refused(lambda: token_batch(loaded, num_sequences=0), "at least 1", "`num_sequences`")
        assert token_batch(loaded, length=2, num_sequences=1).ids.shape == (1, 2)

    def test_beyond_the_context(self, loaded):
        refused(lambda: token_batch(loaded, length=129), "context of 128 tokens", "`length=129`", "`length=128`")
        assert token_batch(loaded, length=128).length == 128
        gpt2 = load(GPT2LMHeadModel(GPT2Config(n_positions=8, n_embd=8, n_layer=1, n_head=1, vocab_size=50)))
        refused(lambda: token_batch(gpt2, length=9), "context of 8 tokens")

    def test_no_bos(self):
        loaded = loaded_llama(word_tokenizer(has_bos=False), bos_token_id=None)
        refused(lambda: token_batch(loaded, bos=True), "beginning-of-sequence", "`bos=False`")
        refused(lambda: token_batch(loaded_llama(None, bos_token_id=500), bos=True), "ids must be from 0 to 95", "500")


class TestGiven:
    IDS = [[1, 7, 8], [1, 9, 10]]  # noqa: RUF012

    @pytest.mark.parametrize(
        "ids",
        [
            IDS,
            torch.tensor(IDS, dtype=torch.int32),
            np.array(IDS),
            {"input_ids": IDS},
            BatchEncoding({"input_ids": torch.tensor(IDS), "attention_mask": torch.ones(2, 3)}),
        ],
        ids=["lists", "tensor", "array", "dict", "encoding"],
    )
    def test_forms(self, ids):
        batch = given_batch(ids)
        assert (batch.ids.tolist(), batch.ids.dtype) == (self.IDS, torch.int64)
        assert batch.describe() == {"kind": "given", "length": 3, "count": 2, "seed": None, "bos": False}
        assert batch.shared_first_token

    def test_is_a_copy(self):
        ids = torch.tensor(self.IDS)
        batch = given_batch(ids)
        ids.zero_()
        assert batch.ids.tolist() == self.IDS

    def test_one_sequence(self):
        assert given_batch(torch.tensor([4, 5, 6])).ids.tolist() == [[4, 5, 6]]

    def test_what_a_mask_leaves_out_is_left_out(self):
        for mask in ([[1, 1, 1], [1, 1, 0]], torch.tensor([[1, 1, 1], [1, 1, 0]])):
            for batch in (given_batch(self.IDS, mask), given_batch({"input_ids": self.IDS, "attention_mask": mask})):
                assert [row.tolist() for row in batch.whole] == [[1, 7, 8], [1, 9]]
        left = given_batch([[0, 0, 7, 8], [0, 0, 9, 10]], [[0, 0, 1, 1]] * 2)
        assert (left.ids.tolist(), left.whole) == ([[7, 8], [9, 10]], ())
        assert given_batch(self.IDS, torch.ones(2, 3)).ids.tolist() == self.IDS  # nothing masked
        refused(lambda: given_batch(self.IDS, [[1, 0, 1], [1, 1, 1]]), "within a sequence")
        refused(lambda: given_batch(self.IDS, torch.ones(2, 1, 3, 3)), "one number for each id")

    @pytest.mark.parametrize(
        ("ids", "parts"),
        [
            (torch.rand(2, 3), ["must be integers, not float32"]),
            (torch.ones(2, 3, dtype=torch.bool), ["must be integers, not bool"]),
            ([[1, 2], [3]], ["at least 2 positions", "[1]"]),
            (torch.zeros(2, 3, 4, dtype=torch.long), ["[sequences, positions]", "[3, 4]"]),
            (torch.zeros(0, 3, dtype=torch.long), ["no token ids or texts"]),
            ([5], ["at least 2 positions", "[1]"]),
            ([], ["no token ids or texts"]),
            ({"ids": [[1, 2]]}, ["holds ids, and no input_ids"]),
            ("text", ["Texts or token ids", "'text'"]),
        ],
    )
    def test_refused(self, ids, parts):
        refused(lambda: given_batch(ids), *parts)

    @pytest.mark.parametrize("bad", [-1, NUM_ROWS])
    def test_vocabulary(self, loaded, bad):
        refused(lambda: given_batch([[1, bad]], model=loaded), "ids must be from 0 to 95", str(bad))
        refused(lambda: given_batch([[1, bad]], model=loaded.model), "ids must be from 0 to 95", str(bad))
        given_batch([[1, bad]])  # nothing to compare with

    def test_with_a_model(self, loaded):
        refused(lambda: given_batch(torch.full((1, 129), 7), model=loaded), "context of 128 tokens")
        assert given_batch(self.IDS, model=loaded).bos
        assert not given_batch([[7, 8], [1, 2]], model=loaded).bos

    def test_a_model_without_a_context_limit(self):
        model = SimpleNamespace(
            config=SimpleNamespace(bos_token_id=None), get_input_embeddings=lambda: torch.nn.Embedding(9, 2)
        )
        assert given_batch(torch.zeros(1, 5000, dtype=torch.long), model=model).length == 5000
