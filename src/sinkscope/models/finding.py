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
from sinkscope.models.families import Family

SHAPE = (2, 8)
"""Sequences and tokens of the pass."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far a sum may be from what it should be, as a share of the largest value in it."""
FITTED = 0.05
"""How far fitted scales of two blocks may be apart, as a share."""
ATTENTIONS = (torch.nn.functional.scaled_dot_product_attention,)
SOFTMAXES = (torch.nn.functional.softmax, torch.softmax, Tensor.softmax)

_found: WeakKeyDictionary[nn.Module, Family] = WeakKeyDictionary()


@dataclass(eq=False)
class Call:
    """One call of a module, or of attention itself."""

    path: str
    """Of the module, below the decoder."""
    module: nn.Module
    order: int
    entered: Tensor | None = None
    left: Tensor | None = None


class NotFoundError(Exception):
    """What does not fit, as the end of a sentence about the model."""


def find_family(model: Any) -> Family:
    """The row of a model that has none in the table; refuses a model whose parts do not add up."""
    if model not in _found:
        try:
            _found[model] = _find(model)
        except NotFoundError as error:
            name = getattr(model.config.get_text_config(), "model_type", type(model).__name__)
            raise InputError(
                f"sinkscope cannot read models of type '{name}': {error}. Describe the model with the attribute "
                "`sinkscope_anatomy`, as examples/own_gpt.py does."
            ) from error
    return _found[model]


def _find(model: Any) -> Family:
    decoder, config = model.get_decoder(), model.config.get_text_config()
    blocks_path, blocks = _blocks(decoder, config.num_hidden_layers)
    calls, attentions = _record(decoder, config)
    rows = [_Block(f"{blocks_path}.{index}", block, calls, attentions) for index, block in enumerate(blocks)]
    without = [index for index, row in enumerate(rows) if not row.attentions]
    if without:
        layers = ", ".join(map(str, without[:8])) + (", ..." if len(without) > 8 else "")
        raise NotFoundError(f"no attention over all keys is computed in layer {layers}, and every layer needs one")
    fields = [row.fields(config) for row in rows]
    widths = {row.aggregation_width for row in rows}
    if len(widths) > 1:
        raise NotFoundError(f"its value aggregations have {' and '.join(map(str, sorted(widths)))} channels by layer")
    last_state = rows[-1].whole.left
    finals = [call for call in calls if not call.path.startswith(f"{blocks_path}.") and _same(call.entered, last_state)]
    if not finals:
        raise NotFoundError("no norm follows its last block")
    return Family(
        name=config.model_type,
        model_types=(config.model_type,),
        blocks=blocks_path,
        final_norm=finals[0].path,
        notes="found",
        **_merged(fields, config),
    )


def _blocks(decoder: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """(path, list) of the blocks: of all lists of that length, the one with most parameters."""
    lists = [
        (path, part)
        for path, part in decoder.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == num_layers
    ]
    if not lists:
        raise NotFoundError(f"its decoder has no list of {num_layers} blocks")
    return max(lists, key=lambda named: sum(parameter.numel() for parameter in named[1].parameters()))


def _merged(fields: list[dict[str, Any]], config: Any) -> dict[str, Any]:
    """One row for all blocks. Blocks may lack a part that others have, but not have it elsewhere."""
    row: dict[str, Any] = {}
    for name in fields[0]:
        values = {field[name] for field in fields} - {None}
        if name == "activations":
            row[name] = tuple(sorted(set().union(*values)))
        elif name == "scales":
            row["attention_scale"], row["feed_forward_scale"] = _one_pair(values, config)
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

    A fit is as exact as the model's type: to 2 % in bfloat16. The configuration's own number is taken where it says one.
    """
    middle = sorted(pairs)[len(pairs) // 2]
    if any(abs(one - other) > FITTED * abs(other) for pair in pairs for one, other in zip(pair, middle, strict=True)):
        raise NotFoundError(f"its blocks scale attention and feed-forward by different numbers: {sorted(pairs)[:4]}")
    stated = [value for name, value in vars(config).items() if "multiplier" in name and isinstance(value, float)]
    return tuple(  # type: ignore[return-value]
        next((value for value in stated if abs(value - fitted) <= FITTED * abs(fitted)), fitted) for fitted in middle
    )


class _Block:
    """One block, with the calls that it made."""

    def __init__(self, path: str, block: nn.Module, calls: list[Call], attentions: list[Call]) -> None:
        self.path, self.block = path, block
        self.calls = [call for call in calls if call.path.startswith(f"{path}.")]
        self.attentions = [call for call in attentions if call.path.startswith(f"{path}.")]
        wholes = [call for call in calls if call.path == path]
        if len(wholes) != 1:
            raise NotFoundError(f"block {path} runs {len(wholes)} times in a pass")
        self.whole = wholes[0]
        self.aggregation_width = 0

    def fields(self, config: Any) -> dict[str, Any]:
        """The fields of a family's row, proven on this block."""
        attention = self.attentions[0]
        if len(self.attentions) > 1:
            raise NotFoundError(f"attention is computed {len(self.attentions)} times in {self.path}")
        module = sys.modules[type(attention.module).__module__]
        if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
            raise NotFoundError(
                f"its {type(attention.module).__name__} does not ask the attention interface of transformers"
            )
        projection = self._first(
            call for call in self._within(attention.path) if call.order > attention.order and _is_linear(call.module)
        )
        if projection is None:
            raise NotFoundError(f"no linear layer follows attention in {attention.path}")
        self.aggregation_width = projection.entered.shape[-1]
        self._check_heads(attention, projection, config)
        fed = [call for call in self.calls if call not in self._within(attention.path)]
        experts = self._first(call for call in fed if _is_experts(call.module))
        width = self._state(self.whole.entered, "enters").shape[-1]
        linear = [call for call in fed if _is_linear(call.module) and _writes(call, width)]
        down = linear[-1] if linear else None
        if experts is None and down is None:
            raise NotFoundError(f"no feed-forward was found in {self.path}")
        feed_forward = self._feed_forward(experts or down, attention.path)
        added = feed_forward.left if feed_forward else (experts or down).left
        attention_exit, feed_forward_exit = self._after(projection.left, fed), self._after(added, fed)
        if experts is not None:
            self._check_experts(experts, down, feed_forward)
        elif not _equal(added, down.left):
            raise NotFoundError(f"{feed_forward.path} changes what its {self._below(down)} gives")
        attended = attention_exit.left if attention_exit else projection.left
        written = feed_forward_exit.left if feed_forward_exit else added
        scales = self._scales(attended, written)
        reader = feed_forward or self._first(call for call in fed if _is_linear(call.module))
        return {
            "attention": self._below(attention),
            "output_projection": self._below(projection),
            "down_projection": self._below(down) if experts is None else None,
            "experts": self._below(experts),
            "shared_down_projection": self._below(down) if experts is not None else None,
            "post_norm": self._below(feed_forward_exit),
            "post_attention_norm": self._below(attention_exit),
            "feed_forward": self._below(feed_forward),
            "activations": frozenset(
                self._below(call) for call in fed if next(call.module.parameters(), None) is None and _is_leaf(call)
            ),
            "parallel": self._is_parallel(scales[0] * attended, reader),
            "scales": scales,
        }

    def _below(self, call: Call | None) -> str | None:
        """The path of a call's module below the block."""
        return None if call is None else call.path.removeprefix(f"{self.path}.")

    def _within(self, path: str) -> list[Call]:
        return [call for call in self.calls if call.path == path or call.path.startswith(f"{path}.")]

    @staticmethod
    def _first(calls: Iterator[Call]) -> Call | None:
        return next(calls, None)

    def _feed_forward(self, down: Call, attention_path: str) -> Call | None:
        """The largest module below the block that holds the down projection and not the attention."""
        parts = self._below(down).split(".")
        for length in range(1, len(parts)):
            path = ".".join([self.path, *parts[:length]])
            called = self._first(call for call in self.calls if call.path == path)
            if called is not None and not attention_path.startswith(f"{path}."):
                return called
        return None

    def _after(self, state: Tensor | None, calls: list[Call]) -> Call | None:
        """The norm that gets just this state."""
        return self._first(
            call for call in calls if _same(call.entered, state) and next(call.module.parameters(), None) is not None
        )

    def _state(self, state: Tensor | None, does: str) -> Tensor:
        if state is None or state.shape[:-1] != SHAPE:
            shape = None if state is None else list(state.shape)
            raise NotFoundError(f"what {does} {self.path} is no state of {list(SHAPE)} tokens but {shape}")
        return state

    def _check_heads(self, attention: Call, projection: Call, config: Any) -> None:
        """The output projection reads the heads as attention gives them: in order, and nothing else."""
        if attention.left is None:
            return
        num_heads = attention.left.shape[1]
        if num_heads != config.num_attention_heads:
            raise NotFoundError(
                f"{attention.path} has {num_heads} heads, and the configuration says {config.num_attention_heads}"
            )
        read = projection.entered.reshape(*SHAPE, num_heads, -1)
        heads = attention.left.transpose(1, 2)[..., : read.shape[-1]]
        if not _equal(read, heads):
            raise NotFoundError(f"{self._below(projection)} reads something else than the heads of attention, in order")

    def _check_experts(self, experts: Call, shared: Call | None, feed_forward: Call | None) -> None:
        """What the experts and the shared one give is all that the feed-forward gives."""
        added = _plain(experts.left)
        if shared is not None and shared.left.numel() == len(added):
            added = added + _plain(shared.left)
        if feed_forward is not None and not _equal(added, feed_forward.left, experts.left.dtype):
            raise NotFoundError(f"{feed_forward.path} gives something else than the sum of its experts")

    def _scales(self, attended: Tensor, written: Tensor) -> tuple[float, float]:
        """What attention and feed-forward are multiplied by where they are added to the residual stream; refuses a
        block whose output is no such sum."""
        entered, left = self._state(self.whole.entered, "enters"), self._state(self.whole.left, "leaves")
        columns = torch.stack([_plain(attended), _plain(written)], dim=1)
        change = _plain(left) - _plain(entered)
        # One is by far the most frequent, and tried first: where one of the two is nearly zero a fit says nothing.
        fitted = torch.linalg.lstsq(columns, change[:, None]).solution.flatten()
        for scales in (torch.ones_like(fitted), fitted):
            if _equal(_plain(entered) + columns @ scales, _plain(left), left.dtype):
                return float(f"{scales[0]:.5g}"), float(f"{scales[1]:.5g}")
        rest = float((change - columns @ fitted).abs().max() / change.abs().max().clamp(min=1e-30))
        raise NotFoundError(
            f"what leaves {self.path} is not what enters it plus what attention and feed-forward give; nearest is "
            f"{fitted[0]:.3g} and {fitted[1]:.3g} times these, with {rest:.1%} of the change left over"
        )

    def _is_parallel(self, attended: Tensor, reader: Call) -> bool:
        """Whether the feed-forward reads what enters the block, and not that plus attention."""
        norm = self._first(call for call in reversed(self.calls) if call is not reader and _same(call.left, reader.entered))
        source = reader.entered if norm is None else norm.entered
        entered = self.whole.entered
        if source is not None and _equal(source, entered):
            return True
        if source is not None and _equal(source, entered + attended.reshape(entered.shape)):
            return False
        raise NotFoundError(f"the feed-forward of {self.path} reads neither what enters the block nor that plus attention")


def _record(decoder: nn.Module, config: Any) -> tuple[list[Call], list[Call]]:
    """(calls of modules, calls of attention) of one pass of the decoder over a few ids."""
    calls: list[Call] = []
    running: list[Call] = []

    thread = threading.get_ident()

    def enter(path: str):
        def hook(module, args, kwargs) -> None:
            if threading.get_ident() != thread:
                return
            state = args[0] if args else kwargs.get("hidden_states")
            call = Call(path, module, len(calls), entered=state if isinstance(state, Tensor) else None)
            calls.append(call)
            running.append(call)

        return hook

    def leave(module, args, output) -> None:
        if threading.get_ident() != thread:
            return
        state = output[0] if isinstance(output, tuple) else output
        running.pop().left = state if isinstance(state, Tensor) else None

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

    def _keep(self, left: Tensor | None) -> None:
        inner = self.running[-1]
        self.seen.append(Call(inner.path, inner.module, len(self.calls) - 1, left=left))


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _is_experts(module: nn.Module) -> bool:
    """Whether a module keeps the experts of a layer as 3-D parameters."""
    down = getattr(module, "down_proj", None)
    return isinstance(down, Tensor) and down.ndim == 3


def _is_leaf(call: Call) -> bool:
    """Whether a call is that of a function of single values, such as an activation."""
    same = call.left is not None and call.entered is not None and call.left.shape == call.entered.shape
    return same and next(call.module.children(), None) is None and not isinstance(call.module, nn.Dropout | nn.Identity)


def _writes(call: Call, width: int) -> bool:
    return call.left is not None and call.left.shape[-1] == width


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
