"""What a sink costs: 8-bit activations, 4-bit weights, and a window that drops the first tokens.

    python lab/experiments/downstream.py runs/softmax/model runs/head_norm/model --data tokens --out downstream.json

The schemes are those of `sinkscope.audits.schemes`. 24 bits are the control, which must change next to nothing.
Streaming: a query sees the last W keys; the first S and the last W - S; or, the control, S early ones that are not the
first. Positions stay as they are. The loss is that of late tokens, after the window has begun to drop keys.
Each perplexity stands beside its change from the same tokens without it, with a 95 % interval over texts; and that of
a later model beside the first one's, by text, where both read the same tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from sinkscope.atomic import whole_file
from sinkscope.audits.damage import losses, scheme_losses
from sinkscope.audits.schemes import Scheme, cache_scheme, linear_scheme
from sinkscope.errors import InputError
from sinkscope.models.given_ids import given_batch
from sinkscope.models.loading import LoadedModel, load
from sinkscope.models.token_batches import token_batch
from sinkscope.pretrain.tokens import MANIFEST, TokenStream, open_shards
from sinkscope.runtime import environment
from sinkscope.statistics import bootstrap_mean_interval


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What is done to a model, which positions it spares, and the first position whose loss counts."""

    scheme: Scheme | None = None
    kept: range = range(0)
    start: int = 0


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


def all_conditions(options: argparse.Namespace) -> dict[str, Condition]:
    """By name, what is done to a model."""
    length, window, first = options.length, options.window, options.first
    late = max(length // 2, window + 2 * first)
    if not 0 < first < window or late >= length - 1:
        raise InputError(
            f"--first {first}, --window {window} and --length {length} do not fit: it must be 0 < first < "
            "window, with tokens after the window. Give a shorter --window."
        )
    by_tensor, four_bits = linear_scheme("W8A8_TENSOR"), linear_scheme("NVFP4A16")
    rounded = {
        "24 bits, per tensor (control)": by_tensor.control(),
        "8 bits, per tensor": by_tensor,
        "8 bits, per token": linear_scheme("W8A8"),
        "24-bit weights, groups of 16 (control)": four_bits.control(),
        "4-bit weights, groups of 16": four_bits,
    }
    cut = replace(cache_scheme("window"), window=window)
    later, rest = range(first, 2 * first), window - first
    return {
        "as it is": Condition(),
        **{name: Condition(scheme=scheme) for name, scheme in rounded.items()},
        "late tokens": Condition(start=late),
        f"window of {length}, all keys (control)": Condition(scheme=cut.control(), start=late),
        f"window of {window}": Condition(scheme=cut, start=late),
        f"the first {first} and a window of {rest}": Condition(scheme=cut, kept=range(first), start=late),
        f"tokens {first} to {2 * first - 1} and a window of {rest} (control)": Condition(
            scheme=cut, kept=later, start=late
        ),
    }


def measured(name: str, conditions: dict[str, Condition], options: argparse.Namespace) -> list[dict]:
    """A row for each condition: perplexity, and its change from the untouched model on the same tokens."""
    loaded = load(name, device=options.device)
    ids_NT = texts(loaded, options)
    tokens = hashlib.sha256(ids_NT.cpu().numpy().tobytes()).hexdigest()
    rows, plain_NT = [], None
    for named, condition in conditions.items():
        print(f"{name}: {named}", file=sys.stderr, flush=True)
        losses_NT = condition_losses(loaded, condition, ids_NT)
        plain_NT = losses_NT if plain_NT is None else plain_NT
        found = change(losses_NT[:, condition.start :], plain_NT[:, condition.start :])
        rows.append({"model": name, "condition": named, "tokens_sha256": tokens, **found})
    return rows


def texts(loaded: LoadedModel, options: argparse.Namespace) -> Tensor:
    """[N, T] held-out windows of token shards, or the first windows of a text file."""
    if (Path(options.data) / MANIFEST).is_file():
        shards = open_shards(Path(options.data))
        stream = TokenStream(shards, "validation", length=options.length, batch_size=1, seed=0)
        return given_batch(stream.evenly_spaced(options.num_texts)[0], model=loaded.model).ids
    if not Path(options.data).is_file():
        raise InputError(f"There is no {options.data}. Give --data a folder that sinkscope tokenize wrote, or a text.")
    number = {"length": options.length, "num_sequences": options.num_texts}
    return token_batch(loaded, f"text:{options.data}", **number).ids


def condition_losses(loaded: LoadedModel, condition: Condition, ids_NT: Tensor) -> np.ndarray:
    """[N, T - 1] the loss of each token after the first."""
    if condition.scheme is None:
        return losses(loaded.model, ids_NT)
    keep_NT = torch.zeros(ids_NT.shape, dtype=torch.bool)
    keep_NT[:, condition.kept.start : condition.kept.stop] = True
    return scheme_losses(loaded.model, condition.scheme, ids_NT, keep=keep_NT if condition.kept else None)


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
