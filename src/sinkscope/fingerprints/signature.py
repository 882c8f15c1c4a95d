"""A model's signature: its states at the last position of random sequences, the same ones for every model.

Two states of each sequence are kept: after the last layer and its final norm, as in the published test, and the
embedding of the last token, which keeps traces of an initialisation longest. Both have the dimensions of the residual
stream.

With a signature a model can be compared later without its weights. It records what it was made from: the inputs (ids
uniform over the vocabulary, drawn from a seed, and their hash), the weights' hash, and the configuration, from which
unrelated models of the same shape can be drawn. N sequences, T positions, E width.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from pydantic import BaseModel, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sinkscope import processes
from sinkscope.arguments import check_inputs
from sinkscope.atomic import whole_file
from sinkscope.errors import InputError
from sinkscope.models.anatomy import embedding_device
from sinkscope.models.checkpoint_checks import first_line
from sinkscope.models.initial import Configuration
from sinkscope.models.loaded import LoadedModel, without_head
from sinkscope.models.token_batches import context_length, num_embeddings
from sinkscope.progress import Progress
from sinkscope.results.parts import Parts
from sinkscope.results.validated import Count, Name, Whole, check_safetensors, checked, parse_json, refused
from sinkscope.tracing.overflow import overflow
from sinkscope.tracing.receipt import Receipt, receipt_of_own_pass
from sinkscope.tracing.single_reader import evaluation_mode

VERSION = 1
"""Version of the file format and of the method; signatures of different versions are not compared."""
METADATA = "sinkscope.signature"
TOKENS_AT_ONCE = 16_384
WIDEST = 1 << 15
"""The most dimensions of a state, twice those of the widest models: a comparison takes memory for their square."""


class Versioned(BaseModel):
    version: Whole


class InputsOfRecord(BaseModel, extra="forbid"):
    vocabulary: Annotated[int, Field(ge=2, le=1 << 26)]
    length: Count
    num_sequences: Count
    seed: Annotated[int, Field(ge=0)]


class ConfigOfRecord(BaseModel):
    model_type: Name


class Record(BaseModel, extra="forbid"):
    """The JSON record that a file holds beside the states; its version is checked first."""

    name: Name
    inputs: InputsOfRecord
    inputs_hash: Name
    weight_hash: Name
    dtype: Name
    vocabulary: Annotated[int, Field(ge=2, le=1 << 26)]
    config: ConfigOfRecord | None


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The sequences that models are shown: ids uniform over the first `vocabulary` ids, sequence by sequence."""

    vocabulary: int
    length: int = 64
    num_sequences: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        check_inputs(**asdict(self))

    @cached_property
    def ids(self) -> Int64[Tensor, "N T"]:
        generator = torch.Generator().manual_seed(int(self.seed))
        return torch.randint(self.vocabulary, (self.num_sequences, self.length), generator=generator)

    @property
    def hash(self) -> str:
        """The hash of the ids themselves: another version of torch might draw other ids from the same seed."""
        return hashlib.sha256(self.ids.numpy().astype("<i8").tobytes()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Signature:
    """The states of one model, and what they were made from."""

    name: str
    states: Float[Tensor, "N E"]
    """After the last layer and its norm."""
    embeddings: Float[Tensor, "N E"] | None
    """Of the last token; None if the embeddings have another width than the layers."""
    inputs: Inputs
    inputs_hash: str
    weight_hash: str
    dtype: str
    vocabulary: int
    """The number of ids that the model has embeddings for; the inputs may use fewer."""
    config: dict[str, Any] | None
    """The model's configuration, with its model_type; None if transformers knows none to draw a model from."""
    receipt: Receipt | None = None
    """None for a signature that was read from a file."""

    @property
    def width(self) -> int:
        return self.states.shape[1]

    def configuration(self) -> Configuration:
        """The configuration to draw models of the same shape from."""
        from transformers import AutoConfig

        if self.config is None:
            raise InputError(
                f"The signature of {self.name} has no configuration to draw models from. "
                "Give `fresh=0`, and models known to be unrelated as `unrelated`."
            )
        others = {key: value for key, value in self.config.items() if key != "model_type"}
        try:
            return Configuration(name=self.name, config=AutoConfig.for_model(self.config["model_type"], **others))
        except Exception as error:  # transformers raises many kinds of exceptions here
            reason = first_line(error).rstrip(".")
            raise InputError(
                f"No model can be drawn from the configuration in the signature of {self.name}: {reason}. "
                "Give `fresh=0`, and models known to be unrelated as `unrelated`."
            ) from error

    def save(self, path: Path) -> None:
        """Writes the signature to a safetensors file, whole or not at all."""
        tensors = {"states": self.states, "embeddings": self.embeddings}
        left_out = {*tensors, "receipt"}  # a receipt is of one reading, not of what is read again from the file
        record = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in left_out}
        metadata = {METADATA: json.dumps({"version": VERSION, **record, "inputs": asdict(self.inputs)})}
        present = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
        with whole_file(path) as partial:
            save_file(present, partial, metadata=metadata)


def load_signature(path: Path) -> Signature:
    """The signature in a file; anything else, or one of another version, is refused before its numbers are read."""
    check_safetensors(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = (file.metadata() or {}).get(METADATA)
            if metadata is None:
                raise refused(path, "it is not the signature of a model")
            record = parse_json(metadata, path, Versioned)
            if (version := record.pop("version")) != VERSION:
                raise InputError(
                    f"The signature {path} has version {version}, and this sinkscope reads version {VERSION}. "
                    "Make it again from the model."
                )
            checked(record, Record, path)
            # Slices tell shape and dtype without reading the numbers: a file from a stranger may claim any size.
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: tensor.get_shape() for name, tensor in slices.items()}
            num_sequences, width = record["inputs"]["num_sequences"], shapes.get("states", [0])[-1]
            has_states = shapes.keys() in ({"states"}, {"states", "embeddings"}) and 1 <= width <= WIDEST
            has_shapes = all(shape == [num_sequences, width] for shape in shapes.values())
            is_float32 = all(tensor.get_dtype() == "F32" for tensor in slices.values())
            if not (has_states and has_shapes and is_float32):
                raise refused(path, f"its tensors {shapes} are not states of {num_sequences} sequences in float32")
            tensors = {name: file.get_tensor(name) for name in shapes}
    except SafetensorError as error:
        raise refused(path, str(error)) from error
    if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
        raise refused(path, "its states hold NaN or infinity")
    return Signature(
        states=tensors["states"],
        embeddings=tensors.get("embeddings"),
        **record | {"inputs": Inputs(**record["inputs"])},
    )


def sign(
    loaded: LoadedModel, inputs: Inputs, *, parts: Parts | None = None, progress: Progress | None = None
) -> Signature:
    """The signature of a model. Under torchrun each process runs its share of the batches.

    `parts` keeps finished batches on disk, so that a run that was interrupted does not run them again.
    """
    parts = parts or Parts(None, {})
    _check(loaded, inputs)
    size, inputs_hash = max(1, TOKENS_AT_ONCE // inputs.length), inputs.hash
    # The name of a kept batch has the configuration too, because other settings give other states of equal weights.
    identity = json.dumps([loaded.name, loaded.weight_hash, loaded.dtype, _fields(loaded)], sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:24]
    batches = []
    for start in processes.share(range(0, inputs.num_sequences, size)):
        key = f"{digest}-{inputs_hash[:16]}-{start}"
        batch = parts.load(key)
        if batch is None:
            batch = _states(loaded, inputs.ids[start : start + size])
            parts.save(key, batch)
        batches.append(batch)
        if progress is not None:
            progress(min(start + size, inputs.num_sequences), inputs.num_sequences)
    batches = [batch for share in processes.gathered(batches) for batch in share]
    states = torch.from_numpy(np.concatenate([batch["states"] for batch in batches]))
    embeddings = torch.from_numpy(np.concatenate([batch["embeddings"] for batch in batches]))
    if not torch.isfinite(states).all():
        raise overflow(loaded.model, f"in what leaves the last layer of {loaded.name}, at the last position")
    return Signature(
        name=loaded.name,
        states=states,
        embeddings=embeddings if embeddings.shape == states.shape else None,
        inputs=inputs,
        inputs_hash=inputs_hash,
        weight_hash=loaded.weight_hash,
        dtype=loaded.dtype,
        vocabulary=num_embeddings(loaded.model),
        config=_fields(loaded),
        receipt=receipt_of_own_pass(loaded),
    )


@torch.no_grad()
def _states(loaded: LoadedModel, ids_BT: Tensor) -> dict[str, np.ndarray]:
    """[B, E] states after the last layer and its final norm, and embeddings, both at the last position.

    The body of the model is called, so no logits are computed.
    """
    owner: Any = loaded.model
    # The base_model of a PEFT model is the whole model with its head, not the body. The body has the adapters inside.
    body: Any = without_head((owner.get_base_model() if hasattr(owner, "get_base_model") else owner).base_model)
    ids_BT = ids_BT.to(embedding_device(loaded.model))
    with evaluation_mode(loaded.model):
        last = body(input_ids=ids_BT, use_cache=False).last_hidden_state[:, -1]
        embedded = body.get_input_embeddings()(ids_BT[:, -1])
    return {"states": last.float().cpu().numpy(), "embeddings": embedded.float().cpu().numpy()}


def _check(loaded: LoadedModel, inputs: Inputs) -> None:
    if inputs.vocabulary > (rows := num_embeddings(loaded.model)):
        raise InputError(
            f"{loaded.name} has {rows} ids, and the sequences have {inputs.vocabulary}. "
            f"If the first ids mean the same tokens in all models, give `vocabulary={rows}`."
        )
    context = context_length(loaded.model)
    if context is not None and inputs.length > context:
        raise InputError(
            f"`length={inputs.length}` is more than the context of {loaded.name}, {context} tokens. "
            f"Give `length={context}` or less."
        )


def _fields(loaded: LoadedModel) -> dict[str, Any] | None:
    from transformers import CONFIG_MAPPING

    config = loaded.model.config
    if config.model_type not in CONFIG_MAPPING:
        return None
    settings = json.loads(config.to_json_string(use_diff=True))
    # Where the weights were stored is private, and not needed to draw a model.
    return {key: value for key, value in settings.items() if not key.startswith("_") and key != "name_or_path"}


def check_made_with(signature: Signature, inputs: Inputs) -> None:
    """Refuses a signature that was made with other sequences."""
    if (signature.inputs, signature.inputs_hash) != (inputs, inputs.hash):
        raise InputError(
            f"The signature of {signature.name} was made with {_described(signature.inputs)}, "
            f"not with {_described(inputs)}. Give the same numbers, or the model in place of its signature."
        )


def is_signature_file(source: Any) -> bool:
    """Whether a name is that of a .safetensors file; models are named by their folder."""
    return isinstance(source, str | Path) and Path(source).suffix == ".safetensors"


def _described(inputs: Inputs) -> str:
    return f"{inputs.num_sequences} sequences of {inputs.length} ids below {inputs.vocabulary}, seed {inputs.seed}"
