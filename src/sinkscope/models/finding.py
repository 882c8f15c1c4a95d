"""Where a model keeps its parts: found from one short pass, and proven on it.

A pass of a few tokens, with a hook on every module of the decoder, records what each call got and gave. From that:

- blocks: the list of modules that run one after the other, as many as the configuration has layers;
- attention: the module of a block in which scaled dot-product attention (or a softmax over keys) is computed;
- output projection: the first linear layer of that module afterwards;
- feed-forward: the last linear layer of a block outside its attention, or its experts;
- mixer: in hybrids, the module of a block that reads other tokens without attention (a state-space model, say): given
  the tokens in another order it gives something else, and a feed-forward does not;
- norms after each: the modules that get just what these give.

The proof is arithmetic on the same tensors: what leaves a block is what enters it, plus what its parts add, and the
feed-forward reads the one or the other. What does not add up is refused, with its sum.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sinkscope.errors import InputError
from sinkscope.models.experts import Routing, given_by_experts, is_experts, routing_of, written_by_experts
from sinkscope.models.families import PARTS, Family
from sinkscope.models.loaded import without_dropout, without_head

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
    arguments: tuple[tuple, dict[str, Any]] = ((), {})
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
    if not any(block.attentions for block in blocks):
        raise InputError(
            f"No layer of this {config.model_type} model computes attention over keys, so it has no attention sink. "
            "Massive activations it may have: give the hidden states of a pass to "
            "sinkscope.measures.dimension_disparity."
        )
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
        if name == "parts":
            continue
        values = {field[name] for field in fields} - {None}
        if name == "aggregation_width":
            if len(values) > 1:
                raise NotFoundError(f"its value aggregations have {sorted(values)} channels, each layer its own")
        elif name == "activations":
            row[name] = tuple(sorted(set().union(*values)))
        elif name.endswith("_scale"):
            row[name] = _one_scale(name.removesuffix("_scale").replace("_", "-"), values, config)
        elif len(values) > 1:
            raise NotFoundError(f"its blocks differ in {name.replace('_', ' ')}: {', '.join(map(str, values))}")
        else:
            row[name] = next(iter(values), None)
    if row["down_projection"] is None:
        row["down_projection"] = Family.down_projection  # all blocks have experts
    is_parallel = bool(row["parallel"])
    parts = tuple(field["parts"] for field in fields)
    is_hybrid = set(parts) != {("attention", "feed_forward")}
    return row | {"parallel": lambda config: is_parallel, "parts_of_layers": parts if is_hybrid else None}


def _one_scale(part: str, scales: set[float], config: Any) -> float:
    """The scale of a part, of those that were fitted block by block.

    A fit is as exact as the model's type: to 2 % in bfloat16. The configuration's own number is taken where it says
    one.
    """
    if not scales:
        return 1.0
    middle = sorted(scales)[len(scales) // 2]
    if any(abs(scale - middle) > FITTED * abs(middle) for scale in scales):
        raise NotFoundError(f"its blocks scale {part} by different numbers: {sorted(scales)[:4]}")
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
        attention = self._attention()
        projection = None if attention is None else self._output_projection(attention, config)
        mixer, feed_forwards = self._branches(attention)
        fed = [call for call in self.calls if any(_is_within(call.path, branch.path) for branch in feed_forwards)]
        outside = [call for call in self.calls if attention is None or not _is_within(call.path, attention.path)]

        experts = next((call for call in fed if call.routing is not None), None)
        down = next((call for call in reversed(fed) if _is_linear(call) and self._is_as_wide(call)), None)
        writer = experts or down
        feed_forward = None if writer is None else self._holding(writer, feed_forwards)
        written, mixture = self._written(feed_forward, experts, down, fed)
        if mixture.is_outside:
            feed_forward = None

        # What each part adds, and the norm through which it goes.
        ends = {"attention": projection and projection.left, "mixer": mixer and mixer.left, "feed_forward": written}
        added = {part: state for part, state in ends.items() if state is not None}
        norms = {part: self._norm_of(state, outside) for part, state in added.items()}
        if projection is not None:
            added["attention"] = projection.given
        added |= {part: norm.given for part, norm in norms.items() if norm is not None}
        scales = self._scales(added)
        mixed = [scales[part] * state for part, state in added.items() if part != "feed_forward"]
        is_parallel = None
        if written is not None and mixed:
            is_parallel = self._is_parallel(mixed, feed_forward or next(call for call in fed if _is_linear(call)))
        return {
            "attention": self._name(attention),
            "output_projection": self._name(projection),
            "down_projection": None if experts else self._name(down),
            "experts": self._name(experts),
            "shared_down_projection": self._name(mixture.shared),
            "shared_gate": self._name(mixture.gate),
            "expert_scale": mixture.scale if experts else None,
            "mixer_exit": self._name(norms.get("mixer") or mixer),
            "post_norm": self._name(norms.get("feed_forward")),
            "post_attention_norm": self._name(norms.get("attention")),
            "feed_forward": self._name(feed_forward),
            "activations": frozenset(self._name(call) for call in fed if _is_activation(call)),
            "parallel": is_parallel,
            **{f"{part}_scale": scales.get(part) for part in PARTS},
            "aggregation_width": None if projection is None else projection.entered.shape[-1],
            "parts": tuple(added),
        }

    def _name(self, call: Call | None) -> str | None:
        """The path of a call's module below the block."""
        return None if call is None else call.path.removeprefix(f"{self.path}.")

    def _is_as_wide(self, call: Call) -> bool:
        return call.state_out is not None and call.state_out.shape[-1] == self.width

    def _attention(self) -> Call | None:
        """The call of attention; None in a block without."""
        if not self.attentions:
            return None
        if len(self.attentions) > 1:
            raise NotFoundError(f"attention is computed {len(self.attentions)} times in {self.path}")
        attention = self.attentions[0]
        if not hasattr(sys.modules[type(attention.module).__module__], "ALL_ATTENTION_FUNCTIONS"):
            name = type(attention.module).__name__
            raise NotFoundError(f"its {name} does not ask the attention interface of transformers")
        return attention

    def _output_projection(self, attention: Call, config: Any) -> Call:
        """The linear layer that attention ends with."""
        inside = [call for call in self.calls if _is_within(call.path, attention.path)]
        after = [call for call in inside if call.order > attention.order and _is_linear(call)]
        projection = next((call for call in after if self._is_as_wide(call)), None)
        if projection is None:
            raise NotFoundError(f"no linear layer follows attention in {attention.path}")
        self._check_heads(attention, projection, config)
        return projection

    def _branches(self, attention: Call | None) -> tuple[Call | None, list[Call]]:
        """(mixer, the others) of the outermost modules beside attention that end in a linear layer or experts."""
        branches: list[Call] = []
        for call in self.calls:  # an outer module is called before what it holds
            is_beside = attention is None or not (
                _is_within(call.path, attention.path) or _is_within(attention.path, call.path)
            )
            is_outermost = not any(_is_within(call.path, branch.path) for branch in branches)
            if is_beside and is_outermost and self._writes(call):
                branches.append(call)
        if attention is not None and len(branches) == 1:
            return None, branches
        mixers = [branch for branch in branches if not _is_by_token(branch)]
        if len(mixers) > 1:
            raise NotFoundError(
                f"{len(mixers)} modules of {self.path} beside attention mix tokens: "
                f"{', '.join(str(self._name(mixer)) for mixer in mixers)}"
            )
        return (mixers[0] if mixers else None), [branch for branch in branches if branch not in mixers]

    def _writes(self, branch: Call) -> bool:
        """Whether a module holds, or is, what may write to the residual stream."""
        within = (call for call in self.calls if _is_within(call.path, branch.path))
        return any(call.routing is not None or _is_linear(call) for call in within)

    def _holding(self, writer: Call, feed_forwards: list[Call]) -> Call | None:
        """The feed-forward that holds what writes; None where the block itself carries it out."""
        return next((call for call in feed_forwards if call is not writer and _is_within(writer.path, call.path)), None)

    def _written(
        self, feed_forward: Call | None, experts: Call | None, down: Call | None, fed: list[Call]
    ) -> tuple[Tensor | None, _Mixture]:
        """What the feed-forward gives, and how it adds up; nothing in a block without."""
        if experts is not None:
            return self._mixture(experts, feed_forward, down, fed)
        if down is None:
            return None, _Mixture()
        given = (feed_forward or down).left
        if not _equal(down.given, given):
            raise NotFoundError(f"{(feed_forward or down).path} changes what its {_last(down)} gives")
        return given, _Mixture()

    def _norm_of(self, state: Tensor, calls: list[Call]) -> Call | None:
        """The module with parameters that gets just this state."""
        return next((call for call in calls if _same(call.state_in, state) and _has_parameters(call)), None)

    def _check_heads(self, attention: Call, projection: Call, config: Any) -> None:
        """The output projection reads the heads as attention gives them: in order, and nothing else but a gate."""
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
        if not _equal(read, heads) and not _is_gated(read, heads):
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

    def _scales(self, added: dict[str, Tensor]) -> dict[str, float]:
        """By part, what it is multiplied by where it is added to the residual stream; refuses a block whose output is
        no such sum."""
        entered, left = _plain(self.whole.entered), _plain(self.whole.left)
        change = left - entered
        columns = torch.stack([_plain(state) for state in added.values()] or [torch.zeros_like(entered)], dim=1)
        # One is by far the most frequent, and tried first: where a part is nearly zero a fit says nothing.
        fitted = torch.linalg.lstsq(columns, change[:, None]).solution.flatten()
        for scales in (torch.ones_like(fitted), fitted):
            if _equal(left, entered + columns @ scales, self.whole.left.dtype):
                return {part: float(f"{scale:.5g}") for part, scale in zip(added, scales, strict=False)}
        rest = float((change - columns @ fitted).abs().max() / change.abs().max().clamp(min=1e-30))
        raise NotFoundError(
            f"what leaves {self.path} is not what enters it plus what {_in_words(added)} give; nearest is "
            f"{' and '.join(f'{scale:.3g}' for scale in fitted)} times these, with {rest:.1%} of the change left over"
        )

    def _is_parallel(self, mixed: list[Tensor], reader: Call) -> bool:
        """Whether the feed-forward reads what enters the block, and not that plus what attention and mixers add."""
        norms = (call for call in reversed(self.calls) if call is not reader and _same(call.state_out, reader.state_in))
        source = next(norms, reader)
        read, entered = source.entered, self.whole.entered
        if _equal(read, entered):
            return True
        if _equal(read, entered + sum(state.reshape(entered.shape) for state in mixed)):
            return False
        raise NotFoundError(
            f"the feed-forward of {self.path} reads neither what enters the block nor that plus attention"
        )


def _in_words(parts: Iterable[str]) -> str:
    return " and ".join(part.replace("_", "-") for part in parts) or "nothing"


def _is_by_token(branch: Call) -> bool:
    """Whether what a module gives for a token depends on that token alone: with the tokens in the reverse order it
    gives the same in the reverse order."""
    state, left = branch.entered, branch.left
    args, kwargs = branch.arguments
    turned = _turned(state).reshape(state.shape)
    with torch.no_grad(), without_dropout(branch.module):
        if args:
            output = branch.module(turned, *args[1:], **kwargs)
        else:
            output = branch.module(**kwargs | {"hidden_states": turned})
    given = output[0] if isinstance(output, tuple) else output
    return _equal(left, _turned(given))


def _turned(state: Tensor) -> Tensor:
    """[B, T, ...] with the last token first."""
    return state.reshape(*SHAPE, -1).flip(1)


def _is_gated(read: Tensor, heads: Tensor) -> bool:
    """Whether each value of the heads is multiplied by a number between 0 and 1, as by a sigmoid."""
    slack = TOLERANCE.get(read.dtype, TOLERANCE[torch.bfloat16]) * heads.abs().max()
    shrinks = read.abs() <= heads.abs() + slack
    keeps_sign = read * heads >= -(slack**2)
    return bool((shrinks & keeps_sign).all())


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
            state = state if isinstance(state, Tensor) else None
            call = Call(path, module, len(calls), (args, kwargs), state)
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
        stack.enter_context(without_dropout(decoder))
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
        elif func in SOFTMAXES and _is_over_keys(result):
            self._keep(None)
        return result

    def _keep(self, state: Tensor | None) -> None:
        inner = self.running[-1]
        self.seen.append(Call(inner.path, inner.module, len(self.calls) - 1, state_out=state))


def _is_over_keys(weights: Tensor) -> bool:
    """Whether the result of a softmax has a row of keys for each query: [B, H, T, S], or [B * H, T, T]."""
    if weights.ndim == 4:
        return weights.shape[-2] == SHAPE[1] <= weights.shape[-1]
    # A router's softmax is over [B, T, experts].
    return weights.ndim == 3 and weights.shape[1:] == (SHAPE[1], SHAPE[1]) and len(weights) > SHAPE[0]


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
