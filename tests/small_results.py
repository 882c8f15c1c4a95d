"""Results of every kind, of models so small that each takes seconds, made once for their numbers and their pages."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from planted_models import decoy, planted_chain, random_tokens
from tiny_models import tiny_model
from training_folders import curved_loss, write_training_folder

import sinkscope
from sinkscope.arguments import STUDY_SEQUENCES

SMALL: dict[str, Any] = dict(num_sequences=STUDY_SEQUENCES, length=32)
HELD_OUT: dict[str, Any] = dict(num_sequences=6, length=64)
SCHEMES: dict[str, Any] = dict(
    schemes=("W8A8_STATIC", "W8A8_TENSOR", "NVFP4"), caches=("fp8", "kivi-4", "window", "window-with-sinks")
)
SENTENCE = "The cat sat on the mat, and the dog lay on the rug, until it was dark."
INTERVENTIONS: dict[str, dict[str, Any]] = {
    "masks": {"mask_to_self": 10, "block": "12:0-4"},
    "aggregation": {"amplify": "10:4", "equalise": "12"},
    "deviation": {"swap_deviation": "10:4", "random_direction": "12:4"},
    "matching": {"match_moments": 10},
    "neurons": {"ablate": "1:7", "transplant": "0:5@0:10"},
    "densified": {"densify": "1:7", "ablate_mean": "0:5"},
    "residual": {"zero_dimension": "5@0", "transplant_dimension": "7@0:10", "clamp_neuron": "1:7@10"},
}


def studied(model: Any, **options: Any) -> sinkscope.Study:
    return sinkscope.study(sinkscope.load(model), **SMALL, **options)


def traced(model: Any, **options: Any) -> sinkscope.Trace:
    loaded = sinkscope.load(model)
    return sinkscope.trace(loaded, sinkscope.token_batch(loaded, num_sequences=6, length=24), **options)


def biased(model: Any, **options: Any) -> sinkscope.Bias:
    return sinkscope.bias(model, num_sequences=16, length=24, **options)


@cache
def study_of_chain() -> sinkscope.Study:
    model, facts = planted_chain(0)
    return studied(model, bos=facts.bos)


def study_of_decoy(kind: str) -> sinkscope.Study:
    model, facts = decoy(kind, 0)
    return studied(model, bos=facts.bos)


@cache
def study_of_gpt2() -> sinkscope.Study:
    return studied(tiny_model("gpt2"))


@cache
def trace_of_text() -> sinkscope.Trace:
    return sinkscope.trace("reference:softmax", SENTENCE)


@cache
def sharp_chain() -> Any:
    """The planted chain, its predictions sharp enough for 8 bits to spoil."""
    model, _ = planted_chain(0)
    model.lm_head.weight.data *= 12
    return model


@cache
def audited() -> sinkscope.AuditResult:
    return sinkscope.audit(sharp_chain(), **SCHEMES, **HELD_OUT)


def audited_without_sink() -> sinkscope.AuditResult:
    """The usual schemes, of a model that has no sink."""
    return sinkscope.audit(tiny_model("llama", scale=3.0), **HELD_OUT)


@cache
def remedied() -> sinkscope.RemedyResult:
    return sinkscope.remedy(sharp_chain(), rotate=True, prefix=True, unplug=True, **HELD_OUT)


def rescaled() -> sinkscope.RemedyResult:
    return sinkscope.remedy(sharp_chain(), exempt=True, scales=True, **HELD_OUT)


def remedied_on_text() -> sinkscope.RemedyResult:
    """Of a model with a tokenizer, on a file of text."""
    with tempfile.TemporaryDirectory() as folder:
        return sinkscope.remedy(
            "reference:softmax", text_file(Path(folder)), rotate=True, unplug=True, num_sequences=4, length=64
        )


@cache
def fingerprinted() -> sinkscope.Fingerprint:
    """The second model is the first, hardly changed; the third has another seed."""
    models = [tiny_model("llama"), tiny_model("llama", scale=9.9), tiny_model("llama", seed=1)]
    return sinkscope.fingerprint(models, matrix=True, length=12, num_sequences=128, fresh=3)


@cache
def intervened(asked: str) -> sinkscope.InterventionResult:
    return sinkscope.intervene(tiny_model("llama"), INTERVENTIONS[asked], num_sequences=4, length=32)


@cache
def intervened_chain() -> sinkscope.InterventionResult:
    model, _ = planted_chain(0)
    return sinkscope.intervene(model, {"mask_to_self": 10}, num_sequences=8, length=48)


def sinks_of_tokens() -> dict[str, Any]:
    """By attention, and by neurons that were found on other texts."""
    model, facts = planted_chain(0)
    ids = random_tokens(facts, num_sequences=12, length=48)
    neurons = sinkscope.sink_neurons(model, ids[:8])
    by_attention, by_neurons = sinkscope.sink_tokens(model, ids[8:]), sinkscope.sink_tokens(model, ids, neurons=neurons)
    return {
        "neurons": repr(neurons),
        "attention": {name: getattr(by_attention, name) for name in ("mask", "fired", "rate", "received")},
        "by_neurons": {name: getattr(by_neurons, name) for name in ("mask", "fired")},
    }


def text_file(folder: Path) -> Path:
    text = folder / "text.txt"
    lines = (f"the head {i} attends to layer {i * 7 % 13} again\n" * 20 for i in range(60))
    text.write_text("<|endoftext|>".join(lines))
    return text


def trained(folder: Path, variant: str) -> Path:
    """A run of six steps in `folder`."""
    return sinkscope.train(
        text_file(folder),
        folder / variant,
        variant=variant,
        device="cpu",
        steps=6,
        batch_size=4,
        sequence_length=32,
        warmup_steps=1,
        evaluate_every=3,
        probe_every=3,
        seed=11,
        learning_rate=1e-3,
    )


def planted_runs(folder: Path) -> list[Path]:
    """Two seeds of softmax and of a variant that learns faster and never has a sink, with planted curves and times."""
    return [
        write_training_folder(
            folder / f"{variant}-{seed}", variant=variant, seed=seed, loss=curved_loss(speed), sink=sink
        )
        for variant, sink, speeds in (("softmax", True, (1.0, 1.1)), ("head_norm", False, (1.4, 1.6)))
        for seed, speed in enumerate(speeds)
    ]
