"""Where a model keeps its parts: found from one short pass, and proven on it.

A pass of a few tokens, with a hook on every module of the decoder, records what each call got and gave. From that:

- blocks: the list of modules that run one after the other, as many as the configuration has layers;
- attention: the module of a block in which scaled dot-product attention (or a softmax over keys) is computed;
- output projection: the first linear layer of that module afterwards;
- feed-forward: the last linear layer of a block outside its attention, or its experts;
- norms after either: the modules that get just what these give.

The proof is arithmetic on the same tensors: what leaves a block is what enters it, plus what attention adds, plus what
the feed-forward adds, and the feed-forward reads the one or the other. What does not add up is refused, with its sum.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sinkscope.errors import InputError
from sinkscope.models.experts import Routing, given_by_experts, is_experts, routing_of, written_by_experts
from sinkscope.models.families import Family
from sinkscope.models.loaded import without_head

SHAPE = (2, 8)
"""Sequences and tokens of the pass."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far a sum may be from what it should be, as a share of the largest value in it."""
FITTED = 0.05
"""How far fitted scales of two blocks may be apart, as a share."""
ATTENTIONS = (torch.nn.functional.scaled_dot_product_attention,)
SOFTMAXES = (torch.nn.functional.softmax, torch.softmax, Tensor.softmax)

_found: WeakKeyDictionary[nn.Module, Family] = WeakKeyDictionary()


class NotFoundError(Exception):
    """What does not fit, as the end of a sentence about the model."""


@dataclass(eq=False)
class Call:
    """One call of a module, or of attention within it."""

    path: str
    """Of the module, below the decoder."""
    module: nn.Module
    order: int
    state_in: Tensor | None = None
    """The first argument or `hidden_states`, where that is a tensor."""
    state_out: Tensor | None = None
    copied_out: Tensor | None = None
    """What a module without parts gave, as it was then: the code around it may add to it in place."""
    routing: Routing | None = None
    """Of a call of experts."""

    @property
    def entered(self) -> Tensor:
        """The tensor that it got."""
        if self.state_in is None:
            raise NotFoundError(f"{self.path} gets no tensor")
        return self.state_in

    @property
    def left(self) -> Tensor:
        """The tensor that it gave."""
        if self.state_out is None:
            raise NotFoundError(f"{self.path} gives no tensor")
        return self.state_out

    @property
    def given(self) -> Tensor:
        """What it gave, whatever was done to it afterwards."""
        return self.left if self.copied_out is None else self.copied_out


@dataclass(frozen=True, kw_only=True)
class _Mixture:
    """How a feed-forward of experts adds up; a dense one has none of it."""

    scale: float = 1.0
    """What the experts' sum is multiplied by."""
    shared: Call | None = None
    """The shared expert's down projection."""
    gate: Call | None = None
    is_outside: bool = False
    """Whether the shared expert stands beside the module of the others."""


def find_family(model: Any) -> Family:
    """The row of a model that has none in the table; refuses a model whose parts do not add up."""
    if model not in _found:
        try:
            _found[model] = _find(model)
        except NotFoundError as error:
            name = getattr(model.config.get_text_config(), "model_type", type(model).__name__)
            raise InputError(
                f"Models of type '{name}' cannot be read: {error}. Describe the model with the attribute "
                "`sinkscope_anatomy`, as examples/own_gpt.py does."
            ) from error
    return _found[model]


def _find(model: Any) -> Family:
    if not hasattr(model, "get_decoder"):
        raise NotFoundError(f"{type(model).__name__} has no get_decoder()")
    decoder, config = without_head(model.get_decoder()), model.config.get_text_config()
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        if getattr(config, name, None) is None:
            raise NotFoundError(f"its configuration has no {name}")
    blocks_path, num_blocks = _blocks(decoder, config.num_hidden_layers)
    calls, attentions = _record(decoder)
    blocks = [_Block(f"{blocks_path}.{index}", calls, attentions) for index in range(num_blocks)]
    without = [str(index) for index, block in enumerate(blocks) if not block.attentions]
    if without:
        layers = ", ".join(without[:8]) + (", ..." if len(without) > 8 else "")
        raise NotFoundError(f"no attention over all keys is computed in layer {layers}, and every layer needs one")
    fields = [block.fields(config) for block in blocks]
    last_state = blocks[-1].whole.left
    outside = (call for call in calls if not _is_within(call.path, blocks_path))
    final_norm = next((call for call in outside if _same(call.state_in, last_state)), None)
    if final_norm is None:
        raise NotFoundError("no norm follows its last block")
    return Family(
        name=config.model_type,
        model_types=(config.model_type,),
        blocks=blocks_path,
        final_norm=final_norm.path,
        notes="found by a short pass, and proven on it",
        **_merged(fields, config),
    )


def _blocks(decoder: nn.Module, num_layers: int) -> tuple[str, int]:
    """(path, number) of the blocks: of all lists of that length, the one with most parameters."""
    lists = [
        (path, part)
        for path, part in decoder.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == num_layers
    ]
    if not lists:
        raise NotFoundError(f"its decoder has no list of {num_layers} blocks")
    path, _ = max(lists, key=lambda named: sum(parameter.numel() for parameter in named[1].parameters()))
    return path, num_layers


def _merged(fields: list[dict[str, Any]], config: Any) -> dict[str, Any]:
    """One row for all blocks. Blocks may lack a part that others have, but not have it elsewhere."""
    row: dict[str, Any] = {}
    for name in fields[0]:
        values = {field[name] for field in fields} - {None}
        if name == "aggregation_width":
            if len(values) > 1:
                raise NotFoundError(f"its value aggregations have {sorted(values)} channels, each layer its own")
        elif name == "activations":
            row[name] = tuple(sorted(set().union(*values)))
        elif name == "scales":
            row["attention_scale"], row["feed_forward_scale"] = _one_pair(values, config)
        elif name == "expert_scale":
            row[name] = _one_scale(values or {1.0}, config)
        elif len(values) > 1:
            raise NotFoundError(f"its blocks differ in {name.replace('_', ' ')}: {', '.join(map(str, values))}")
        else:
            row[name] = next(iter(values), None)
    if row["down_projection"] is None:
        row["down_projection"] = Family.down_projection  # all blocks have experts
    is_parallel = row["parallel"]
    return row | {"parallel": lambda config: is_parallel}


def _one_pair(pairs: set[tuple[float, float]], config: Any) -> tuple[float, float]:
    """The scales of attention and feed-forward, of the pairs that were fitted block by block.

    A fit is as exact as the model's type: to 2 % in bfloat16. The configuration's own number is
    taken where it says one.
    """
    middle = sorted(pairs)[len(pairs) // 2]
    if any(abs(one - other) > FITTED * abs(other) for pair in pairs for one, other in zip(pair, middle, strict=True)):
        raise NotFoundError(f"its blocks scale attention and feed-forward by different numbers: {sorted(pairs)[:4]}")
    return _stated(middle[0], config), _stated(middle[1], config)


def _one_scale(scales: set[float], config: Any) -> float:
    """What experts are multiplied by, of the numbers that were fitted block by block."""
    middle = sorted(scales)[len(scales) // 2]
    if any(abs(scale - middle) > FITTED * abs(middle) for scale in scales):
        raise NotFoundError(f"its blocks scale their experts by different numbers: {sorted(scales)[:4]}")
    return _stated(middle, config)


def _stated(fitted: float, config: Any) -> float:
    """The configuration's own number where it says one that is near a fitted one; else the fitted one."""
    stated = [
        value
        for name, value in vars(config).items()
        if ("multiplier" in name or "scaling_factor" in name) and isinstance(value, float)
    ]
    return next((value for value in stated if abs(value - fitted) <= FITTED * abs(fitted)), fitted)


class _Block:
    """One block, with the calls that were made in it."""

    def __init__(self, path: str, calls: list[Call], attentions: list[Call]) -> None:
        self.path = path
        self.calls = _below(calls, path)
        self.attentions = _below(attentions, path)
        wholes = [call for call in calls if call.path == path]
        if len(wholes) != 1:
            raise NotFoundError(f"block {path} runs {len(wholes)} times in a pass")
        self.whole = wholes[0]
        for state, direction in ((self.whole.entered, "enters"), (self.whole.left, "leaves")):
            if state.shape[:-1] != SHAPE:
                raise NotFoundError(
                    f"what {direction} {path} is no state of {list(SHAPE)} tokens but {list(state.shape)}"
                )
        self.width = self.whole.left.shape[-1]

    def fields(self, config: Any) -> dict[str, Any]:
        """The fields of a family's row, proven on this block."""
        if len(self.attentions) > 1:
            raise NotFoundError(f"attention is computed {len(self.attentions)} times in {self.path}")
        attention = self.attentions[0]
        if not hasattr(sys.modules[type(attention.module).__module__], "ALL_ATTENTION_FUNCTIONS"):
            name = type(attention.module).__name__
            raise NotFoundError(f"its {name} does not ask the attention interface of transformers")
        inside = [call for call in self.calls if _is_within(call.path, attention.path)]
        fed = [call for call in self.calls if not _is_within(call.path, attention.path)]
        projection = next((call for call in inside if call.order > attention.order and _is_linear(call)), None)
        if projection is None:
            raise NotFoundError(f"no linear layer follows attention in {attention.path}")
        self._check_heads(attention, projection, config)

        experts = next((call for call in fed if call.routing is not None), None)
        down = next((call for call in reversed(fed) if _is_linear(call) and self._is_as_wide(call)), None)
        writer = experts or down
        if writer is None:
            raise NotFoundError(f"no feed-forward was found in {self.path}")
        feed_forward = self._feed_forward(writer, attention)
        given, mixture = (feed_forward or writer).left, _Mixture()
        if experts is not None:
            given, mixture = self._mixture(experts, feed_forward, down, fed)
        elif down is not None and not _equal(down.given, given):
            raise NotFoundError(f"{(feed_forward or writer).path} changes what its {_last(down)} gives")
        if mixture.is_outside:
            feed_forward = None

        attention_norm = self._norm_of(projection.left, fed)
        feed_forward_norm = self._norm_of(given, fed)
        attended = (attention_norm or projection).given
        scales = self._scales(attended, feed_forward_norm.given if feed_forward_norm else given)
        reader = feed_forward or next(call for call in fed if _is_linear(call))
        return {
            "attention": self._name(attention),
            "output_projection": self._name(projection),
            "down_projection": None if experts else self._name(down),
            "experts": self._name(experts),
            "shared_down_projection": self._name(mixture.shared),
            "shared_gate": self._name(mixture.gate),
            "expert_scale": mixture.scale if experts else None,
            "post_norm": self._name(feed_forward_norm),
            "post_attention_norm": self._name(attention_norm),
            "feed_forward": self._name(feed_forward),
            "activations": frozenset(self._name(call) for call in fed if _is_activation(call)),
            "parallel": self._is_parallel(scales[0] * attended, reader),
            "scales": scales,
            "aggregation_width": projection.entered.shape[-1],
        }

    def _name(self, call: Call | None) -> str | None:
        """The path of a call's module below the block."""
        return None if call is None else call.path.removeprefix(f"{self.path}.")

    def _is_as_wide(self, call: Call) -> bool:
        return call.state_out is not None and call.state_out.shape[-1] == self.width

    def _feed_forward(self, writer: Call, attention: Call) -> Call | None:
        """The largest module of the block that holds what writes, and not the attention."""
        for call in self.calls:  # an outer module is called before what it holds
            if call is not writer and _is_within(writer.path, call.path) and not _is_within(attention.path, call.path):
                return call
        return None

    def _norm_of(self, state: Tensor, calls: list[Call]) -> Call | None:
        """The module with parameters that gets just this state."""
        return next((call for call in calls if _same(call.state_in, state) and _has_parameters(call)), None)

    def _check_heads(self, attention: Call, projection: Call, config: Any) -> None:
        """The output projection reads the heads as attention gives them: in order, and nothing else."""
        if attention.state_out is None:  # written out by the model, step by step: the receipt compares what it gives
            return
        num_heads = attention.left.shape[1]
        if num_heads != config.num_attention_heads:
            raise NotFoundError(
                f"{attention.path} has {num_heads} heads, and the configuration says {config.num_attention_heads}"
            )
        read = projection.entered.reshape(*SHAPE, num_heads, -1)
        # Attention may have been given values that are padded to the width of keys.
        heads = attention.left.transpose(1, 2)[..., : read.shape[-1]]
        if not _equal(read, heads):
            raise NotFoundError(f"{self._name(projection)} reads something else than the heads of attention, in order")

    def _mixture(
        self, experts: Call, feed_forward: Call | None, down: Call | None, fed: list[Call]
    ) -> tuple[Tensor, _Mixture]:
        """What a feed-forward of experts gives, and how: `scale` times what their neurons write, and what a shared
        expert writes, which may have a gate."""
        assert experts.routing is not None
        name = type(experts.module).__name__
        routed = given_by_experts(experts.left, experts.routing)
        if not _equal(written_by_experts(experts.module, experts.routing), routed, routed.dtype):
            raise NotFoundError(f"what its {name} give is not what their neurons write, times the routing weights")
        whole = feed_forward or experts
        shared = down if down is not None and down.left.numel() == whole.left.numel() else None
        if shared is None:
            return whole.left, _Mixture(scale=self._expert_scale(routed, whole))
        if not _is_within(shared.path, whole.path):
            # The block itself adds the shared expert to what the others give.
            mixture = _Mixture(scale=self._expert_scale(routed, whole), shared=shared, is_outside=True)
            return whole.left + shared.given.view_as(whole.left), mixture
        gates = [call for call in fed if _is_linear(call) and call.left.shape[-1] == 1]
        for gate in (None, *gates):
            written = shared.given.reshape(routed.shape)
            if gate is not None:
                written = written * gate.left.reshape(-1, 1).sigmoid()
            columns = torch.stack([_plain(routed), _plain(written)], dim=1)
            fitted = torch.linalg.lstsq(columns, _plain(whole.left)[:, None]).solution.flatten()
            for scale in (1.0, float(fitted[0])):
                if _equal(whole.left, columns @ fitted.new_tensor([scale, 1.0]), routed.dtype):
                    return whole.left, _Mixture(scale=scale, shared=shared, gate=gate)
        raise NotFoundError(f"{whole.path} gives something else than the sum of its experts")

    def _expert_scale(self, routed: Tensor, whole: Call) -> float:
        """What a feed-forward multiplies the sum of its experts by, where there is no shared one."""
        routed_N, given_N = _plain(routed), _plain(whole.left)
        for scale in (1.0, float(routed_N @ given_N / routed_N.square().sum().clamp(min=1e-30))):
            if _equal(given_N, scale * routed_N, routed.dtype):
                return scale
        raise NotFoundError(f"{whole.path} gives something else than the sum of its experts")

    def _scales(self, attended: Tensor, written: Tensor) -> tuple[float, float]:
        """What attention and feed-forward are multiplied by where they are added to the residual stream; refuses a
        block whose output is no such sum."""
        columns = torch.stack([_plain(attended), _plain(written)], dim=1)
        entered, left = _plain(self.whole.entered), _plain(self.whole.left)
        change = left - entered
        # One is by far the most frequent, and tried first: where one of the two is nearly zero a fit says nothing.
        fitted = torch.linalg.lstsq(columns, change[:, None]).solution.flatten()
        for scales in (torch.ones_like(fitted), fitted):
            if _equal(left, entered + columns @ scales, self.whole.left.dtype):
                return float(f"{scales[0]:.5g}"), float(f"{scales[1]:.5g}")
        rest = float((change - columns @ fitted).abs().max() / change.abs().max().clamp(min=1e-30))
        raise NotFoundError(
            f"what leaves {self.path} is not what enters it plus what attention and feed-forward give; nearest is "
            f"{fitted[0]:.3g} and {fitted[1]:.3g} times these, with {rest:.1%} of the change left over"
        )

    def _is_parallel(self, attended: Tensor, reader: Call) -> bool:
        """Whether the feed-forward reads what enters the block, and not that plus attention."""
        norms = (call for call in reversed(self.calls) if call is not reader and _same(call.state_out, reader.state_in))
        source = next(norms, reader)
        read = source.entered
        if _equal(read, self.whole.entered):
            return True
        if _equal(read, self.whole.entered + attended.reshape(self.whole.entered.shape)):
            return False
        raise NotFoundError(
            f"the feed-forward of {self.path} reads neither what enters the block nor that plus attention"
        )


def _record(decoder: nn.Module) -> tuple[list[Call], list[Call]]:
    """(calls of modules, calls of attention) of one pass of the decoder over a few ids."""
    calls: list[Call] = []
    running: list[Call] = []

    thread = threading.get_ident()

    def enter(path: str):
        def hook(module, args, kwargs) -> None:
            if threading.get_ident() != thread:
                return
            state = args[0] if args else kwargs.get("hidden_states")
            call = Call(path, module, len(calls), state_in=state if isinstance(state, Tensor) else None)
            if is_experts(module):
                call.routing = routing_of(module, args, kwargs)
            calls.append(call)
            running.append(call)

        return hook

    def leave(module, args, output) -> None:
        if threading.get_ident() != thread:
            return
        state = output[0] if isinstance(output, tuple) else output
        call = running.pop()
        call.state_out = state if isinstance(state, Tensor) else None
        if call.state_out is not None and next(module.children(), None) is None and _has_parameters(call):
            call.copied_out = call.state_out.clone()

    with ExitStack() as stack:
        for path, module in decoder.named_modules():
            if path and not isinstance(module, nn.ModuleList):
                stack.callback(module.register_forward_pre_hook(enter(path), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave).remove)
        stack.enter_context(_in_evaluation_mode(decoder))
        watch = stack.enter_context(_Attentions(calls, running))
        stack.enter_context(torch.no_grad())
        try:
            decoder(input_ids=_ids(decoder), use_cache=False)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise NotFoundError(f"its decoder cannot read a few ids alone ({reason[:150]})") from error
    return calls, watch.seen


def _ids(decoder: Any) -> Tensor:
    embedding = decoder.get_input_embeddings().weight
    num_ids, count = embedding.shape[0], SHAPE[0] * SHAPE[1]
    device = torch.device("cpu") if embedding.is_meta else embedding.device
    return torch.linspace(1, max(1, num_ids - 2), count).long().view(SHAPE).to(device)


@contextmanager
def _in_evaluation_mode(decoder: nn.Module) -> Iterator[None]:
    """Without dropout; each module gets its own mode back."""
    training = [module for module in decoder.modules() if module.training]
    decoder.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class _Attentions(TorchFunctionMode):
    """Sees where attention is computed, and what it gives."""

    def __init__(self, calls: list[Call], running: list[Call]) -> None:
        super().__init__()
        self.calls, self.running = calls, running
        self.seen: list[Call] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in ATTENTIONS:
            self._keep(result)
        elif func in SOFTMAXES and result.ndim == 4 and result.shape[-2] == SHAPE[1] <= result.shape[-1]:
            self._keep(None)
        return result

    def _keep(self, state: Tensor | None) -> None:
        inner = self.running[-1]
        self.seen.append(Call(inner.path, inner.module, len(self.calls) - 1, state_out=state))


def _below(calls: list[Call], path: str) -> list[Call]:
    return [call for call in calls if call.path.startswith(f"{path}.")]


def _is_within(path: str, other: str) -> bool:
    """Whether a module is another one, or part of it."""
    return path == other or path.startswith(f"{other}.")


def _has_parameters(call: Call) -> bool:
    return next(call.module.parameters(), None) is not None


def _is_linear(call: Call) -> bool:
    return isinstance(call.module, nn.Linear) or type(call.module).__name__ == "Conv1D"


def _last(call: Call) -> str:
    """The last part of a module's path."""
    return call.path.rpartition(".")[2]


def _is_activation(call: Call) -> bool:
    """Whether a call is that of a function of single values."""
    if call.state_in is None or call.state_out is None or call.state_in.shape != call.state_out.shape:
        return False
    is_leaf = not _has_parameters(call) and next(call.module.children(), None) is None
    return is_leaf and not isinstance(call.module, nn.Dropout | nn.Identity)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two are the same tensor, or views of all of it."""
    if one is None or other is None:
        return False
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel()


def _plain(values: Tensor) -> Tensor:
    """In one line, in float64, on the CPU."""
    return values.detach().reshape(-1).cpu().double()


def _equal(one: Tensor, other: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether two agree to the rounding of a type."""
    if one.numel() != other.numel():
        return False
    tolerance = TOLERANCE.get(dtype or one.dtype, TOLERANCE[torch.bfloat16])
    expected = _plain(one)
    return bool((expected - _plain(other)).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-30))
