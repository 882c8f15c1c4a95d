"""Whether early checkpoints of a run predict its super neurons and the position of its sink.

    python lab/experiments/emergence.py runs/softmax --out emergence.json

A unit's strength is the mean over sequences of |n_j| ||W_down[:, j]|| at the position where the finished model has its
sink (or comes nearest to one), on random tokens; its contrast is that over its mean strength at the other positions.
- Units: Spearman's rank correlation between a snapshot and the finished model, over the units of a layer, mean over
  layers; and where in a snapshot the finished model's super neurons stand, as the share of their layer's units below
  them. Both beside chance: the units of each layer shuffled. The control is a position that is no sink, in the middle
  of the text: what holds there too is true of strong units, not of those of the sink.
- Position: the rank of the finished model's sink among all positions that could be one, by four signals of a snapshot.
  By chance it would be first once in as many snapshots as there are positions.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from sinkscope.atomic import whole_file
from sinkscope.errors import InputError
from sinkscope.measures.sink_score import eligible_positions
from sinkscope.models.anatomy import anatomy_of
from sinkscope.models.loading import LoadedModel, load
from sinkscope.models.token_batches import TokenBatch, token_batch
from sinkscope.statistics import average_ranks
from sinkscope.tracing.findings import Findings
from sinkscope.tracing.single_reader import evaluation_mode
from sinkscope.tracing.trace import trace

NUM_SHUFFLES = 2000


@dataclass(frozen=True)
class Checkpoint:
    """What one model of a run was seen to do."""

    strength_LFT: np.ndarray
    """[L, F, T] mean over sequences of what each unit writes at each position."""
    signals: dict[str, np.ndarray]
    """[T] by name: what might predict the position of a sink."""
    findings: Findings

    def units_at(self, position: int, quantity: str) -> np.ndarray:
        """[L, F] strength or contrast of every unit at a position."""
        here = self.strength_LFT[:, :, position]
        if quantity == "strength":
            return here
        elsewhere = np.delete(self.strength_LFT, position, axis=2).mean(2)
        return here / np.maximum(elsewhere, np.finfo(elsewhere.dtype).tiny)


def main() -> None:
    options = parsed()
    try:
        result = emergence(options.run, length=options.length, num_sequences=options.num_sequences)
    except InputError as error:
        print(f"emergence: {error}", file=sys.stderr)
        sys.exit(2)
    print(table(result))
    if options.out:
        with whole_file(options.out) as partial:
            partial.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder of sinkscope pretrain --keep 0,100,...")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--num-sequences", type=int, default=32)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args()


def emergence(run: Path, *, length: int, num_sequences: int) -> dict[str, Any]:
    """Rows for every snapshot, and what the finished model is like."""
    snapshots = sorted((run / "snapshots").glob("step-*"))
    if not snapshots or not (run / "model").is_dir():
        raise InputError(
            f"{run} has {len(snapshots)} snapshots and {'a' if (run / 'model').is_dir() else 'no'} finished model. "
            "Train with sinkscope pretrain --keep 0,100,1000."
        )
    loaded = load(str(run / "model"), dtype="float32")
    batch = token_batch(loaded, "random", length=length, num_sequences=num_sequences)
    final = read_checkpoint(loaded, batch)
    position, rate = final.findings.strongest
    elsewhere = length // 2 + (position == length // 2)
    with evaluation_mode(loaded.model):
        super_neurons = sorted({(unit.layer, unit.neuron) for unit in final.findings.super_neurons})
    targets = super_neurons or list(enumerate(final.units_at(position, "strength").argmax(1).tolist()))
    units, positions = [], []
    for path in snapshots:
        step = int(path.name.removeprefix("step-"))
        print(f"step {step}", file=sys.stderr, flush=True)
        early = read_checkpoint(load(str(path), dtype="float32"), batch)
        for place, at in (("sink", position), ("elsewhere (control)", elsewhere)):
            for quantity in ("strength", "contrast"):
                pair = early.units_at(at, quantity), final.units_at(at, quantity)
                found = {"step": step, "at": place, "quantity": quantity}
                units.append(found | correlation_with_chance(*pair) | standing_with_chance(pair[0], targets))
        eligible = eligible_positions(length).numpy()
        for name, signal_T in early.signals.items():
            rank = 1 + int((signal_T[eligible] > signal_T[position]).sum())
            positions.append({"step": step, "signal": name, "rank": rank, "num_positions": int(eligible.sum())})
    return {
        "run": run.name,
        "sink_position": position,
        "sink_rate": rate,
        "targets": [list(target) for target in targets],
        "targets_are": "super neurons" if super_neurons else "the strongest writer of each layer: no super neuron",
        "units": units,
        "positions": positions,
    }


def read_checkpoint(loaded: LoadedModel, batch: TokenBatch) -> Checkpoint:
    """The strengths of all units and the signals of all positions of one model."""
    findings = trace(loaded, batch, effective_rank=False).findings
    reading = findings.recording
    strength_LFT = unit_strengths(loaded, batch)
    signals = {
        "attention received": reading["received"].mean((0, 1)),
        "variance of the value aggregation": reading["value_variance"].mean(0),
        "DomRatio, largest layer": reading["dom_ratio"].amax(0),
        "write of a neuron, largest layer": reading["largest_write"].amax(0),
    }
    return Checkpoint(strength_LFT, {name: signal.double().numpy() for name, signal in signals.items()}, findings)


@torch.no_grad()
def unit_strengths(loaded: LoadedModel, batch: TokenBatch) -> np.ndarray:
    """[L, F, T] mean over sequences of |n_j| ||W_down[:, j]||."""
    kept: list[Tensor] = []
    handles = []
    for layer in anatomy_of(loaded.model).layers:
        if layer.down_projection is None:
            raise InputError("A mixture of experts has no one feed-forward layer. Use a model of sinkscope pretrain.")
        norms_F = layer.down_weights()[0][1].norm(dim=0)
        handles.append(
            layer.down_projection.register_forward_pre_hook(
                lambda module, args, norms_F=norms_F: kept.append((args[0].abs().mean(0) * norms_F).T.double().cpu())
            )
        )
    try:
        with evaluation_mode(loaded.model):
            loaded.model(batch.ids.to(loaded.model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(kept).numpy()


def correlation_with_chance(early_LF: np.ndarray, final_LF: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Spearman's correlation over units, mean over layers, with what shuffled units give."""
    early_LF, final_LF = (np.stack([_standard_ranks(row) for row in values]) for values in (early_LF, final_LF))
    generator = np.random.default_rng(seed)
    chance = [float((early_LF * generator.permuted(final_LF, axis=1)).sum(1).mean()) for _ in range(NUM_SHUFFLES)]
    return _beside_chance("correlation", float((early_LF * final_LF).sum(1).mean()), chance)


def standing_with_chance(early_LF: np.ndarray, targets: list[tuple[int, int]], seed: int = 0) -> dict[str, float]:
    """The share of their layer's units that the targets stand above, mean over targets, with that of random units."""
    shares_LF = np.stack([average_ranks(row) for row in early_LF]) / (early_LF.shape[1] - 1)
    found = float(np.mean([shares_LF[layer, unit] for layer, unit in targets]))
    generator = np.random.default_rng(seed)
    chance = []
    for _ in range(NUM_SHUFFLES):
        shuffled_LF = generator.permuted(shares_LF, axis=1)  # two targets of a layer stay two units
        chance.append(float(np.mean([shuffled_LF[layer, unit] for layer, unit in targets])))
    return _beside_chance("standing", found, chance)


def table(result: dict[str, Any]) -> str:
    """Markdown: units, then the position."""
    lines = [
        f"Sink at position {result['sink_position']} ({result['sink_rate']:.1%} of heads); targets: "
        f"{len(result['targets'])}, {result['targets_are']}.",
        "",
        "| step | at | by | rank correlation | by chance, 97.5 % | p | standing of the targets | by chance | p |",
        "| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["units"]:
        cells = [f"{row['step']}", row["at"], row["quantity"]]
        for name in ("correlation", "standing"):
            cells += [f"{row[name]:.3f}", f"{row[f'{name}_chance']:.3f}", f"{row[f'{name}_p']:.4f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| step | signal | rank of the sink's position | of |", "| ---: | --- | ---: | ---: |"]
    for row in result["positions"]:
        lines.append(f"| {row['step']} | {row['signal']} | {row['rank']} | {row['num_positions']} |")
    return "\n".join(lines)


def _standard_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks less their mean, of length 1: their product with others adds up to Spearman's correlation."""
    ranks = average_ranks(values)
    ranks -= ranks.mean()
    return ranks / max(np.linalg.norm(ranks), 1e-300)


def _beside_chance(name: str, found: float, chance: list[float]) -> dict[str, float]:
    p_value = (1 + sum(value >= found for value in chance)) / (1 + len(chance))
    return {name: found, f"{name}_chance": float(np.quantile(chance, 0.975)), f"{name}_p": p_value}


if __name__ == "__main__":
    main()
