"""What the plan asks of a finished run, written as measures.json into its folder.

    python lab/experiments/sink_measures.py runs/sink/softmax-1 --data tokens

- loss: of each of many held-out windows, from the second target on, so that two runs can be compared window by window.
- random, text: the summary of `sinkscope.trace` on random tokens and on held-out text; position 0's own sink rate.
- residual: of the residual stream after each layer, on that text. DomRatio of position 0 and elsewhere depend on the
  basis. Free of it are `norm_ratio`, |h| at position 0 over its median at other positions (the mean over sequences of
  each), and `top_direction`, the energy share of the first singular direction of all tokens and of those after 0.
- downstream: the change of the loss of each window by 8-bit activations, 4-bit weights, and a window of keys.
Everything in float32. Axes: N windows, T positions, E width.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from downstream import all_conditions, condition_losses
from sink_plan import PLAN, read_plan

import sinkscope
from sinkscope.audits.damage import losses
from sinkscope.errors import InputError
from sinkscope.measures.dimension_disparity import dom_ratio, effective_rank, kurtosis
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.loading import LoadedModel, load
from sinkscope.models.token_batches import TokenBatch, token_batch
from sinkscope.pretrain.decoder import BoundedLinear
from sinkscope.pretrain.tokens import TokenStream, open_shards
from sinkscope.results.run_folder import whole_file

SKIPPED = 1
"""Targets at the head of a window that count for no loss, also of runs that were trained on them: one loss for all."""
WINDOW, FIRST = 32, 4
SMALL = {"loss_windows": 16, "random_sequences": 8, "text_windows": 8, "downstream_windows": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished training run")
    parser.add_argument("--data", type=Path, required=True, help="its token shards")
    parser.add_argument("--plan", type=Path, default=PLAN, help="the plan that the run belongs to")
    parser.add_argument("--small", action="store_true", help="few windows, for a trial")
    options = parser.parse_args()
    settings = read_plan(options.plan)["measures"] | (SMALL if options.small else {})
    try:
        record = measures(options.run, options.data, settings)
    except InputError as error:
        print(f"sink_measures: {error}", file=sys.stderr)
        sys.exit(2)
    with whole_file(options.run / "measures.json") as partial:
        partial.write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")
    print(f"measured in {sum(record['seconds'].values()):.0f} s: {record['text']['story']}", flush=True)


def measures(run: Path, data: Path, settings: dict[str, int]) -> dict[str, Any]:
    """Everything that is asked, and the seconds that each part took."""
    loaded = load(run, dtype="float32")
    with_plain_projections(loaded.model)
    length = loaded.model.config.max_position_embeddings
    stream = TokenStream(open_shards(data), "validation", length=length, batch_size=1, seed=0)
    text = TokenBatch(
        ids=stream.evenly_spaced(settings["text_windows"])[0][:, : settings["length"]].clone(),
        kind="text",
        source="validation",
    )
    random = token_batch(
        loaded, "random", length=settings["length"], num_sequences=settings["random_sequences"], seed=0
    )
    record: dict[str, Any] = {"settings": settings, "seconds": {}}
    parts = {
        "loss": lambda: {"windows": window_losses(loaded, stream, settings["loss_windows"]).round(5).tolist()},
        "random": lambda: traced(loaded, random),
        "text": lambda: traced(loaded, text),
        "residual": lambda: residual(loaded, text.ids),
        "downstream": lambda: downstream(loaded, stream, settings["downstream_windows"]),
    }
    for name, part in parts.items():
        started_at = time.perf_counter()
        record[name] = part()
        record["seconds"][name] = time.perf_counter() - started_at
        print(f"{name}: {record['seconds'][name]:.1f} s", flush=True)
    return record


def with_plain_projections(model: Any) -> None:
    """Writes the weights that act in a bounded projection into a plain linear layer, which quantisation knows.

    The model computes the same as before.
    """
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, BoundedLinear):
                plain = nn.Linear(*part.weight.shape[::-1], bias=False, device=part.weight.device)
                plain.weight = nn.Parameter(part.weight.detach(), requires_grad=False)
                setattr(module, name, plain)


def window_losses(loaded: LoadedModel, stream: TokenStream, count: int) -> np.ndarray:
    """[N] the mean loss of each window's targets but the skipped ones."""
    tokens_NT, targets_NT = stream.evenly_spaced(count)
    return losses(loaded.model, torch.cat([tokens_NT, targets_NT[:, -1:]], 1))[:, SKIPPED:].mean(1)


def traced(loaded: LoadedModel, batch: TokenBatch) -> dict[str, Any]:
    """The summary of a trace, and what it says of position 0, sink or not."""
    result = sinkscope.trace(loaded, batch)
    findings = result.findings
    at_first, elsewhere = findings.dom_ratio_at(0)
    key = findings.recording.keys.tolist().index(0)
    return result.summary | {
        "first": {
            "sink_rate_by_layer": findings.recording["head_sink_rate"][:, :, key].float().mean(1).tolist(),
            "attention_by_layer": findings.recording["received"][:, :, key].float().mean(1).tolist(),
            "dom_ratio": at_first.tolist(),
            "dom_ratio_elsewhere": elsewhere.tolist(),
        }
    }


@torch.no_grad()
def residual(loaded: LoadedModel, ids_NT: Tensor) -> dict[str, list[float]]:
    """By quantity, a number for each layer: the residual stream that leaves it."""
    rows: dict[str, list[float]] = {}
    with residuals(loaded) as found:
        loaded.model(ids_NT.to(next(loaded.model.parameters()).device), use_cache=False)
    for h_NTE in found:
        first_NE, later_NTE = h_NTE[:, 0], h_NTE[:, 1:]
        norm_NT = torch.linalg.vector_norm(h_NTE, dim=-1)
        numbers = {
            "dom_ratio": dom_ratio(first_NE).mean(),
            "dom_ratio_elsewhere": dom_ratio(later_NTE).mean(),
            "norm_ratio": (norm_NT[:, 0] / norm_NT[:, 1:].median(1).values).mean(),
            "top_direction": top_direction(h_NTE),
            "top_direction_without_first": top_direction(later_NTE),
            "effective_rank": effective_rank(h_NTE.flatten(0, 1)),
            "effective_rank_without_first": effective_rank(later_NTE.flatten(0, 1)),
            "largest": h_NTE.abs().max(),
            "largest_without_first": later_NTE.abs().max(),
            "kurtosis": kurtosis(h_NTE.flatten()),
            "kurtosis_without_first": kurtosis(later_NTE.flatten()),
        }
        for name, value in numbers.items():
            rows.setdefault(name, []).append(float(value))
    return rows


@contextlib.contextmanager
def residuals(loaded: LoadedModel) -> Iterator[list[Tensor]]:
    """While open, a forward pass leaves here the residual stream [N, T, E] after each layer, in float64."""
    found: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output).double())

    handles = [layer.block.register_forward_hook(keep) for layer in anatomy_of(loaded.model).layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def top_direction(h_NTE: Tensor) -> float:
    """The share of the tokens' energy along their first singular direction, not centred: the same in every basis."""
    h_PE = h_NTE.flatten(0, -2)
    energies = torch.linalg.eigvalsh(h_PE.T @ h_PE)
    return float(energies[-1] / energies.sum())


def downstream(loaded: LoadedModel, stream: TokenStream, count: int) -> dict[str, list[float]]:
    """By condition, the change of each window's mean loss; `as it is` holds the losses themselves."""
    ids_NT = stream.evenly_spaced(count)[0]
    conditions = all_conditions(argparse.Namespace(length=ids_NT.shape[1], window=WINDOW, first=FIRST))
    changes: dict[str, list[float]] = {}
    plain_NT = None
    for name, condition in conditions.items():
        losses_NT = condition_losses(loaded, condition, ids_NT)
        plain_NT = losses_NT if plain_NT is None else plain_NT
        start = max(condition.start, SKIPPED)
        is_plain = name in ("as it is", "late tokens")
        changes[name] = (losses_NT - (0 if is_plain else plain_NT))[:, start:].mean(1).round(6).tolist()
    return changes


if __name__ == "__main__":
    main()
