"""A text is read as its tokenizer reads it: what stands in front, chats, padding, and tokenizers that cannot read."""

import json
import time

import pytest
import torch
from tiny_models import tiny_model
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import sinkscope
from sinkscope.audits.texts import spread_batch
from sinkscope.errors import InputError
from sinkscope.explore.sources import LiveModel, TabState
from sinkscope.models.loading import load
from sinkscope.models.prompts import as_batch, prompt_batch
from sinkscope.models.token_batches import token_batch

BOS, EOS, GMASK, SOP, PAD = 1, 2, 3, 4, 5
NAMES = ["<unk>", "<s>", "</s>", "[gMASK]", "<sop>", "<pad>"]
FRONTS = {"llama": (BOS,), "glm": (GMASK, SOP), "gpt2": ()}
WORDS = "w10 w11 w12"
CHAT = "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} {% endfor %}"


def tokenizer_like(
    family: str, *, pad: str | None = None, chat: str | None = None, rules=()
) -> PreTrainedTokenizerFast:
    """The post-processors of Llama (BOS), GLM (two ids that are no BOS, and an end) and GPT-2 (nothing)."""
    words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate([*NAMES, *(f"w{n}" for n in range(6, 97))])}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = {"llama": "<s> $A", "glm": "[gMASK] <sop> $A </s>", "gpt2": "$A"}[family]
    words.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(name, NAMES.index(name)) for name in NAMES[1:5]]
    )
    if rules:
        words.normalizer = normalizers.Sequence([normalizers.Replace(*rule) for rule in rules])
    bos = {} if family == "glm" else {"bos_token": "<s>"}
    found = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        eos_token="</s>",
        pad_token=pad,
        extra_special_tokens=NAMES[3:5],
        **bos,
    )
    found.chat_template = chat
    return found


def loaded_like(family: str, **options):
    return load(tiny_model("llama"), tokenizer=tokenizer_like(family, **options))


@pytest.mark.parametrize("family", FRONTS)
def test_all_that_the_tokenizer_puts_in_front_stands_there(family, tmp_path):
    """In prompts, windows of a file, spread texts and, where asked for, before random tokens. Control: bos=False."""
    loaded, front = loaded_like(family), FRONTS[family]
    (tmp_path / "text.txt").write_text(" ".join(f"w{10 + i % 80}" for i in range(400)))
    named = f"text:{tmp_path / 'text.txt'}"
    prompt = as_batch(loaded, WORDS)
    assert (prompt.ids[0].tolist(), prompt.leading_ids) == ([*front, 10, 11, 12], front)
    sizes = {"length": 8, "num_sequences": 3}
    windows = token_batch(loaded, named, **sizes)
    spread = spread_batch(loaded, str(tmp_path / "text.txt"), bos=None, **sizes)
    drawn, bare = token_batch(loaded, bos=True, **sizes), token_batch(loaded, **sizes)
    for batch in (windows, spread):
        assert (batch.leading_ids, batch.length) == (front, 8)
        assert all(tuple(row[: len(front)]) == front and GMASK not in row[len(front) :] for row in batch.ids.tolist())
    assert windows.ids[1, len(front)] == 10 + 8 - len(front)
    num = max(1, len(front))  # bos=True asks for BOS where the tokenizer puts nothing
    assert drawn.leading_ids == tuple(drawn.ids[2, :num].tolist()) == (front or (BOS,))
    assert torch.equal(drawn.ids[:, num:], bare.ids[:, num:])
    assert bare.leading_ids == token_batch(loaded, named, bos=False, **sizes).leading_ids == ()
    assert prompt_batch(loaded, [WORDS], bos=False).ids[0].tolist() == [10, 11, 12]
    result = sinkscope.trace(loaded, windows)
    assert result.summary["receipt"]["leading_ids"] == front


def test_a_length_without_room_for_a_text():
    with pytest.raises(InputError, match="`length=3`"):
        token_batch(loaded_like("glm"), bos=True, length=2)
    assert token_batch(loaded_like("glm"), bos=True, length=3).length == 3


def test_ids_that_begin_as_texts_do_are_known():
    loaded = loaded_like("glm")
    assert as_batch(loaded, [[GMASK, SOP, 10, 11]]).leading_ids == (GMASK, SOP)
    assert as_batch(loaded, [[BOS, 10, 11]]).leading_ids == (BOS,)
    assert as_batch(loaded, [[BOS, 10, 11], [10, 11, 12]]).leading_ids == ()


@pytest.mark.parametrize("family", ["llama", "glm"])
def test_a_text_written_with_them_gets_no_second(family, tmp_path):
    loaded, front = loaded_like(family), FRONTS[family]
    written = " ".join(NAMES[token] for token in front)
    batch = as_batch(loaded, [f"{written} {WORDS}", WORDS])
    assert batch.ids.tolist() == [[*front, 10, 11, 12]] * 2
    (tmp_path / "text.txt").write_text(f"{written} {WORDS} w13")
    read = token_batch(loaded, f"text:{tmp_path / 'text.txt'}", length=len(front) + 4, num_sequences=1)
    assert read.ids.tolist() == [[*front, 10, 11, 12, 13]]


def test_chats_are_read_as_their_template_writes_them():
    messages = [{"role": "w20", "content": "w21"}, {"role": "w22", "content": "w23 w24"}]
    ids = [BOS, 20, 21, BOS, 22, 23, 24]
    loaded = loaded_like("llama", chat=CHAT)
    one, several = as_batch(loaded, messages), as_batch(loaded, [messages, messages[:1], WORDS])
    assert (one.ids[0].tolist(), one.leading_ids, one.kind) == (ids, (BOS,), "text")
    assert [row.tolist() for row in several.whole] == [ids, ids[:3], [BOS, 10, 11, 12]]
    assert sinkscope.intervene(loaded, {"mask_to_self": 2}, prompt=messages).before.recording.batch.length == 7
    with pytest.raises(InputError, match="no chat template"):
        as_batch(loaded_like("llama"), messages)
    with pytest.raises(InputError, match=r"chat template cannot write .*no system role"):
        as_batch(loaded_like("llama", chat="{{ raise_exception('no system role') }}"), messages)


def test_ids_of_unequal_length_are_read_as_texts_are():
    loaded = loaded_like("llama")
    rows = [list(range(10, 40)), list(range(10, 35))]
    texts = [" ".join(f"w{token}" for token in row) for row in rows]
    expected = sinkscope.trace(loaded, prompt_batch(loaded, texts, bos=False))
    for given in (rows, [torch.tensor(row) for row in rows], loaded.tokenizer(texts, add_special_tokens=False)):
        result = sinkscope.trace(loaded, given)
        assert [len(row) for row in result.recording.batch.whole] == [30, 25]
        assert all(map(torch.equal, result.sequences.received, expected.sequences.received))
    with pytest.raises(InputError, match="one length"):
        sinkscope.clamp(loaded, rows, norms=True)
    with pytest.raises(InputError, match="one length"):
        sinkscope.audit(loaded, [row[:18] for row in rows] * 10 + rows)


class TestPadding:
    TEXTS = (WORDS, "w10 w11 w12 w13 w14")

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_without_a_mask_it_is_refused(self, side):
        loaded = loaded_like("llama", pad="<pad>")
        returned = loaded.tokenizer(list(self.TEXTS), padding=True, padding_side=side, return_tensors="pt")
        with pytest.raises(InputError, match=r"padding \(id 5, 2 times\).*`attention_mask`"):
            as_batch(loaded, returned["input_ids"])
        whole = [row.tolist() for row in as_batch(loaded, returned).whole]
        assert whole == [[BOS, 10, 11, 12], [BOS, 10, 11, 12, 13, 14]]
        within = [[BOS, 10, PAD, PAD, 11]]
        assert as_batch(loaded, within).ids.tolist() == within, "the control: not at an end"

    def test_one_at_an_end_is_padding_unless_it_is_bos_or_eos(self):
        rows = [[EOS, 10, 11, EOS]]
        assert as_batch(loaded_like("llama", pad="</s>"), rows).ids.tolist() == rows
        for row in ([EOS, EOS, 10, 11], [10, 11, EOS, EOS]):
            with pytest.raises(InputError, match=r"padding \(id 2, 2 times\)"):
                as_batch(loaded_like("llama", pad="</s>"), [row])
        with pytest.raises(InputError, match=r"begins with padding \(id 5, 1 times\)"):
            as_batch(loaded_like("llama", pad="<pad>"), [[PAD, 10, 11]])
        assert as_batch(loaded_like("llama"), [[PAD, 10, 11]]).length == 3, "the control: no padding token is named"

    def test_a_model_alone_names_it_in_its_configuration(self):
        with pytest.raises(InputError, match="padding"):
            sinkscope.trace(tiny_model("llama", pad_token_id=PAD), [[PAD] * 3 + list(range(10, 40))])
        assert sinkscope.trace(tiny_model("llama"), [[PAD] * 3 + list(range(10, 40))]).has_findings


class TestTokenizersAtLoading:
    def test_an_object_or_a_folder(self, tmp_path):
        tokenizer, model = tokenizer_like("llama"), tiny_model("llama")
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        model.save_pretrained(tmp_path / "model")
        for source in (model, tmp_path / "model", load(model), "reference:softmax"):
            for given in (tokenizer, tmp_path / "tokenizer", str(tmp_path / "tokenizer")):
                found = load(source, tokenizer=given)
                assert as_batch(found, WORDS).ids.tolist() == [[BOS, 10, 11, 12]]
        assert load(tmp_path / "model").tokenizer is None
        assert load(found).tokenizer is found.tokenizer
        for wrong, words in (
            (tokenizer.backend_tokenizer, "`tokenizer` is a Tokenizer"),
            (tmp_path, "cannot read the tokenizer"),
        ):
            with pytest.raises(InputError, match=words):
                load(model, tokenizer=wrong)

    @pytest.mark.parametrize("longest", ["x", [1], True])
    def test_a_longest_text_that_is_no_number(self, tmp_path, longest):
        tokenizer_like("llama").save_pretrained(tmp_path)
        file = tmp_path / "tokenizer_config.json"
        for value, is_refused in ((longest, True), (512, False)):
            file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": value}))
            if is_refused:
                with pytest.raises(InputError, match=r"model_max_length.*tokenizer_config.json"):
                    load(tiny_model("llama"), tokenizer=tmp_path)
        assert load(tiny_model("llama"), tokenizer=tmp_path).tokenizer.model_max_length == 512

    def test_replacements_that_feed_each_other_are_refused_in_time(self, tmp_path):
        """Control: as many that do not feed each other, such as those of punctuation."""
        growing = tokenizer_like("llama", rules=[("a", "aa")] * 60)
        growing.save_pretrained(tmp_path)
        started_at = time.perf_counter()
        for given in (growing, tmp_path):
            with pytest.raises(InputError, match="replacements in the normalizer"):
                load(tiny_model("llama"), tokenizer=given)
        assert time.perf_counter() - started_at < 30
        apart = tokenizer_like(
            "llama", rules=[(chr(0x3000 + number), " . ") for number in range(60)] + [("aa", "a")] * 60
        )
        assert as_batch(load(tiny_model("llama"), tokenizer=apart), WORDS).ids.tolist() == [[BOS, 10, 11, 12]]


class TestBesideIds:
    """What a mapping holds beside ids either changes nothing or is refused."""

    IDS = torch.arange(10, 40).view(2, 15)
    PADDED = torch.tensor([[0, 0, *range(10, 23)], [1] * 15])

    def test_what_changes_nothing_is_taken(self):
        loaded, counted = loaded_like("llama"), torch.arange(15)
        for positions in (counted, counted[None], counted.expand(2, 15), None):
            given = {"input_ids": self.IDS, "position_ids": positions, "labels": self.IDS}
            assert torch.equal(as_batch(loaded, given).ids, self.IDS)
        given = {"input_ids": self.IDS, "token_type_ids": torch.zeros_like(self.IDS), "length": [15, 15]}
        assert torch.equal(as_batch(loaded, given).ids, self.IDS)
        mask = (self.PADDED > 0).long()
        given = {"input_ids": self.PADDED, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=1)}
        assert len(as_batch(loaded, given | {"position_ids": mask.cumsum(1) - 1}).whole) == 2
        with pytest.raises(InputError, match="`position_ids` beside"):
            as_batch(loaded, given)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("position_ids", IDS),
            ("position_ids", torch.arange(15).expand(3, 15)),
            ("position_ids", torch.arange(14)),
            ("token_type_ids", torch.ones(2, 15).long()),
            ("inputs_embeds", torch.zeros(2, 15, 4)),
            ("pixel_values", torch.zeros(2, 3)),
        ],
    )
    def test_what_would_change_the_pass_is_refused(self, name, value):
        loaded = loaded_like("llama")
        for read in (sinkscope.trace, sinkscope.sink_tokens, as_batch):
            with pytest.raises(InputError, match=f"`{name}` beside `input_ids` is not read.*Leave `{name}` out"):
                read(loaded, {"input_ids": self.IDS, name: value})


class TestBeginnings:
    """Where a text does not begin as the model expects, and it matters, the result says so."""

    TEXT = " ".join(f"w{10 + (7 * i) % 80}" for i in range(40))

    def test_without_the_bos_that_the_model_names(self):
        without = sinkscope.trace(loaded_like("gpt2"), self.TEXT)
        assert without.summary["receipt"]["missing_bos"] == BOS
        assert not without.findings.sinks
        assert "without the BOS token that the model names (id 1)" in without.story
        for controls in (
            sinkscope.trace(loaded_like("llama"), self.TEXT),
            sinkscope.trace(loaded_like("gpt2")),  # random tokens are no text
            sinkscope.trace(load(tiny_model("llama", bos_token_id=None), tokenizer=tokenizer_like("glm")), self.TEXT),
        ):
            assert controls.summary["receipt"]["missing_bos"] is None
            assert "BOS" not in controls.story

    def test_every_result_without_a_sink_says_so(self, tmp_path):
        """A study, an audit, a remedy with nothing to do, and the live page. Control: texts that begin with BOS."""
        (tmp_path / "text.txt").write_text(" ".join(f"w{10 + (7 * i) % 80}" for i in range(6000)))
        named, sizes = str(tmp_path / "text.txt"), {"length": 64, "num_sequences": 8}
        asked = {"source": 0, "prompt": self.TEXT, "interventions": [], "start": 0, "quantity": "attention_received"}

        def stories(bos):
            loaded = loaded_like("llama")
            yield sinkscope.study(loaded, tokens=f"text:{named}", bos=bos, length=32, num_sequences=16).story
            yield sinkscope.audit(loaded, named, bos=bos, schemes=["W8A8_TENSOR"], **sizes).story
            yield sinkscope.remedy(loaded, named, bos=bos, unplug=True, **sizes).story
            yield LiveModel(loaded, "loaded", bos=bos).view(TabState.of(asked, 1))["story"]

        assert [("without the BOS token" in story) for story in stories(False)] == [True] * 4
        assert [("BOS" in story) for story in stories(None)] == [False] * 4

    def test_it_is_not_said_beside_a_sink(self):
        result = sinkscope.trace("reference:softmax", "The cat sat on the mat, and the dog sat on the rug. " * 3)
        assert result.findings.sinks
        assert result.summary["receipt"]["missing_bos"] is not None
        assert "BOS" not in result.story

    def test_two_in_a_row(self):
        loaded = loaded_like("llama")
        rows = [[BOS, BOS, *range(10, 40)], [BOS, *range(10, 41)]]
        twice, once = sinkscope.trace(loaded, rows), sinkscope.trace(loaded, rows[1:])
        assert "In 1 of the texts two BOS tokens stand in a row" in twice.story
        assert (twice.summary["receipt"]["doubled_bos"], once.summary["receipt"]["doubled_bos"]) == (1, 0)
        assert "BOS" not in once.story


def test_a_search_that_takes_too_long_is_refused():
    """Rust ends it by a panic. Control: a text in which the search is short."""
    tokenizer = tokenizer_like("llama", rules=[(Regex("(a+)+b"), "x")])
    loaded = load(tiny_model("llama"), tokenizer=tokenizer)
    with pytest.raises(InputError, match="The tokenizer cannot read this text"):
        as_batch(loaded, "a" * 40)
    assert as_batch(loaded, WORDS).length == 4
