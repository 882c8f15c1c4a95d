"""The receipt of a reading: evidence that what was read is what the model computes.

Reading does not call a model as its owner does: it calls the decoder directly, sends attention through our functions,
and takes weights from modules. So for each model object a short pass as its owner calls it is compared with a pass as
we read it. A model whose passes differ is refused, because the numbers would describe another model.
Axes: B sequences, T positions, E width, F neurons, M sampled rows of a weight.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sinkscope import processes
from sinkscope.errors import InputError
from sinkscope.models.anatomy import Anatomy, anatomy_of, input_device, projection_weight
from sinkscope.models.loaded import PIXELS, LoadedModel, find_bos
from sinkscope.models.sharded import is_sharded
from sinkscope.tracing.attention import read_attention
from sinkscope.tracing.attention_hook import attention_hook
from sinkscope.tracing.attention_rule import AttentionRule, ReadingRequest
from sinkscope.tracing.open_interventions import OpenIntervention, OwnHook, SilentHook, open_interventions, suspend
from sinkscope.tracing.restored import weight_checksum
from sinkscope.tracing.single_reader import evaluation_mode, in_this_thread

if TYPE_CHECKING:
    from sinkscope.models.token_batches import TokenBatch

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
    """Largest difference between the final states of the owner's pass and of the pass that we read, over their norm.
    None if the owner's pass itself was read, or if it overflowed and left nothing to compare."""
    tolerance: float | None
    compared_tokens: int
    seconds: float
    """How long the comparison took. It is made once for each model object, and again when the model changes."""
    states: tuple[str, ...]
    """What is special about how the model runs: compiled, offloaded, sharded, adapted (PEFT), autocast."""
    missing_bos: int | None = None
    """The model's BOS token, if it has one but no text begins with it."""
    doubled_bos: int = 0
    """How many texts have two BOS tokens in a row."""


@dataclass(frozen=True, kw_only=True)
class PassComparison:
    """How the owner's pass and the pass that we read differ, on a few tokens."""

    difference: float | None
    tolerance: float
    dtype: torch.dtype
    seconds: float


_compared: WeakKeyDictionary[nn.Module, tuple[str, PassComparison]] = WeakKeyDictionary()
"""By model: the state in which its passes were compared (`_state_of_model`), and the comparison."""


def described(*receipts: Receipt | None) -> dict[str, Any]:
    """The entry `receipt` of a summary: of one model, or of each of several."""
    entries = [asdict(receipt) for receipt in receipts if receipt is not None]
    if not entries:
        return {}
    return {"receipt": entries[0] if len(receipts) == 1 else entries}


def take_receipt(
    loaded: LoadedModel, batch: TokenBatch | None = None, comparison: PassComparison | None = None
) -> Receipt:
    """The receipt of a reading of a batch. `comparison`: what `check_reading` returned before that reading, if it is at
    hand; hashing the model's state a second time takes a while."""
    anatomy = anatomy_of(loaded.model)
    comparison = comparison or check_reading(loaded.model, anatomy)
    return Receipt(
        weights=loaded.weight_hash,
        dtype=str(comparison.dtype).removeprefix("torch."),
        leading_ids=() if batch is None else batch.leading_ids,
        interventions=tuple(_intervention_entry(acting) for acting in open_interventions(anatomy.decoder)),
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
    """A sentence if the way the texts begin may change the result: a missing or a doubled BOS token; else empty."""
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


def _intervention_entry(acting: OpenIntervention) -> dict[str, Any]:
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


def check_reading(model: nn.Module, anatomy: Anatomy) -> PassComparison:
    """How the owner's pass and the pass that we read differ; refuses a model in which they differ too much.

    They are compared once for each model object, and again when its hooks, weights, type or attention have changed;
    each time if the model is sharded, since all processes must compare together and each knows only its shards.
    """
    if is_sharded(model):
        return _compare(model, anatomy)
    state = _state_of_model(model, anatomy)
    compared_state, comparison = _compared.get(model, (None, None))
    if comparison is None or compared_state != state:
        comparison = _compare(model, anatomy)
        _compared[model] = state, comparison
    return comparison


def check_images(model: nn.Module, anatomy: Anatomy, batch: TokenBatch) -> None:
    """Refuses a batch with images on which the owner's pass and the pass that we read differ."""
    if processes.count() > 1:
        raise InputError("Texts with images are read by one process. Run it without torchrun.")
    _compare(model, anatomy, batch.ids, batch.beside)


def run_pass(model: Any, anatomy: Anatomy, ids_BT: Tensor, beside: Mapping[str, Any]) -> None:
    """One pass over some ids: of the decoder alone, or of the whole model where images are given beside the ids."""
    device = input_device(anatomy)
    if not beside:
        anatomy.decoder(input_ids=ids_BT.to(device), use_cache=False)
        return
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in beside.items()}
    dtype = next(model.parameters()).dtype
    pixels = {name: moved[name].to(dtype) for name in PIXELS if isinstance(moved.get(name), Tensor)}
    model(input_ids=ids_BT.to(device), **moved | pixels, use_cache=False, logits_to_keep=1)


def states(model: nn.Module) -> tuple[str, ...]:
    """What is special about how a model runs, for the receipt: see `Receipt.states`."""
    device_type = next(model.parameters()).device.type
    # torch has no public way to ask whether a module was compiled in place.
    applies = {
        "compiled": any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())
        or hasattr(model, "_orig_mod"),
        "offloaded": any(parameter.is_meta for parameter in model.parameters()),
        "sharded": is_sharded(model),
        "adapted": bool(getattr(model, "peft_config", None)),
        "autocast": torch.is_autocast_enabled("cpu" if device_type == "meta" else device_type),
    }
    return tuple(name for name, is_so in applies.items() if is_so)


def _state_of_model(model: nn.Module, anatomy: Anatomy) -> str:
    """A hash of all that a comparison of the passes depends on. While it stays the same, the comparison holds."""
    hooks = []
    for name, module in model.named_modules():
        for registered in (module._forward_pre_hooks, module._forward_hooks):
            # Hooks of our own interventions come and go, and are suspended while passes are compared.
            others = [id(hook) for hook in registered.values() if not isinstance(hook, OwnHook | SilentHook)]
            if registered:
                hooks.append((name, others))
    forwards = [(id(type(module)), id(vars(module).get("forward"))) for module in model.modules()]
    config = getattr(anatomy.decoder, "config", None)
    attention = None if config is None or open_interventions(anatomy.decoder) else config._attn_implementation
    flags = [getattr(layer.attention, "is_causal", None) for layer in anatomy.layers]
    text = f"{weight_checksum(model)} {hooks} {forwards} {attention} {flags} {states(model)}"
    return hashlib.sha256(text.encode()).hexdigest()


def _compare(
    model: nn.Module, anatomy: Anatomy, ids_BT: Tensor | None = None, beside: Mapping[str, Any] | None = None
) -> PassComparison:
    """Runs both passes on a few tokens, or on given ones with images beside them, and compares their final states;
    refuses a model in which they differ."""
    started_at, beside = time.perf_counter(), beside or {}
    ids_BT = _probe_ids(model, anatomy) if ids_BT is None else ids_BT
    dtypes: list[torch.dtype] = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        dtypes.append(query.dtype)
        nothing_read = ReadingRequest(keys=query.new_zeros(0).long())  # an empty list of keys: only the output counts
        return read_attention(query, key, value, rule, nothing_read)[0].output

    with suspend(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        with evaluation_mode(model), _final_state(anatomy) as owners_states:
            if beside:
                run_pass(model, anatomy, ids_BT, beside)
            else:
                model(ids_BT)
        with (
            evaluation_mode(model),
            _final_state(anatomy) as read_states,
            _checked_calls(anatomy),
            attention_hook(anatomy, attend),
        ):
            try:
                run_pass(model, anatomy, ids_BT, beside)
            except (TypeError, AttributeError) as error:
                # While it is read a mask is a CausalMask, which only attention knows what to do with.
                if "CausalMask" not in str(error):
                    raise
                raise InputError(
                    f"{type(anatomy.decoder).__name__} computes with the attention mask itself, before attention gets "
                    "it (to choose the keys that are seen, say). Such a model cannot be read."
                ) from error
    if not owners_states:
        raise InputError(
            f"The forward pass of {type(model).__name__} does not call its decoder, {type(anatomy.decoder).__name__}. "
            "So the pass that is read would not be yours. Call the decoder as a module, or give the model the "
            "attribute `sinkscope_anatomy`."
        )
    # Under autocast some steps run in the lower type and others don't, so the lower type's tolerance applies.
    device_type = ids_BT.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else dtypes[0]
    tolerance = TOLERANCE.get(dtype, TOLERANCE[torch.float32])
    difference = _difference(owners_states[-1], read_states[-1])
    if difference is not None and not difference <= tolerance:
        raise InputError(
            f"This model's own forward pass and the pass that is read end in different states ({difference:.2g} of "
            "their norm on a few tokens), so the numbers would describe another model. Something in its forward pass "
            "differs from its family: is_causal on an attention, position ids, an overridden forward. Undo it first."
        )
    return PassComparison(
        difference=difference, tolerance=tolerance, dtype=dtype, seconds=time.perf_counter() - started_at
    )


def _probe_ids(model: nn.Module, anatomy: Anatomy) -> Tensor:
    """[B, T] ids spread over the vocabulary. Padding is left out: some models treat its embedding specially."""
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
    """While open, collects the final state [B, T, E] of each pass of the decoder."""
    states: list[Tensor] = []

    def keep(module, args, output) -> None:
        state = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
        states.append(getattr(state, "logits", state))  # a decoder of its own kind may give logits alone

    handle = anatomy.decoder.register_forward_hook(in_this_thread(keep))
    try:
        yield states
    finally:
        handle.remove()


@contextlib.contextmanager
def _checked_calls(anatomy: Anatomy):
    """While open, checks that each block runs once and in order, and that projections multiply by their weights."""
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
            f"A forward pass of this model runs its blocks in the order {str(blocks)[:80]}. Each must run once, first "
            "to last: a model that uses a block twice cannot be read layer by layer."
        )


def _product_check(layer: int, projection: Any):
    """A hook that refuses a projection whose output is not its input times its weight, in a few rows of the weight."""

    def check(module, args, output) -> None:
        weight_EF = projection_weight(projection)
        rows_M = torch.linspace(0, len(weight_EF) - 1, min(ROWS, len(weight_EF))).long().to(weight_EF.device)
        bias_E = getattr(projection, "bias", None)
        dtype = torch.promote_types(output.dtype, torch.float32)
        if not output.isfinite().all():
            return  # the reading itself refuses this, and says where
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


def _difference(owners_BTE: Tensor, read_BTE: Tensor) -> float | None:
    """Largest difference of a token's state, over the norm of the owner's; None if all of the owner's overflowed."""
    if owners_BTE.shape != read_BTE.shape:
        return math.inf
    finite_BT = owners_BTE.isfinite().all(-1)
    if not finite_BT.any():
        return None
    owners_NE, read_NE = owners_BTE[finite_BT].double(), read_BTE[finite_BT.to(read_BTE.device)]
    apart_N = torch.linalg.vector_norm(read_NE.to(owners_NE) - owners_NE, dim=-1)
    return float((apart_N / torch.linalg.vector_norm(owners_NE, dim=-1).clamp(min=1e-30)).max())
