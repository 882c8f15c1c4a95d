"""What an audit found, as files that other tools read: none of those tools is imported.

- recipe.json: everything that is advised, by scheme.
- torchao.json: keyword arguments of transformers' TorchAoConfig, which leave the modules out.
- llm-compressor.yaml: a recipe of llm-compressor whose ignore list holds them.
- kept_positions.json: the positions of each held-out text that a cache or a window should keep, as kvpress has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sinkscope.models.loading import LoadedModel
from sinkscope.remedies.advice import EXEMPT, Setting, Trial
from sinkscope.remedies.schemes import SCHEMES
from sinkscope.results.run_folder import RunFolder


def write_recipe(
    folder: RunFolder, loaded: LoadedModel, setting: Setting, advice: Sequence[Trial], nothing: dict[str, Any]
) -> None:
    """Writes the four files; without advice the lists in them are empty, and `nothing` says why."""
    folder.write_json("recipe.json", recipe(loaded, setting, advice) | nothing)
    write_ignored(folder, loaded.model, exempted_modules(setting, advice))
    folder.write_json("kept_positions.json", [row.nonzero().flatten().tolist() for row in setting.is_sink])


def write_ignored(folder: RunFolder, model: Any, exempted: Sequence[str]) -> None:
    """Writes the modules that stay in 16 bits, with the output head, as torchao and llm-compressor read them."""
    head = next(name for name, part in model.named_modules() if part is model.get_output_embeddings())
    ignored = [head, *exempted]
    folder.write_json("torchao.json", {"modules_to_not_convert": ignored})
    modifier = {"targets": ["Linear"], "scheme": "W8A8", "ignore": ignored}
    folder.write_yaml("llm-compressor.yaml", {"quant_stage": {"quant_modifiers": {"QuantizationModifier": modifier}}})


def exempted_modules(setting: Setting, advice: Sequence[Trial]) -> list[str]:
    """The modules that measurably win something back when they stay in 16 bits, in the order of the model."""
    schemes = [SCHEMES[trial.scheme] for trial in advice if trial.remedy == EXEMPT]
    names = {name for scheme in schemes for name in setting.exempted(scheme)}
    return [name for name, _ in setting.model.named_modules() if name in names]


def recipe(loaded: LoadedModel, setting: Setting, advice: Sequence[Trial]) -> dict[str, Any]:
    """By scheme, what to do in order of effect; nothing where no remedy holds."""
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMES}
    for trial in advice:
        step = {"remedy": trial.remedy, "what": trial.what, "wins_back": trial.won.change, "of": trial.damage.change}
        if trial.remedy == EXEMPT:
            step["modules"] = setting.exempted(SCHEMES[trial.scheme])
        steps[trial.scheme].append(step)
    return {"model": loaded.name, "weight_hash": loaded.weight_hash, "schemes": steps}
