"""What real checkpoints have and tiny random models lack: one entry a trait, planted into tiny models.

A trait says how it gets into a model, which families it is planted into, and what is expected of the commands there:
right numbers, unless it names a refusal.
"""

import contextlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from planted_models import planted_chain
from safetensors.torch import load_file, save_file
from tiny_models import PARTS, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

COMMANDS = ("trace", "intervene", "bias", "fingerprint", "study")
READ = ("trace", "intervene")
LAYERS = ("trace", "intervene", "bias", "study")
"""Commands that read layers: a fingerprint asks for the last state alone, of any family."""
CHAIN = "chain"
"""A Llama with a planted sink, for studies: a random model has no sink to explain."""
STUDIED = (CHAIN, "gpt2")
ROTARY = ("llama", "qwen3", "gpt_neox")
SHAPES = ("llama", "gpt2", "gemma3")
"""Three kinds of block: the usual one, one with biases and learned positions, one with norms behind its parts."""
EVERY = (*SHAPES, "qwen3", "gpt_neox", "opt")
VOCABULARY = 97
"""Of the tiny models; the planted chain has 64."""
ZERO = (5, 6, 7, 8)


def _unchanged(x: Any) -> Any:
    return x


@dataclass(frozen=True, kw_only=True)
class Trait:
    """One thing that a checkpoint may have."""

    families: Collection[str]
    commands: Collection[str] = COMMANDS
    """`study` runs on STUDIED alone, the chain is for studies alone; `bos` and `text` are traces of such tokens."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Entries of the configuration."""
    plant: Callable[[nn.Module, str], None] | None = None
    """Changes a model of a family in place."""
    tokens: Callable[[Tensor], Tensor] = _unchanged
    """Changes the ids that are traced, so that they meet the trait."""
    save: Callable[[nn.Module, Path], None] | None = None
    """Writes a folder, which is then loaded; without it the model itself is given."""
    wrap: Callable[[nn.Module], nn.Module] = _unchanged
    """What stands around the model when it is given."""
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    """In what every call runs."""
    changes_numbers: bool = True
    """Whether a trace of the model without the trait gives other numbers."""
    never_drawn: Collection[int] = ()
    """Ids that random tokens leave out."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """By command, a word of the refusal."""
    tolerance: float = 1e-4
    """Both passes round: the package's in the model's dtype, and in another order than the plain one."""

    def cells(self) -> list[tuple[str, str]]:
        """(family, command) that are tested."""
        return [
            (family, command)
            for family in self.families
            for command in self.commands
            if (family in STUDIED if command == "study" else family != CHAIN)
        ]


def build(trait: Trait, family: str) -> nn.Module:
    """A tiny model of the family, two layers deep, with the trait in it."""
    if family == CHAIN:
        model = planted_chain(0)[0]
        for key, value in trait.config.items():
            setattr(model.config, key, value)
    else:
        depth = "n_layer" if family == "gpt2" else "num_hidden_layers"
        types = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3" else {}
        model = tiny_model(family, **{depth: 2, **types, **trait.config})
    if trait.plant is not None:
        with torch.no_grad():
            trait.plant(model, family)
    return model


def part(model: nn.Module, family: str, layer: int, name: str) -> nn.Module:
    places = PARTS["llama" if family == CHAIN else family]
    return model.get_submodule(places["blocks"])[layer].get_submodule(places[name])


# Weights


def _zero_rows(model: nn.Module, family: str) -> None:
    model.get_input_embeddings().weight[list(ZERO)] = 0


def _rows_alike(model: nn.Module, family: str) -> None:
    weight = model.get_input_embeddings().weight
    weight[list(ZERO)] = weight.mean(0)


def _zeros_at(position: int | slice) -> Callable[[Tensor], Tensor]:
    """In one sequence first, in one in the middle, and in all of them at a position."""

    def put(ids: Tensor) -> Tensor:
        ids = ids.clone()
        ids[0, 0], ids[1, 9] = ZERO[0], ZERO[1]
        ids[:, position] = ZERO[0]
        return ids

    return put


def _loud_token_at(position: int) -> Callable[[Tensor], Tensor]:
    return lambda ids: ids.index_fill(1, torch.tensor(position), 50)


def _huge(model: nn.Module, family: str) -> None:
    """One token of massive dimensions, and one loud neuron."""
    weight = model.get_input_embeddings().weight
    weight[50, 7], weight[50, 19] = -3e4, 2e4
    _scale_neuron(model, family, 100.0)


def _scale_neuron(model: nn.Module, family: str, factor: float) -> None:
    """Neuron 3 of layer 0 writes `factor` times as much."""
    weight = part(model, family, 0, "down").weight
    (weight[3] if family == "gpt2" else weight[:, 3]).mul_(factor)


def _overflow_in_half(model: nn.Module, family: str) -> None:
    for layer in range(model.config.num_hidden_layers):
        weight = part(model, family, layer, "down").weight
        weight.mul_(6e4 / weight.abs().max())
    model.half()


def _overflow(model: nn.Module, family: str) -> None:
    for layer in range(2):
        part(model, family, layer, "down").weight.mul_(1e38)


def _unit_vectors(model: nn.Module, family: str) -> None:
    """Every token is one of 48 unit vectors, all as often as the others, and no layer adds anything."""
    for layer in range(2):
        part(model, family, layer, "down").weight.zero_()
        part(model, family, layer, "output").weight.zero_()
    weight = model.get_input_embeddings().weight
    weight.copy_(5 * torch.eye(weight.shape[1])[torch.arange(len(weight)) % weight.shape[1]])


def _every_token_as_often(ids: Tensor) -> Tensor:
    return torch.arange(ids.numel()).view_as(ids) % 48


def _as(dtype: torch.dtype) -> Callable[[nn.Module, str], None]:
    def plant(model: nn.Module, family: str) -> None:
        model.to(dtype)

    return plant


class LowRank(nn.Module):
    """An adapter as PEFT leaves it: around the projection, whose own weight is still to be seen at `weight`."""

    def __init__(self, base_layer: nn.Module, rank: int = 2):
        super().__init__()
        self.base_layer = base_layer
        width_out, width_in = (base_layer.weight if isinstance(base_layer, nn.Linear) else base_layer.weight.T).shape
        generator = torch.Generator().manual_seed(0)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width_in, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, width_out, bias=False)})
        for matrix in (*self.lora_A.values(), *self.lora_B.values()):
            matrix.weight.copy_(torch.randn(matrix.weight.shape, generator=generator))

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def _adapter(name: str) -> Callable[[nn.Module, str], None]:
    def plant(model: nn.Module, family: str) -> None:
        places = PARTS["llama" if family == CHAIN else family]
        block = model.get_submodule(places["blocks"])[0]
        place = places.get(name, name)
        block.set_submodule(place, LowRank(block.get_submodule(place)))

    return plant


# Files


def _saved(model: nn.Module, folder: Path) -> None:
    model.save_pretrained(folder)


def _sharded(model: nn.Module, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2


def _with_tokenizer(num_words: int, *added: str) -> Callable[[nn.Module, Path], None]:
    def save(model: nn.Module, folder: Path) -> None:
        model.save_pretrained(folder)
        # No word is the beginning of another: an unknown token is special, and would be cut out of longer words.
        tokenizer = Tokenizer(models.WordLevel({f"w{i}x": i for i in range(num_words)}, unk_token="w3x"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w3x")
        if added:
            wrapped.add_special_tokens({"additional_special_tokens": list(added)})
        wrapped.save_pretrained(folder)

    return save


def _quantised(dtype: torch.dtype, scale: str, method: str | None = None) -> Callable[[nn.Module, Path], None]:
    """Every matrix in 8 bits, its scale beside it under a name that transformers may not know."""

    def save(model: nn.Module, folder: Path) -> None:
        model.save_pretrained(folder)
        tensors = {}
        for name, weight in load_file(folder / "model.safetensors").items():
            if weight.ndim == 2 and "embed" not in name and "lm_head" not in name:
                step = weight.abs().amax() / 100
                tensors[name] = (weight / step).to(dtype)
                tensors[name.replace("weight", scale)] = step.reshape(1)
            else:
                tensors[name] = weight
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if method is not None:
            config = json.loads((folder / "config.json").read_text())
            config["quantization_config"] = {"quant_method": method}
            (folder / "config.json").write_text(json.dumps(config))

    return save


# Configurations and surroundings


@contextlib.contextmanager
def _default_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _default_meta():
    with torch.device("meta"):
        yield


def _compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # a wrapper is what counts here, not what it compiles to


SHORT = dict(original_max_position_embeddings=16)
"""Less than the tokens that are read, so that what lies beyond counts."""


def _rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **options}}


def _everywhere(word: str) -> dict[str, str]:
    return dict.fromkeys(COMMANDS, word)


def _where_layers_are_read(word: str) -> dict[str, str]:
    return dict.fromkeys(LAYERS, word)


BIASES = dict(attention_bias=True, mlp_bias=True)

TRAITS: dict[str, Trait] = {
    "nothing": Trait(families=(*EVERY, "mistral"), changes_numbers=False),
    # Vocabulary
    "zero rows": Trait(families=(*EVERY, CHAIN), plant=_zero_rows, tokens=_zeros_at(13), never_drawn=ZERO),
    "a zero row first": Trait(families=SHAPES, commands=READ, plant=_zero_rows, tokens=_zeros_at(0)),
    "nothing but zero rows": Trait(
        families=SHAPES, commands=("trace",), plant=_zero_rows, tokens=_zeros_at(slice(0, None))
    ),
    "rows alike": Trait(
        families=("llama", "gpt2"), commands=("bias",), plant=_rows_alike, tokens=_zeros_at(13), never_drawn=ZERO
    ),
    "padded vocabulary": Trait(
        families=("llama", "gpt2"),
        commands=("bias", "fingerprint", "study", "text"),
        save=_with_tokenizer(60),
        changes_numbers=False,
        never_drawn=range(60, VOCABULARY),
    ),
    "vocabulary too small": Trait(
        families=("llama", "gpt2"),
        commands=("bias", "fingerprint", "text"),
        save=_with_tokenizer(120),
        changes_numbers=False,
        refused={"text": "vocabulary"},
    ),
    "added tokens": Trait(
        families=("llama",),
        commands=("bias", "text"),
        save=_with_tokenizer(90, "<|a|>", "<|b|>"),
        changes_numbers=False,
        never_drawn=range(90, VOCABULARY),
    ),
    "no tokenizer": Trait(
        families=("llama",), commands=("text",), save=_saved, changes_numbers=False, refused={"text": "tokenizer"}
    ),
    "list of EOS ids": Trait(
        families=("llama", "gpt2"),
        commands=("trace", "bias"),
        config=dict(eos_token_id=[2, 11, 12]),
        changes_numbers=False,
        never_drawn=(2, 11, 12),
    ),
    "BOS": Trait(families=SHAPES, commands=("bos",), config=dict(bos_token_id=1), changes_numbers=False),
    "no BOS": Trait(
        families=SHAPES,
        commands=("trace", "bos"),
        config=dict(bos_token_id=None),
        changes_numbers=False,
        refused={"bos": "beginning-of-sequence"},
    ),
    "BOS above the vocabulary": Trait(
        families=("llama",),
        commands=("trace", "bos"),
        config=dict(bos_token_id=128_000),
        changes_numbers=False,
        refused={"bos": "128000"},
    ),
    # Weights and activations
    "huge activations": Trait(families=EVERY, plant=_huge, tokens=_loud_token_at(4)),
    "float16": Trait(families=SHAPES, commands=READ, plant=_as(torch.float16), tolerance=2e-2),
    "bfloat16": Trait(families=SHAPES, commands=READ, plant=_as(torch.bfloat16), tolerance=1e-1),
    "float64": Trait(families=(*SHAPES, CHAIN), plant=_as(torch.float64), changes_numbers=False),
    "overflow in float16": Trait(families=(*EVERY, CHAIN), plant=_overflow_in_half, refused=_everywhere("dtype")),
    "overflow in float32": Trait(families=("llama", "gpt2"), plant=_overflow, refused=_everywhere("dtype")),
    "repeated eigenvalues": Trait(
        families=("llama", "qwen3"), commands=READ, plant=_unit_vectors, tokens=_every_token_as_often
    ),
    "biases": Trait(families=("llama", "qwen3", "gemma3"), commands=(*READ, "bias"), config=BIASES),
    "no biases": Trait(families=("gpt_neox",), commands=READ, config=dict(attention_bias=False)),
    "tied head": Trait(
        families=("llama", "gpt_neox"),
        commands=("bias", "fingerprint"),
        config=dict(tie_word_embeddings=True),
        changes_numbers=False,
    ),
    "untied head": Trait(
        families=("gpt2", "gemma3", "opt"),
        commands=("bias", "fingerprint"),
        config=dict(tie_word_embeddings=False),
        changes_numbers=False,
    ),
    # Shapes
    "head size apart from width": Trait(
        families=("llama", "mistral", "gemma3"), commands=(*READ, "bias"), config=dict(head_dim=20)
    ),
    "one head": Trait(families=("llama", "gemma3"), config=dict(num_attention_heads=1, num_key_value_heads=1)),
    "one head of GPT-2": Trait(families=("gpt2",), config=dict(n_head=1)),
    "one layer": Trait(families=("llama", "gpt_neox", "opt"), config=dict(num_hidden_layers=1)),
    "one layer of GPT-2": Trait(families=("gpt2",), config=dict(n_layer=1)),
    "no layer": Trait(
        families=("llama",), commands=LAYERS, config=dict(num_hidden_layers=0), refused=_everywhere("layers")
    ),
    "no layer of GPT-2": Trait(
        families=("gpt2",), commands=LAYERS, config=dict(n_layer=0), refused=_everywhere("layers")
    ),
    "window of 2": Trait(families=("mistral", "gemma3"), commands=READ, config=dict(sliding_window=2)),
    "window of 1": Trait(families=("mistral", "gemma3"), config=dict(sliding_window=1)),
    "window of 0": Trait(families=("mistral", "gemma3"), config=dict(sliding_window=0), refused=_everywhere("window")),
    # Positions
    "linear rope": Trait(families=ROTARY, commands=("trace",), config=_rope("linear", factor=4.0)),
    "dynamic rope": Trait(families=("llama",), commands=("trace",), config=_rope("dynamic", factor=2.0, **SHORT)),
    "yarn": Trait(families=("llama", "qwen3"), commands=("trace",), config=_rope("yarn", factor=4.0, **SHORT)),
    "rope of Llama 3": Trait(
        families=("llama", "mistral"),
        commands=("trace",),
        config=_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **SHORT),
    ),
    # Files
    "saved and loaded": Trait(families=EVERY, commands=("trace",), save=_saved, changes_numbers=False),
    "sharded files": Trait(
        families=("llama", "gpt2"), commands=("trace", "fingerprint"), save=_sharded, changes_numbers=False
    ),
    "float8 with unknown scales": Trait(
        families=("llama",), save=_quantised(torch.float8_e4m3fn, "weight_scale"), refused=_everywhere("scale|quanti")
    ),
    "float8 by an unknown method": Trait(
        families=("llama",),
        save=_quantised(torch.float8_e4m3fn, "weight_scale", "modelopt"),
        refused=_everywhere("modelopt"),
    ),
    "int8 with stray scales": Trait(
        families=("llama", "qwen3"),
        save=_quantised(torch.int8, "weight_scale_inv"),
        refused=_everywhere("scale|int8|quanti"),
    ),
    # Around the model
    "adapter at the down projection": Trait(
        families=(*EVERY, CHAIN), plant=_adapter("down"), refused=_where_layers_are_read("adapter")
    ),
    "adapter at the output projection": Trait(
        families=("llama", "gpt2"), plant=_adapter("output"), refused=_where_layers_are_read("adapter")
    ),
    "adapter at the query projection": Trait(families=("llama", "gemma3"), plant=_adapter("self_attn.q_proj")),
    "DataParallel": Trait(families=("llama", "gpt2"), wrap=nn.DataParallel, changes_numbers=False),
    "compiled": Trait(
        families=("llama", "gpt2"), commands=(*READ, "fingerprint"), wrap=_compiled, changes_numbers=False
    ),
    "default dtype float64": Trait(
        families=("llama",), around=_default_float64, changes_numbers=False, refused=_everywhere("default")
    ),
    "default device meta": Trait(
        families=("llama",), around=_default_meta, changes_numbers=False, refused=_everywhere("default")
    ),
}
