"""Folders of training runs with planted curves, in the form that `sinkscope pretrain` writes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sinkscope.pretrain.presets import DESCRIBED, WITH_HEAD_NORM
from sinkscope.results.run_folder import run_folder

STEPS, EVALUATE_EVERY, PROBE_EVERY = 1000, 100, 100
TOKENS_A_STEP = 1024
# Quantity by (before, after, share of training at which it passes from one to the other).
APPEARS = {
    "variance_ratio": (8.0, 8.0, 0.0),
    "write_contrast": (1.0, 30.0, 0.4),
    "top_share": (0.05, 0.6, 0.4),
    "dom_ratio": (4.0, 60.0, 0.5),
    "dom_ratio_elsewhere": (4.0, 4.0, 0.0),
    "effective_rank": (300.0, 240.0, 0.5),
    "cosine": (0.1, 0.97, 0.6),
    "sink_rate": (0.0, 0.6, 0.7),
}


def linear_loss(speed: float) -> Callable[[float], float]:
    """A loss that falls by 2 * speed in the whole of training, on a straight line: interpolation is exact on it."""
    return lambda share: 5 - 2 * speed * share


def curved_loss(speed: float) -> Callable[[float], float]:
    return lambda share: 2.5 + 2 * (0.05 + speed * share) ** -0.3


def write_training_folder(
    path: Path,
    *,
    variant: str = "softmax",
    seed: int = 0,
    loss: Callable[[float], float] | None = None,
    sink: bool = True,
    seconds_a_step: float = 0.1,
    data: str | None = "planted",
    model: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
) -> Path:
    """A complete run; `loss` gives the validation loss by share of training, `sink` says if the chain appears."""
    settings = {"steps": STEPS, "batch_size": 8, "sequence_length": 128, "seed": seed, "learning_rate": 1e-3}
    settings |= {"evaluate_every": EVALUATE_EVERY, "evaluation_sequences": 64, "probe_every": PROBE_EVERY}
    settings |= {"probe_length": 64, "probe_sequences": 32} | (training or {})
    shape = {"hidden_size": 64, "attention_variant": variant, "seed": seed} | (model or {})
    if variant in WITH_HEAD_NORM:
        shape["variant_options"] = DESCRIBED | shape.get("variant_options", {})
    with run_folder(path) as folder:
        config = {"data": ["tokens"], "validation": [], "model": shape, "training": settings}
        folder.write_yaml("config.yaml", config)
        folder.write_json("environment.json", {"device_name": "planted"} | (environment or {}))
        folder.write_json("summary.json", {"steps": STEPS} | ({"data": data} if data else {}))
        loss = loss or curved_loss(1.0)
        metrics = [metrics_row(step, loss, seconds_a_step) for step in range(1, STEPS + 1)]
        probes = [
            probe_row(step, batch, sink) for step in range(0, STEPS + 1, PROBE_EVERY) for batch in ("random", "text")
        ]
        for name, rows in (("metrics", metrics), ("probes", probes)):
            (folder.path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def metrics_row(step: int, loss: Callable[[float], float], seconds_a_step: float) -> dict[str, Any]:
    value = loss(step / STEPS)
    return {
        "step": step,
        "tokens": step * TOKENS_A_STEP,
        "loss": value,
        "gradient_norm": 1.0,
        "learning_rate": 1e-3,
        "tokens_per_second": TOKENS_A_STEP / seconds_a_step,
        "mfu": 0.5,
        "elapsed_s": step * seconds_a_step,
        "validation_loss": value if step % EVALUATE_EVERY == 0 else None,
    }


def probe_row(step: int, batch: str, sink: bool) -> dict[str, Any]:
    layers = {
        name: [before, after if sink and step >= share * STEPS else before]
        for name, (before, after, share) in APPEARS.items()
    }
    whole = {"sink_position": 0, "sink_rate": sum(layers["sink_rate"]) / 2}
    return {"step": step, "tokens": step * TOKENS_A_STEP, "batch": batch, "whole": whole, "layers": layers}
