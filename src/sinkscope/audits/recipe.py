"""What an audit advises, as files that other tools read.

For each scheme of linear layers that is safe or can be repaired:
- llm-compressor-SCHEME.yaml: a recipe of llm-compressor's `oneshot`.
- compressed-tensors-SCHEME.json: a quantisation configuration, whose `ignore` holds what stays in 16 bits.
- torchao-SCHEME.json: keyword arguments of transformers' TorchAoConfig that leave modules out.
For a cache of 8-bit floats: vllm.yaml, for `vllm serve --config`, and kv_cache_scales.safetensors, with the scales
under the names by which checkpoints have them. recipe.json holds all that is advised, experiments too.
Modules that an engine fuses are left out together, as it asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import save_file

from sinkscope.atomic import whole_file
from sinkscope.audits.advice import Decision, Trial
from sinkscope.audits.damage import Damage
from sinkscope.audits.evaluation import Evaluation
from sinkscope.audits.formats import compressed_tensors
from sinkscope.audits.remedies import PREFIX
from sinkscope.audits.schemes import Scheme, attentions
from sinkscope.models.loaded import LoadedModel
from sinkscope.results.run_folder import RunFolder

LARGEST_FP8 = 448
VLLM_CACHE = "fp8"
"""The format of the cache that vLLM takes with calibrated scales."""


def write_recipe(
    folder: RunFolder,
    loaded: LoadedModel,
    evaluation: Evaluation,
    decisions: Sequence[Decision],
    trials: Sequence[Trial],
) -> None:
    """Writes the files of every scheme that is safe or can be repaired."""
    folder.write_json("recipe.json", recipe(loaded, evaluation, decisions, trials))
    for decision in decisions:
        scheme = next(scheme for scheme in evaluation.schemes if scheme.name == decision.scheme)
        if decision.verdict not in ("safe", "repair"):
            continue
        modules = decision.repair.modules if decision.repair else ()
        if scheme.what == "linear":
            write_scheme(folder, loaded.model, scheme, modules)
        elif scheme.name == f"cache-{VLLM_CACHE}":
            write_cache(folder, evaluation, modules)


def write_scheme(folder: RunFolder, model: Any, scheme: Scheme, in_16_bits: Sequence[str]) -> None:
    """Writes a scheme, and what stays in 16 bits, for llm-compressor, compressed-tensors and torchao."""
    package = compressed_tensors()
    head = next(name for name, part in model.named_modules() if part is model.get_output_embeddings())
    ignore = [head, *scheme.ignore, *in_16_bits]
    groups = {f"group_{number}": group for number, group in enumerate(scheme.groups)}
    config = package.QuantizationConfig(config_groups=groups, ignore=ignore).model_dump(mode="json", exclude_none=True)
    modifier = {"config_groups": config["config_groups"], "ignore": ignore}
    recipe = {"quant_stage": {"quant_modifiers": {"QuantizationModifier": modifier}}}
    folder.write_yaml(f"llm-compressor-{scheme.name}.yaml", recipe)
    folder.write_json(f"compressed-tensors-{scheme.name}.json", config)
    folder.write_json(f"torchao-{scheme.name}.json", {"modules_to_not_convert": ignore})


def write_cache(folder: RunFolder, evaluation: Evaluation, in_16_bits: Sequence[str]) -> None:
    """Writes the options of vLLM for a cache of 8-bit floats, and the scale of each layer's keys and values."""
    layers = attentions(evaluation.model)
    options: dict[str, Any] = {"kv-cache-dtype": VLLM_CACHE}
    if in_16_bits:
        options["kv-cache-dtype-skip-layers"] = sorted(str(layers[name]) for name in in_16_bits)
    folder.write_yaml("vllm.yaml", options)
    scales = {}
    for name in layers:
        for part, largest_K in zip(("k_scale", "v_scale"), evaluation.largest[name], strict=True):
            scales[f"{name}.{part}"] = (largest_K.amax() / LARGEST_FP8).reshape(1).to(torch.float32)
    with whole_file(folder.path / "kv_cache_scales.safetensors") as partial:
        save_file(scales, partial)


def recipe(
    loaded: LoadedModel, evaluation: Evaluation, decisions: Sequence[Decision], trials: Sequence[Trial]
) -> dict[str, Any]:
    """By scheme, the decision, and every remedy that helps, the largest effect first."""
    schemes: dict[str, Any] = {}
    for decision in decisions:
        helping = [trial for trial in trials if trial.scheme == decision.scheme and trial.holds]
        helping.sort(key=lambda trial: -trial.recovered.change)
        schemes[decision.scheme] = {
            "verdict": decision.verdict,
            "bits": decision.bits,
            **ends("costs", decision.damage),
            "steps": [_step(evaluation, trial) for trial in helping],
        }
    return {"model": loaded.name, "weight_hash": loaded.weight_hash, "schemes": schemes}


def _step(evaluation: Evaluation, trial: Trial) -> dict[str, Any]:
    step = {"remedy": trial.remedy, "what": trial.what, "is_experiment": not trial.is_loaded}
    step |= ends("recovers", trial.recovered) | ends("leaves", trial.remaining)
    if trial.modules:
        step["modules"] = list(trial.modules)
    if trial.remedy == PREFIX.name:
        step["token_ids"] = list(evaluation.prefix.ids)
    return step


def ends(name: str, change: Damage) -> dict[str, float]:
    """A change of the loss with both ends of its interval, as columns or keys of that name."""
    return {name: change.change, f"{name}_low": change.low, f"{name}_high": change.high}
