"""The receipt of a reading: that what was read is what ran.

Reading runs a model through doors of our own: the decoder is called directly, attention goes through our functions,
and weights are taken from modules. For each model object a short plain pass, as its owner calls it, is compared with
the pass that reading makes. A model whose passes differ is refused: its numbers would be of another model.
Axes: B sequences, T positions, E width, F neurons, M sampled rows of a weight.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sinkscope.errors import InputError
from sinkscope.models.anatomy import Anatomy, anatomy_of, input_device, projection_weight
from sinkscope.models.loaded import LoadedModel
from sinkscope.models.loading import find_bos
from sinkscope.models.token_batches import TokenBatch
from sinkscope.tracing.attention import read_attention
from sinkscope.tracing.attention_hook import attention_hook
from sinkscope.tracing.attention_rule import AttentionRule, ReadingRequest
from sinkscope.tracing.open_interventions import OpenIntervention, OwnHook, SilentHook, open_interventions, suspend
from sinkscope.tracing.restored import weight_checksum
from sinkscope.tracing.single_reader import evaluation_mode, in_this_thread

PROBED = (2, 16)
"""Sequences and tokens of the short passes: what they cost does not grow with the text."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
"""How far a final state may differ, as a share of its norm. Attention sums in another order, and each layer carries its
rounding on: in float32 that stays below a ten-thousandth, in bfloat16 it is some hundredths in deep models. Another
mask, other positions or a skipped module change states by their own size."""
ROWS = 64
"""Rows of a projection's weight that its output is compared by."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What a result was read from."""

    weights: str
    """SHA-256 of the weights as they are now: see `load`."""
    dtype: str
    """The type that attention was computed in; under autocast, its type."""
    leading_ids: tuple[int, ...]
    """Ids that stand before the text, or before random tokens."""
    interventions: tuple[dict[str, Any], ...]
    """Those that were on: name, the layers in which they acted, and what their means are from."""
    difference: float | None
    """Largest difference of a final state between the owner's plain pass and the pass that reads, over its norm; None
    where the owner's own pass was read, or where that pass overflowed and left nothing to compare."""
    tolerance: float | None
    compared_tokens: int
    seconds: float
    """What the comparison took; it is made once for each model object, and again when the model changes."""
    states: tuple[str, ...]
    """What is not plain about the model: compiled, offloaded, adapted, autocast."""
    missing_bos: int | None = None
    """The BOS token that the model names, where it reads text and none begins with it."""
    doubled_bos: int = 0
    """How many texts have two BOS tokens in a row."""


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    difference: float | None
    tolerance: float
    dtype: torch.dtype
    seconds: float


_compared: WeakKeyDictionary[nn.Module, tuple[str, _Comparison]] = WeakKeyDictionary()
"""By model: how it was when its passes were compared, and how they differ."""


def described(*receipts: Receipt | None) -> dict[str, Any]:
    """The entry `receipt` of a summary: of one model, or of each of several."""
    entries = [asdict(each) for each in receipts if each is not None]
    if not entries:
        return {}
    return {"receipt": entries[0] if len(receipts) == 1 else entries}


def take_receipt(loaded: LoadedModel, batch: TokenBatch | None = None) -> Receipt:
    """The receipt of a reading of a batch; the model's two passes are compared, unless they have been."""
    anatomy = anatomy_of(loaded.model)
    comparison = check_reading(loaded.model, anatomy)
    acting = open_interventions(anatomy.decoder)
    return Receipt(
        weights=loaded.weight_hash,
        dtype=str(comparison.dtype).removeprefix("torch."),
        leading_ids=() if batch is None else batch.leading_ids,
        interventions=tuple(_told(each) for each in acting),
        difference=comparison.difference,
        tolerance=comparison.tolerance,
        compared_tokens=math.prod(PROBED),
        seconds=comparison.seconds,
        states=states(loaded.model),
        **({} if batch is None else _beginnings(loaded, batch)),
    )


def _beginnings(loaded: LoadedModel, batch: TokenBatch) -> dict[str, Any]:
    bos, rows = find_bos(loaded), batch.whole or batch.ids.unbind()
    if bos is None or batch.kind not in ("text", "given"):
        return {}
    missing = not batch.leading_ids and all(int(row[0]) != bos for row in rows)
    doubled = sum(bool(((row[1:] == bos) & (row[:-1] == bos)).any()) for row in rows)
    return {"missing_bos": bos if missing else None, "doubled_bos": doubled}


def beginnings_in_words(receipt: Receipt | None, *, lacks_sink: bool) -> str:
    """A sentence where the texts begin so that a result may be another than their tokenizer would give; else empty."""
    if receipt is None:
        return ""
    if receipt.doubled_bos:
        return f" In {receipt.doubled_bos} of the texts two BOS tokens stand in a row, which models seldom have seen."
    if receipt.missing_bos is None or receipt.interventions or not lacks_sink:
        return ""
    return (
        f" The text is read without the BOS token that the model names (id {receipt.missing_bos}). With it there may "
        "be a sink: give bos=True (--bos), or ids that begin with it."
    )


def _told(acting: OpenIntervention) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": acting.name, "layers": sorted(acting.acted_in)}
    calibrated_on = acting.intervention.calibrated_on
    return entry if calibrated_on is None else entry | {"calibrated_on": calibrated_on}


def receipt_of_own_pass(loaded: LoadedModel) -> Receipt:
    """The receipt of a reading that calls the model as its owner does, and looks at nothing but what it gives back."""
    return Receipt(
        weights=loaded.weight_hash,
        dtype=loaded.dtype,
        leading_ids=(),
        interventions=(),
        difference=None,
        tolerance=None,
        compared_tokens=0,
        seconds=0.0,
        states=states(loaded.model),
    )


def check_reading(model: nn.Module, anatomy: Anatomy) -> _Comparison:
    """Refuses a model whose own forward pass is not the one that reading makes. Compared once for each model object,
    and again when its hooks, weights, type or attention have changed."""
    key = _state_of_model(model, anatomy)
    known = _compared.get(model)
    if known is None or known[0] != key:
        known = key, _compare(model, anatomy)
        _compared[model] = known
    return known[1]


def states(model: nn.Module) -> tuple[str, ...]:
    """What a reader should know of how the model runs."""
    device_type = next(model.parameters()).device.type
    # torch has no public way to ask whether a module was compiled in place.
    found = {
        "compiled": any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())
        or hasattr(model, "_orig_mod"),
        "offloaded": any(parameter.is_meta for parameter in model.parameters()),
        "adapted": bool(getattr(model, "peft_config", None)),
        "autocast": torch.is_autocast_enabled("cpu" if device_type == "meta" else device_type),
    }
    return tuple(name for name, is_so in found.items() if is_so)


def _state_of_model(model: nn.Module, anatomy: Anatomy) -> str:
    """What decides whether a comparison still holds. Hooks of our own interventions come and go and don't count."""
    hooks = [
        (name, [id(hook) for hook in kept.values() if not isinstance(hook, OwnHook | SilentHook)])
        for name, module in model.named_modules()
        for kept in (module._forward_pre_hooks, module._forward_hooks)
        if kept
    ]
    forwards = [(id(type(module)), id(vars(module).get("forward"))) for module in model.modules()]
    config = getattr(anatomy.decoder, "config", None)
    attention = None if config is None or open_interventions(anatomy.decoder) else config._attn_implementation
    flags = [getattr(layer.attention, "is_causal", None) for layer in anatomy.layers]
    text = f"{weight_checksum(model)} {hooks} {forwards} {attention} {flags} {states(model)}"
    return hashlib.sha256(text.encode()).hexdigest()


def _compare(model: nn.Module, anatomy: Anatomy) -> _Comparison:
    started_at = time.perf_counter()
    ids_BT = _probe_ids(model, anatomy)
    dtypes: list[torch.dtype] = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        dtypes.append(query.dtype)
        return read_attention(query, key, value, rule, ReadingRequest(keys=query.new_zeros(0).long()))[0].output

    with suspend(), torch.no_grad(), evaluation_mode(model), torch.random.fork_rng(devices=[]):
        with _final_state(anatomy) as plain:
            model(ids_BT)
        with _final_state(anatomy) as read, _calls(anatomy), attention_hook(anatomy, attend):
            anatomy.decoder(input_ids=ids_BT, use_cache=False)
    if not plain:
        raise InputError(
            f"The forward pass of {type(model).__name__} does not call its decoder, {type(anatomy.decoder).__name__}. "
            "Readings would be of another pass than yours: call the decoder as a module, or give the model the "
            "attribute `sinkscope_anatomy`."
        )
    # Under autocast some steps are computed in the lower type and others not.
    device_type = ids_BT.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else dtypes[0]
    tolerance = TOLERANCE.get(dtype, TOLERANCE[torch.float32])
    difference = _difference(plain[-1], read[-1])
    if difference is not None and not difference <= tolerance:
        raise InputError(
            f"This model's own forward pass and the one that is read end in different states ({difference:.2g} of "
            "their norm on a few tokens), so numbers would be of another model. Something in its forward pass differs "
            "from its family's: is_causal on an attention, position ids, an overridden forward. Undo it first."
        )
    return _Comparison(
        difference=difference, tolerance=tolerance, dtype=dtype, seconds=time.perf_counter() - started_at
    )


def _probe_ids(model: nn.Module, anatomy: Anatomy) -> Tensor:
    """[B, T] ids spread over the vocabulary, without padding, which a model may treat in its own way."""
    num_sequences, length = PROBED
    length = min(length, anatomy.context or length)
    num_ids = anatomy.decoder.get_input_embeddings().weight.shape[0]
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    ids = torch.linspace(1, num_ids - 2, num_sequences * length).long().clamp(min=0)
    ids = torch.where(ids == padding, ids - 1, ids) if isinstance(padding, int) and padding > 0 else ids
    generator = torch.Generator().manual_seed(0)
    return ids[torch.randperm(len(ids), generator=generator)].view(num_sequences, length).to(input_device(anatomy))


@contextlib.contextmanager
def _final_state(anatomy: Anatomy):
    """While open, collects what the decoder gives back."""
    states: list[Tensor] = []

    def keep(module, args, output) -> None:
        state = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
        states.append(getattr(state, "logits", state))

    handle = anatomy.decoder.register_forward_hook(in_this_thread(keep))
    try:
        yield states
    finally:
        handle.remove()


@contextlib.contextmanager
def _calls(anatomy: Anatomy):
    """While open, sees that each block runs once and in order, and that projections multiply by their weights."""
    blocks: list[int] = []
    with contextlib.ExitStack() as stack:
        for layer in anatomy.layers:
            run = in_this_thread(lambda module, args, index=layer.index: blocks.append(index))
            stack.callback(layer.block.register_forward_pre_hook(run).remove)
            for projection in (layer.output_projection, layer.down_projection, layer.shared_down_projection):
                if projection is not None:
                    check = in_this_thread(_product_check(layer.index, projection))
                    stack.callback(projection.register_forward_hook(check).remove)
        yield
    if blocks != list(range(len(anatomy.layers))):
        raise InputError(
            f"A forward pass runs the blocks in the order {str(blocks)[:80]}, but each must run once, first to last. A "
            "model that uses a block twice cannot be read layer by layer."
        )


def _product_check(layer: int, projection: Any):
    def check(module, args, output) -> None:
        weight_EF = projection_weight(projection)
        rows_M = torch.linspace(0, len(weight_EF) - 1, min(ROWS, len(weight_EF))).long().to(weight_EF.device)
        bias_E = getattr(projection, "bias", None)
        dtype = torch.promote_types(output.dtype, torch.float32)
        if not output.isfinite().all():
            return  # the reading says where it overflowed
        expected = args[0].to(dtype) @ weight_EF[rows_M].to(args[0].device, dtype).T
        if isinstance(bias_E, Tensor) and not bias_E.is_meta:
            expected = expected + bias_E[rows_M.to(bias_E.device)].to(expected)
        apart = torch.linalg.vector_norm(output[..., rows_M.to(output.device)].to(dtype) - expected)
        if not float(apart) <= TOLERANCE.get(output.dtype, 0.25) * float(torch.linalg.vector_norm(expected)) + 1e-6:
            raise InputError(
                f"A projection of layer {layer} ({type(module).__name__}) does not give its input times its weight: "
                "a subclass or a hook changes it. What neurons write would be read wrongly. Undo the change, or merge "
                "it into the weight."
            )

    return check


def _difference(plain_BTE: Tensor, read_BTE: Tensor) -> float | None:
    """Largest difference of a token's state, over the norm of the plain one; None where every plain one overflowed."""
    if plain_BTE.shape != read_BTE.shape:
        return math.inf
    finite_BT = plain_BTE.isfinite().all(-1)
    if not finite_BT.any():
        return None
    plain_NE, read_NE = plain_BTE[finite_BT].double(), read_BTE[finite_BT.to(read_BTE.device)]
    apart_N = torch.linalg.vector_norm(read_NE.to(plain_NE) - plain_NE, dim=-1)
    return float((apart_N / torch.linalg.vector_norm(plain_NE, dim=-1).clamp(min=1e-30)).max())
