"""What a sink costs: 8-bit activations, 4-bit weights, and a window that drops the first tokens.

    python experiments/downstream.py runs/softmax/model runs/head_norm/model --data tokens --out downstream.json

Everything is fake-quantised, symmetric and rounded to nearest, in every linear layer but the output head: a value x
becomes s round(x / s), s the largest magnitude of what shares a scale over 2^(bits - 1) - 1. Activations share one for
a text (per tensor) or a token; weights for an output channel, or a group of 128 of its inputs. Sixteen bits are the
control, which must change next to nothing.
Streaming: a query sees the last W keys; the first S and the last W - S; or, the control, S early ones that are not the
first. Positions stay as they are. The loss is that of late tokens, after the window has begun to drop keys.
Each perplexity stands beside its change from the same tokens without it, with a 95 % interval over texts; and that of
a later model beside the first one's, by text, where both read the same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from sinkscope.capture.attention_rule import AttentionRule
from sinkscope.capture.attention_tap import attention_tap
from sinkscope.errors import InputError
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.loading import LoadedModel, load
from sinkscope.models.token_batches import given_batch, token_batch
from sinkscope.pretrain.tokens import MANIFEST, TokenStream, open_shards
from sinkscope.results.atomic import whole_file
from sinkscope.runtime import environment
from sinkscope.statistics import bootstrap_mean_interval

GROUP = 128
BATCH_TOKENS = 4096
"""Tokens of one forward pass; the streaming mask is written out."""

Condition = Callable[[LoadedModel], contextlib.AbstractContextManager]


def main() -> None:
    options = parsed()
    try:
        conditions = all_conditions(options)
        rows = [row for name in options.models for row in measured(name, conditions, options)]
    except InputError as error:
        print(f"downstream: {error}", file=sys.stderr)
        sys.exit(2)
    add_against_first(rows)
    print(table(rows))
    if options.out:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        record = {"settings": settings, "environment": environment(device=torch.device(options.device)), "rows": rows}
        with whole_file(options.out) as partial:
            partial.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders or names of models")
    parser.add_argument("--data", required=True, help="token shards, whose held-out part is read, or a text file")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a text")
    parser.add_argument("--num-texts", type=int, default=64)
    parser.add_argument("--window", type=int, default=128, help="keys that a query sees while streaming")
    parser.add_argument("--first", type=int, default=4, help="first tokens that are kept in the window")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args()


def all_conditions(options: argparse.Namespace) -> dict[str, tuple[Condition, int]]:
    """By name, what is done to a model, and the first position whose loss counts."""
    length, window, first = options.length, options.window, options.first
    late = max(length // 2, window + 2 * first)
    if not 0 < first < window or late >= length - 1:
        raise InputError(
            expected="0 < --first < --window, and a --length that leaves tokens after the window",
            found=f"first {first}, window {window}, length {length}",
            next_step="Give a shorter --window",
        )
    return {
        "as it is": (lambda loaded: contextlib.nullcontext(), 0),
        "16-bit activations, per tensor (control)": (lambda loaded: quantised_inputs(loaded.model, 16, "text"), 0),
        "8-bit activations, per tensor": (lambda loaded: quantised_inputs(loaded.model, 8, "text"), 0),
        "8-bit activations, per token": (lambda loaded: quantised_inputs(loaded.model, 8, "token"), 0),
        "16-bit weights, per channel (control)": (lambda loaded: quantised_weights(loaded.model, 16, None), 0),
        "4-bit weights, per channel": (lambda loaded: quantised_weights(loaded.model, 4, None), 0),
        f"4-bit weights, groups of {GROUP}": (lambda loaded: quantised_weights(loaded.model, 4, GROUP), 0),
        "late tokens": (lambda loaded: contextlib.nullcontext(), late),
        f"window of {length}, all keys (control)": (lambda loaded: streaming(loaded, length, range(0)), late),
        f"window of {window}": (lambda loaded: streaming(loaded, window, range(0)), late),
        f"the first {first} and a window of {window - first}": (
            lambda loaded: streaming(loaded, window - first, range(first)),
            late,
        ),
        f"tokens {first} to {2 * first - 1} and a window of {window - first} (control)": (
            lambda loaded: streaming(loaded, window - first, range(first, 2 * first)),
            late,
        ),
    }


def measured(name: str, conditions: dict[str, tuple[Condition, int]], options: argparse.Namespace) -> list[dict]:
    """A row for each condition: perplexity, and its change from the untouched model on the same tokens."""
    loaded = load(name, device=options.device)
    ids_NT = texts(loaded, options)
    tokens = hashlib.sha256(ids_NT.cpu().numpy().tobytes()).hexdigest()
    rows, plain_NT = [], None
    for condition, (open_condition, start) in conditions.items():
        print(f"{name}: {condition}", file=sys.stderr, flush=True)
        with open_condition(loaded):
            losses_NT = token_losses(loaded.model, ids_NT)
        plain_NT = losses_NT if plain_NT is None else plain_NT
        found = change(losses_NT[:, start:], plain_NT[:, start:])
        rows.append({"model": name, "condition": condition, "tokens_sha256": tokens, **found})
    return rows


def texts(loaded: LoadedModel, options: argparse.Namespace) -> Tensor:
    """[N, T] held-out windows of token shards, or the first windows of a text file."""
    if (Path(options.data) / MANIFEST).is_file():
        shards = open_shards(Path(options.data))
        stream = TokenStream(shards, "validation", length=options.length, batch_size=1, seed=0)
        return given_batch(stream.evenly_spaced(options.num_texts)[0], model=loaded.model).ids
    if not Path(options.data).is_file():
        raise InputError(
            expected="token shards or a text file",
            found=f"no {options.data}",
            next_step="Give --data a folder that sinkscope tokenize wrote, or a text",
        )
    number = {"length": options.length, "num_sequences": options.num_texts}
    return token_batch(loaded, f"text:{options.data}", **number).ids


@torch.no_grad()
def token_losses(model: Any, ids_NT: Tensor) -> np.ndarray:
    """[N, T - 1] the loss of each token after the first."""
    device, losses = next(model.parameters()).device, []
    for ids_BT in ids_NT.split(max(1, BATCH_TOKENS // ids_NT.shape[1])):
        logits = model(ids_BT.to(device), use_cache=False).logits[:, :-1].float()
        targets = ids_BT[:, 1:].to(device)
        losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none"))
        losses[-1] = losses[-1].view(targets.shape).double().cpu()
    return torch.cat(losses).numpy()


def change(losses_NT: np.ndarray, plain_NT: np.ndarray) -> dict[str, Any]:
    """Perplexity, and the factor of its change with the interval of its mean logarithm over texts."""
    differences_N = (losses_NT - plain_NT).mean(1)
    return {
        "perplexity": float(np.exp(losses_NT.mean())),
        **factor("perplexity_factor", differences_N),
        "num_texts": len(losses_NT),
        "loss_changes": differences_N.tolist(),
    }


def factor(name: str, differences_N: np.ndarray) -> dict[str, float | None]:
    """The factor in perplexity that mean differences of the loss make, and its interval; None where there is none."""
    factors = np.exp([differences_N.mean(), *bootstrap_mean_interval(differences_N)]).tolist()
    names = (name, f"{name}_low", f"{name}_high")
    return dict(zip(names, (value if np.isfinite(value) else None for value in factors), strict=True))


def add_against_first(rows: list[dict[str, Any]]) -> None:
    """Gives the rows of later models their factor over the first model's, by text, where the tokens are the same."""
    first = {row["condition"]: row for row in rows if row["model"] == rows[0]["model"]}
    for row in rows:
        base = first[row["condition"]]
        if row is not base and row["tokens_sha256"] == base["tokens_sha256"]:
            differences_N = np.subtract(row["loss_changes"], base["loss_changes"])
            row.update(factor("against_first", differences_N))


def quantised(x: Tensor, bits: int, dims: int | tuple[int, ...]) -> Tensor:
    """x rounded to 2^bits - 1 even steps up to the largest magnitude over `dims`; zeros stay zeros."""
    levels = 2 ** (bits - 1) - 1
    wide = x.float()
    scale = wide.abs().amax(dims, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / levels
    return ((wide / scale).round() * scale).to(x.dtype)


@contextlib.contextmanager
def quantised_inputs(model: Any, bits: int, shared_by: str) -> Iterator[None]:
    """While open, what each linear layer reads is rounded; a scale is shared by a text [T, E] or by a token."""
    dims = (-2, -1) if shared_by == "text" else -1
    handles = [
        layer.register_forward_pre_hook(lambda module, args: (quantised(args[0], bits, dims), *args[1:]))
        for layer in linear_layers(model)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def quantised_weights(model: Any, bits: int, group: int | None) -> Iterator[None]:
    """While open, the weights of each linear layer are rounded, by output channel or by groups of its inputs."""
    before = [(layer.weight, layer.weight.data) for layer in linear_layers(model)]
    try:
        for weight, values_OI in before:
            groups = values_OI.split(group or values_OI.shape[1], dim=1)
            weight.data = torch.cat([quantised(part, bits, 1) for part in groups], 1)
        yield
    finally:
        for weight, values_OI in before:
            weight.data = values_OI


def linear_layers(model: Any) -> list[nn.Linear]:
    """All but the output head, whose weights are often the embeddings'."""
    head = model.get_output_embeddings()
    layers = [part for part in model.modules() if isinstance(part, nn.Linear) and part is not head]
    if not layers:
        raise InputError(
            expected="a model made of torch.nn.Linear",
            found=type(model).__name__,
            next_step="Use a model whose projections are linear layers",
        )
    return layers


def streaming(loaded: LoadedModel, window: int, kept: range) -> contextlib.AbstractContextManager:
    """While open, each query sees the last `window` keys up to its own and the `kept` ones before them."""

    def attend(layer: int, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, rule: AttentionRule) -> Tensor:
        if rule.window is not None or rule.softcap is not None:
            raise InputError(
                expected="attention over all earlier keys",
                found=f"a window or soft-capping of the model's own in layer {layer}",
                next_step="Use a model without them",
            )
        positions = torch.arange(q_BHTD.shape[2], device=q_BHTD.device)
        behind_TS = positions[:, None] - positions
        is_kept_S = (positions >= kept.start) & (positions < kept.stop)
        visible_TS = (behind_TS >= 0) & ((behind_TS < window) | is_kept_S)
        groups = q_BHTD.shape[1] // k_BKSD.shape[1]
        k_BHSD, v_BHSD = (x.repeat_interleave(groups, 1) for x in (k_BKSD, v_BKSD))
        scores_BHTS = (q_BHTD @ k_BHSD.transpose(2, 3)).float() * rule.scaling
        scores_BHTS = scores_BHTS.masked_fill(~visible_TS, -torch.inf)
        if rule.sigmoid_bias is not None:
            a_BHTS = (scores_BHTS + rule.sigmoid_bias).sigmoid()
        elif rule.sink_logits is not None:
            sink_BHT1 = rule.sink_logits.float()[:, None, None].expand(*scores_BHTS.shape[:3], 1)
            a_BHTS = torch.cat([scores_BHTS, sink_BHT1], -1).softmax(-1)[..., :-1]
        else:
            a_BHTS = scores_BHTS.softmax(-1)
        return (a_BHTS.to(v_BHSD.dtype) @ v_BHSD).transpose(1, 2)

    return attention_tap(anatomy_of(loaded.model), attend)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: perplexity by condition and model, with the change in per cent."""
    lines = [
        "| model | condition | perplexity | change | over the first model's |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [in_per_cent(row, name) for name in ("perplexity_factor", "against_first")]
        lines.append(f"| {row['model']} | {row['condition']} | {row['perplexity']:.3f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def in_per_cent(row: dict[str, Any], name: str) -> str:
    """A factor as a change in per cent with its interval; nothing where there is no such factor."""
    value, *ends = (row.get(key) for key in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return ""
    return f"{value - 1:+.2%}" + ("" if None in ends else f" [{ends[0] - 1:+.2%}, {ends[1] - 1:+.2%}]")


if __name__ == "__main__":
    main()
