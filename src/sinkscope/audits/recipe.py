"""What an audit advises, as files that other tools read; none of those tools is imported.

- recipe.json: everything that is advised, by scheme.
- torchao.json: keyword arguments of transformers' TorchAoConfig that leave modules out, beside a quant_type of 8-bit
  activations with one scale a tensor, dynamic.
- llm-compressor.yaml: a recipe of llm-compressor for the same with static scales, whose ignore list holds the modules.
- kept_positions.json: the positions of each held-out text that a cache or a window should keep, as kvpress has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sinkscope.audits.advice import Trial
from sinkscope.audits.by_torchao import TORCHAO_SCHEMES
from sinkscope.audits.evaluation import Evaluation
from sinkscope.audits.remedies import EXEMPT, PREFIX
from sinkscope.audits.schemes import SCHEMES
from sinkscope.audits.static_scales import STATIC
from sinkscope.models.loaded import LoadedModel
from sinkscope.results.run_folder import RunFolder

INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
# llm-compressor's own W8A8 has a scale a token. Its observer of least squared error clips as the audit's scales do.
STATIC_INT8 = {
    "targets": ["Linear"],
    "weights": INT8 | {"strategy": "channel"},
    "input_activations": INT8 | {"strategy": "tensor", "observer": "mse"},
}


def write_recipe(
    folder: RunFolder, loaded: LoadedModel, evaluation: Evaluation, advice: Sequence[Trial], status: dict[str, Any]
) -> None:
    """Writes the four files; without advice the lists in them are empty, and `status` says why."""
    folder.write_json("recipe.json", recipe(loaded, evaluation, advice) | status)
    static, dynamic = (modules_to_leave(evaluation, advice, name) for name in (STATIC.name, TORCHAO_SCHEMES[0]))
    write_ignored(folder, loaded.model, static=static, dynamic=dynamic)
    folder.write_json("kept_positions.json", [row.nonzero().flatten().tolist() for row in evaluation.is_sink])


def write_ignored(folder: RunFolder, model: Any, *, static: Sequence[str], dynamic: Sequence[str]) -> None:
    """Writes the modules that stay in 16 bits, with the output head: those for static scales as llm-compressor reads
    them, those for dynamic ones as torchao does."""
    head = next(name for name, part in model.named_modules() if part is model.get_output_embeddings())
    folder.write_json("torchao.json", {"modules_to_not_convert": [head, *dynamic]})
    modifier = {"config_groups": {"group_0": STATIC_INT8}, "ignore": [head, *static]}
    folder.write_yaml("llm-compressor.yaml", {"quant_stage": {"quant_modifiers": {"QuantizationModifier": modifier}}})


def modules_to_leave(evaluation: Evaluation, advice: Sequence[Trial], scheme: str) -> list[str]:
    """The modules to leave in 16 bits against a scheme, the worst first; none where that is not advised."""
    holds = any((trial.remedy, trial.scheme) == (EXEMPT.name, scheme) for trial in advice)
    return list(evaluation.worst_modules(SCHEMES[scheme])) if holds else []


def recipe(loaded: LoadedModel, evaluation: Evaluation, advice: Sequence[Trial]) -> dict[str, Any]:
    """By scheme, what to do in order of effect; an empty list where no remedy helps."""
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMES}
    for trial in advice:
        step = {
            "remedy": trial.remedy,
            "what": trial.what,
            "recovers": trial.recovered.change,
            "of": trial.damage.change,
        }
        step |= {"recovers_low": trial.recovered.low, "recovers_high": trial.recovered.high}
        if trial.remedy == EXEMPT.name:
            step["modules"] = list(evaluation.worst_modules(SCHEMES[trial.scheme]))
        if trial.remedy == PREFIX.name:
            step["token_ids"] = list(evaluation.prefix.ids)
        steps[trial.scheme].append(step)
    return {"model": loaded.name, "weight_hash": loaded.weight_hash, "schemes": steps}
