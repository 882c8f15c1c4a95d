"""Loading: what loads is what was saved, and what cannot be loaded exactly is refused with its reason."""

import json
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import gguf
import huggingface_hub
import peft
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)
from transformers.utils import logging

from sinkscope.errors import InputError
from sinkscope.models import gguf_files, loading, weights
from sinkscope.models.gguf_files import read_gguf_header
from sinkscope.models.loaded import bos_id
from sinkscope.models.loading import load
from sinkscope.models.weights import weight_hash

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
BERT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 32,
}


def llama(**changes) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**LLAMA | changes)).eval()


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    llama().save_pretrained(folder)
    tokenizer_to_save().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "tiny"))


def tokenizer_to_save() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(80))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def refused(source, *parts: str, **options) -> InputError:
    with pytest.raises(InputError) as caught:
        load(source, **options)
    for part in parts:
        assert part in str(caught.value)
    return caught.value


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


class TestDefault:
    def test_the_same_whatever_the_random_state_and_leaves_it(self):
        hashes = set()
        for seed in (1, 2):
            torch.manual_seed(seed)
            before = torch.random.get_rng_state()
            loaded = load(device="cpu")
            assert torch.equal(torch.random.get_rng_state(), before)
            hashes.add(loaded.weight_hash)
        assert len(hashes) == 1
        assert (loaded.name, loaded.source, loaded.dtype) == ("reference:softmax", "reference", "float32")
        assert not loaded.model.training
        assert bos_id(loaded) == 0

    def test_dtype(self):
        assert load(dtype="bfloat16", device="cpu").dtype == "bfloat16"

    def test_a_loaded_model_passes_through(self):
        loaded = load(device="cpu")
        assert load(loaded) is loaded


class TestFolder:
    def test_what_was_saved(self, saved, capfd):
        before, verbosity = torch.random.get_rng_state(), logging.get_verbosity()
        loaded = load(saved, device="cpu")
        assert torch.equal(torch.random.get_rng_state(), before)
        assert logging.get_verbosity() == verbosity
        assert logging.is_progress_bar_enabled()
        weights = load_file(saved / "model.safetensors")
        assert weights.keys() == loaded.model.state_dict().keys()
        assert all(torch.equal(weight, weights[name]) for name, weight in loaded.model.state_dict().items())
        assert (loaded.name, loaded.source, loaded.revision, loaded.dtype) == ("tiny", "folder", None, "float32")
        assert not loaded.model.training
        assert not loaded.trust_remote_code
        assert loaded.tokenizer is not None
        assert bos_id(loaded) == loaded.tokenizer.bos_token_id == 1
        assert capfd.readouterr() == ("", "")
        given = load(loaded.model)
        assert (given.weight_hash, given.source, given.model) == (loaded.weight_hash, "given", loaded.model)
        assert given.name == "tiny"

    @pytest.mark.parametrize(("dtype", "expected"), [("auto", "float32"), ("bfloat16", "bfloat16")])
    def test_a_bfloat16_checkpoint_is_float32_on_the_cpu(self, tmp_path, dtype, expected):
        llama().bfloat16().save_pretrained(tmp_path)
        assert load(str(tmp_path), dtype=dtype, device="cpu").dtype == expected

    def test_device_map(self, saved):
        loaded = load(saved, device_map={"": "cpu"})
        assert loaded.weight_hash == load(saved, device="cpu").weight_hash
        refused(saved, "`device` and `device_map` cannot be given together", device="cpu", device_map="auto")

    def test_shards(self, tmp_path):
        model = llama()
        model.save_pretrained(tmp_path, max_shard_size="20KB")
        shards = sorted(tmp_path.glob("model-*.safetensors"))
        assert len(shards) > 1
        assert load(tmp_path, device="cpu").weight_hash == weight_hash(model)
        content = shards[1].read_bytes()
        shards[1].write_bytes(content[:-1])
        refused(tmp_path, f"{shards[1].name} is corrupt or truncated", "Fetch the file again")
        shards[1].unlink()
        refused(tmp_path, f"{shards[1].name}, which model.safetensors.index.json names, is missing", "Fetch it")
        index = tmp_path / "model.safetensors.index.json"
        for odd in ("../weights.safetensors", "a" * 5000):
            index.write_text(json.dumps({"weight_map": {"lm_head.weight": odd}}))
            refused(tmp_path, "must name files", odd[:100])
        index.write_text("{}")
        refused(tmp_path, "no weight_map, which names the shards")
        index.write_text("{")
        refused(tmp_path, index.name, "corrupt")

    @pytest.mark.parametrize(
        "damage",
        [lambda b: b[:-1], lambda b: b + b"x", lambda b: b[:9], lambda b: b"", lambda b: b"\xff" * 8 + b[8:]],
        ids=["one byte short", "one byte long", "header cut", "empty", "header length"],
    )
    def test_damaged_safetensors(self, folder, damage):
        weights = folder / "model.safetensors"
        load(folder, device="cpu")  # the control: before the damage it loads
        weights.write_bytes(damage(weights.read_bytes()))
        refused(folder, "model.safetensors is corrupt or truncated", "Fetch the file again")

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
    def test_pickle(self, folder, name):
        (folder / name).write_bytes(b"")
        load(folder, device="cpu")  # beside safetensors a pickle is not opened, so it does no harm
        (folder / "model.safetensors").unlink()
        refused(folder, f"{name} in tiny is a pickle checkpoint", "Convert it to safetensors")
        refused(folder / name, f"{name} is a pickle checkpoint", "Convert it to safetensors")

    def test_no_weights(self, folder):
        (folder / "model.safetensors").unlink()
        refused(folder, "model.safetensors or model.safetensors.index.json in tiny", "only config.json")

    def test_an_adapter_names_its_base_and_the_lines_that_load_it(self, folder, tmp_path):
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(r=2))
        model.save_pretrained(adapter := tmp_path / "adapter")
        told = refused(adapter, f"is an adapter of {folder}, not a model by itself", "PeftModel.from_pretrained(base, ")
        names = {"AutoModelForCausalLM": AutoModelForCausalLM, "PeftModel": peft.PeftModel}
        exec(str(told).split("pass the model: ")[1].rstrip("."), names)
        assert load(names["model"]).model.peft_config
        for content in ("{}", '{"base_model_name_or_path": 3}', "[]"):
            (adapter / "adapter_config.json").write_text(content)
            refused(adapter, "a JSON object" if content == "[]" else "an adapter of ITS BASE")

    def test_a_training_run_is_its_model_and_gives_it_its_name(self, folder):
        alone, run = load(folder), folder.parent / "run"
        (run / "snapshots").mkdir(parents=True)
        shutil.copytree(folder, run / "snapshots" / "step-00000002")
        folder.rename(run / "model")
        (run / "config.yaml").write_text("model: {}\ntraining: {}\n")
        names = {"": "run", "model": "run", "snapshots/step-00000002": "run, step-00000002"}
        found = {part: load(run / part) for part in names}
        assert {part: one.name for part, one in found.items()} == names
        assert {one.weight_hash for one in found.values()} == {alone.weight_hash}
        shutil.rmtree(run / "model")
        refused(run, f"{run} has no model yet", "Finish it", f"init:{run}")

    def test_a_file_that_is_no_model(self, folder):
        refused(folder / "model.safetensors", "model.safetensors is neither a model folder", "Name the folder")

    @pytest.mark.parametrize(
        ("content", "parts"),
        [
            (None, ["no config.json in tiny", "Name the folder"]),
            ("{", ["config.json is corrupt (", "Fetch"]),
            ("[]", ["config.json does not hold a JSON object. Fetch"]),
            ("\xff", ["config.json", "Fetch"]),
            ("{}", ["in tiny has no model_type"]),
            ('{"model_type": "nonsense"}', ["does not know", "'nonsense' of tiny", "upgrade transformers"]),
            (
                '{"model_type": "llama", "hidden_size": "wide"}',
                ["cannot read config.json", "expected int, got str", "mend config.json"],
            ),
            ('{"model_type": "llama", "num_hidden_layers": 1000000000}', ["more than 4096", "num_hidden_layers 1000"]),
            ('{"model_type": "llama", "vision_config": {"num_labels": 1000000000}}', ["more than 4096", "num_labels"]),
            ('{"model_type": "llama", "auto_map": 7}', ["auto_map", "is 7"]),
            ('{"model_type": "llama", "sliding_window": "wide"}', ["sliding_window", "at least 1 token", "'wide'"]),
        ],
    )
    def test_config(self, folder, content, parts):
        path = folder / "config.json"
        path.unlink() if content is None else path.write_bytes(content.encode("latin-1"))
        refused(folder, *parts)

    def test_missing_and_misshapen_weights(self, folder):
        name = "model.layers.1.mlp.down_proj.weight"
        edit_weights(folder, lambda weights: weights.update({name: torch.zeros(3, 3)}))
        refused(folder, "cannot load the weights that config.json describes")
        edit_weights(folder, lambda weights: weights.pop(name))
        refused(
            folder, f"no weights for 1 of the parameters that config.json describes, first {name}", "random weights"
        )

    def test_tied_weights_are_not_missing(self, tmp_path):
        llama(tie_word_embeddings=True).save_pretrained(tmp_path)
        assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
        load(tmp_path, device="cpu")
        edit_config(tmp_path, tie_word_embeddings=False)
        refused(tmp_path, "no weights for 1 of the parameters", "first lm_head.weight")

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
    def test_weights_that_are_not_finite(self, folder, name, value):
        edit_weights(folder, lambda weights: weights[name].view(-1)[-1:].fill_(value))
        refused(folder, f"There is {'NaN' if value != value else 'an infinity'} in {name}")

    def test_a_damaged_tokenizer(self, folder):
        (folder / "tokenizer.json").write_text("{")
        refused(folder, "cannot read the tokenizer", "remove its files")

    def test_without_tokenizer(self, folder):
        for file in folder.glob("tokenizer*"):
            file.unlink()
        loaded = load(folder, device="cpu")
        assert loaded.tokenizer is None
        assert bos_id(loaded) == 1  # from the configuration
        given = tokenizer_to_save()
        assert load(folder, tokenizer=given, device="cpu").tokenizer is given

    def test_no_bos(self, tmp_path):
        llama(bos_token_id=None).save_pretrained(tmp_path)
        loaded = load(tmp_path, device="cpu")
        with pytest.raises(InputError, match=r"has no beginning-of-sequence token.*`bos=False`"):
            bos_id(loaded)


class TestNotCausal:
    @pytest.mark.parametrize(
        ("build", "what"),
        [
            (lambda: BertForMaskedLM(BertConfig(**BERT)), "an encoder (bert)"),
            (lambda: BertLMHeadModel(BertConfig(**BERT)), "an encoder (bert)"),
            (
                lambda: T5ForConditionalGeneration(
                    T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=50)
                ),
                "an encoder-decoder (t5)",
            ),
            (
                lambda: Gemma3ForCausalLM(
                    Gemma3TextConfig(**LLAMA, head_dim=8, use_bidirectional_attention=True, pad_token_id=0)
                ),
                "attention in both directions (gemma3_text)",
            ),
            (
                lambda: ViTModel(
                    ViTConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
                ),
                "without a causal head (vit)",
            ),
        ],
        ids=["BertForMaskedLM", "BertLMHeadModel", "T5", "both directions", "ViT"],
    )
    def test_refused(self, tmp_path, build, what):
        model = build()
        refused(model, "a causal language model", what, "sinkscope models")
        model.save_pretrained(tmp_path)
        refused(tmp_path, "a causal language model", what, "sinkscope models")

    def test_the_same_bert_as_a_decoder_loads(self, tmp_path):
        BertLMHeadModel(BertConfig(**BERT, is_decoder=True)).save_pretrained(tmp_path)
        assert load(tmp_path, device="cpu").model.config.is_decoder


class TestRemoteCode:
    CODE = (
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    AUTO_MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}  # noqa: RUF012

    def test_runs_only_when_asked(self, folder, tmp_path, monkeypatch):
        for module in ("transformers.dynamic_module_utils", "transformers.utils.hub"):
            monkeypatch.setattr(f"{module}.HF_MODULES_CACHE", str(tmp_path / "modules"))
        (folder / "own.py").write_text(self.CODE)
        edit_config(folder, model_type="own", auto_map=self.AUTO_MAP)
        refused(folder, "not part of transformers", "brings its own code", "`trust_remote_code=True`")
        assert not (tmp_path / "modules").exists()
        loaded = load(folder, trust_remote_code=True, device="cpu")
        assert type(loaded.model).__name__ == "OwnModel"
        assert loaded.trust_remote_code

    def test_is_not_needed_for_a_known_type(self, folder):
        edit_config(folder, auto_map=self.AUTO_MAP)
        assert type(load(folder, device="cpu").model) is LlamaForCausalLM


class TestGiven:
    def test_as_it_is(self):
        model = llama()
        refused(
            model,
            "A model object is taken as it is, without `dtype`, `device` and `device_map`",
            "model.to(...)",
            dtype="bfloat16",
        )
        refused(model, "A model object is taken as it is, without `dtype`, `device` and `device_map`", device="cpu")
        refused(3, "a model name, a path, a model or None", "A int")
        assert load(model).name == "LlamaForCausalLM"

    def test_buffers(self):
        model = llama()
        model.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
        load(model)  # -inf is what a mask is made of
        model.mask[0] = float("nan")
        refused(model, "NaN in mask")

    def test_packed_weights(self):
        model = llama()
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(96, 32, dtype=torch.int8), requires_grad=False)
        refused(model, "float32, bfloat16", "lm_head.weight is quantised, in int8", "full precision")

    def test_meta(self):
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**LLAMA))
        refused(model, "no values", "meta device")


class TestWeightHash:
    def test_tells_values_names_shapes_and_dtypes_apart(self):
        def of(weight: torch.Tensor, name: str = "a") -> str:
            module = torch.nn.Module()
            module.register_parameter(name, torch.nn.Parameter(weight))
            return weight_hash(module)

        weight = torch.randn(6, 4)
        assert of(weight) == of(weight.clone()) == of(weight.T.contiguous().T)  # strides are not content
        changed = weight.clone()
        changed[3, 2] += 1e-6
        others = [of(changed), of(weight, "b"), of(weight.view(4, 6)), of(weight.bfloat16()), of(weight.double())]
        assert len({of(weight), *others}) == 6

    def test_large_tensors_are_sampled_to_both_ends(self, monkeypatch):
        monkeypatch.setattr(weights, "HASHED_ELEMENTS", 100)
        module = torch.nn.Linear(200, 100, bias=False)
        hashes = [weight_hash(module)]
        for index in (0, 200, -1, -2):
            with torch.no_grad():
                module.weight.view(-1)[index] += 1
            hashes.append(weight_hash(module))
        assert len(set(hashes)) == 5
        with torch.no_grad():
            module.weight.view(-1)[10_001] += 1  # between two samples: the documented limit
        assert weight_hash(module) == hashes[-1]

    def test_offloaded_weights(self):
        from accelerate import cpu_offload

        model = llama()
        expected = weight_hash(model)
        cpu_offload(model, execution_device=torch.device("cpu"))
        assert next(model.parameters()).is_meta
        assert load(model).weight_hash == expected


class TestHub:
    SHA = "0123456789abcdef0123456789abcdef01234567"

    @pytest.fixture
    def hub(self, monkeypatch, saved, tmp_path):
        """A Hub in memory: `error` is what a request raises, `asked` the patterns of each download."""
        hub = SimpleNamespace(
            error=None, cached=False, files=["model.safetensors"], asked=[], folder=tmp_path / self.SHA
        )
        shutil.copytree(saved, hub.folder)

        def model_info(self, name, *, revision, timeout):
            assert timeout <= 5
            if hub.error is not None:
                raise hub.error
            return SimpleNamespace(sha=TestHub.SHA, siblings=[SimpleNamespace(rfilename=file) for file in hub.files])

        def snapshot_download(repo_id, *, revision, local_files_only=False, allow_patterns=(), ignore_patterns=()):
            if local_files_only and not hub.cached:
                raise FileNotFoundError
            assert local_files_only or revision == TestHub.SHA
            hub.asked.append(list(allow_patterns))
            return str(hub.folder)

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return hub

    def test_fetches_the_commit_and_records_it(self, hub):
        loaded = load("owner/name", revision="main", device="cpu")
        assert (loaded.name, loaded.source, loaded.revision) == ("owner/name", "hub", self.SHA)
        assert loaded.tokenizer is not None
        assert ["model.safetensors" in patterns for patterns in hub.asked] == [False, True]
        assert not any("*.py" in patterns for patterns in hub.asked)

    def test_refuses_an_encoder_before_its_weights_come(self, hub):
        BertConfig(**BERT).save_pretrained(hub.folder)
        refused("owner/name", "owner/name is an encoder")
        assert len(hub.asked) == 1

    def test_refuses_an_adapter_with_the_name_of_its_base(self, hub):
        hub.files = ["adapter_config.json", "adapter_model.safetensors"]
        (hub.folder / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
        refused("owner/name", "owner/name is an adapter of owner/base", "PeftModel.from_pretrained(base, 'owner/name')")
        assert hub.asked == [["adapter_config.json"]]

    def test_refuses_a_pickle_before_anything_comes(self, hub):
        hub.files = ["config.json", "pytorch_model.bin"]
        refused("owner/name", "pytorch_model.bin in owner/name is a pickle checkpoint")
        assert hub.asked == []

    @pytest.mark.parametrize(
        ("error", "parts"),
        [
            (ConnectionError("Name or service not known"), ["the Hub cannot be reached (Name or service not known)"]),
            (RepositoryNotFoundError, ["no 'owner/name' here, nor on the Hub", "Check the spelling"]),
            (GatedRepoError, ["gated", "hf auth login"]),
            (RevisionNotFoundError, ["owner/name has no revision 'v9'", "`revision`"]),
        ],
    )
    def test_errors(self, hub, error, parts):
        # These classes want a response of the HTTP library; only their type matters here.
        hub.error = error if isinstance(error, Exception) else error.__new__(error)
        refused("owner/name", *parts, revision="v9")

    def test_without_a_network_the_cache_serves(self, hub):
        hub.error, hub.cached = TimeoutError("timed out"), True
        assert load("owner/name", device="cpu").revision == self.SHA

    def test_without_a_network_a_name_is_refused(self, monkeypatch, tmp_path):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
        refused("no-such-owner/no-such-model", "no 'no-such-owner/no-such-model' here", "the Hub cannot be reached")

    @pytest.mark.parametrize("path", ["./no/such", "~/none", "none.gguf", "a/b/c", "none.safetensors", Path("a b")])
    def test_a_path_that_does_not_exist(self, path):
        refused(path, "no folder or .gguf file '", "Check the path")

    def test_revision_is_for_the_hub(self, saved):
        refused(saved, "`revision`", "not on the Hub", revision="main")
        refused(None, "`revision`", revision="main")


@pytest.fixture(scope="session")
def gguf_model(tmp_path_factory) -> tuple[Path, LlamaForCausalLM]:
    """A Llama and the GGUF file that holds its weights in float32, with a vocabulary."""
    model = llama()
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, model)
    return path, model


def write_gguf(
    path: Path, model: LlamaForCausalLM, *, architecture: str = "llama", leave_out: str = "", parts: int = 1
):
    writer = gguf.GGUFWriter(str(path), architecture)
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    tokens = ["<unk>", "<s>", "</s>", *(chr(97 + i % 26) * (1 + i // 26) for i in range(config.vocab_size - 3))]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (config.vocab_size - 3))
    writer.add_token_merges(["a a", "b b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == leave_out:
            continue
        if "q_proj" in name or "k_proj" in name:
            # llama.cpp interleaves the two halves of each head for its rotary embedding.
            num_heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = weight.view(num_heads, 2, -1, config.hidden_size).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name.removesuffix(".weight")) + ".weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class TestGguf:
    def test_what_was_written(self, gguf_model, monkeypatch, capfd):
        path, model = gguf_model
        loaded = load(path, device="cpu")
        assert capfd.readouterr() == ("", "")
        assert loaded.weight_hash == weight_hash(model)
        assert (loaded.name, loaded.source, loaded.dtype) == ("tiny.gguf", "gguf", "float32")
        assert loaded.tokenizer is not None
        assert (loaded.tokenizer.convert_ids_to_tokens([1, 3]), bos_id(loaded)) == (["<s>", "a"], 1)
        assert loaded.model.config.vocab_size == 96
        assert not hasattr(loaded.model.config, "quantization_config")
        # The copy without the vocabulary is for speed alone.
        monkeypatch.setattr(gguf_files, "GGUF_COPY_LIMIT", 0)
        plain = load(str(path), device="cpu")
        assert plain.weight_hash == loaded.weight_hash
        assert plain.model.config.to_dict() == loaded.model.config.to_dict()

    def test_dtype(self, gguf_model):
        assert load(gguf_model[0], dtype="bfloat16", device="cpu").dtype == "bfloat16"

    def test_header(self, gguf_model):
        header = read_gguf_header(gguf_model[0])
        assert header.metadata["general.architecture"] == "llama"
        assert header.num_tensors == len(gguf_model[1].state_dict())
        assert (header.num_embeddings, len(header.tokenizer_arrays)) == (96, 3)
        assert header.data_start == gguf.GGUFReader(gguf_model[0]).data_offset

    def test_every_truncation_is_refused(self, gguf_model, tmp_path):
        content = gguf_model[0].read_bytes()
        header = read_gguf_header(gguf_model[0])
        path = tmp_path / "cut.gguf"
        for length in [*range(0, header.tensors_end, 97), header.data_start, len(content) - 1]:
            path.write_bytes(content[:length])
            refused(path, "GGUF file cut.gguf is corrupt or truncated", "Fetch the file again")
        path.write_bytes(content)
        read_gguf_header(path)  # the control: whole, it passes

    @pytest.mark.parametrize(
        ("offset", "content", "reason"),
        [
            (0, b"GGML", "does not begin with GGUF"),
            (4, struct.pack("<I", 1), "version 1"),
            (4, struct.pack(">I", 3), "version"),
            (8, struct.pack("<Q", 1 << 60), "ends inside its header"),
            (16, struct.pack("<Q", 1 << 60), ""),
            (24, struct.pack("<Q", 1 << 63), "ends inside its header"),
        ],
    )
    def test_corruption_is_refused(self, gguf_model, tmp_path, offset, content, reason):
        damaged = bytearray(gguf_model[0].read_bytes())
        damaged[offset : offset + len(content)] = content
        path = tmp_path / "damaged.gguf"
        path.write_bytes(damaged)
        refused(path, "GGUF file", "corrupt or truncated", reason)

    def test_more_layers_than_any_model_has(self, gguf_model, tmp_path):
        content, key = bytearray(gguf_model[0].read_bytes()), b"llama.block_count"
        at = content.index(key) + len(key) + 4  # behind the type of the value
        content[at : at + 4] = struct.pack("<I", 1 << 31)
        path = tmp_path / "deep.gguf"
        path.write_bytes(content)
        refused(path, "more than 4096 layers", f"llama.block_count {1 << 31}")

    def test_parts_missing_tensors_and_unknown_architectures(self, gguf_model, tmp_path):
        path, model = tmp_path / "other.gguf", gguf_model[1]
        write_gguf(path, model, parts=3)
        refused(path, "one of 3 parts of a model", "--merge")
        write_gguf(path, model, leave_out="model.layers.1.mlp.up_proj.weight")
        refused(path, "no weights for 1 of the parameters", "first model.layers.1.mlp.up_proj.weight")
        write_gguf(path, model, architecture="nonsense")
        refused(path, "cannot read the GGUF architecture 'nonsense'", "safetensors")


def test_a_model_on_the_cpu_is_in_float32_beside_a_gpu(saved, monkeypatch):
    """Control: for the GPU the checkpoint's own dtype is asked for."""
    asked = []

    def stop(*args, dtype, **options):
        asked.append(dtype)
        raise InterruptedError

    monkeypatch.setattr(loading, "_load_folder", stop)
    monkeypatch.setattr(loading, "resolve_device", lambda name: torch.device("cuda"))
    for device_map in ("cpu", None):
        with pytest.raises(InterruptedError):
            load(saved, device_map=device_map)
    assert asked == [torch.float32, "auto"]
