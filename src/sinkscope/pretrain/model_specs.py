"""What the names of training stand for: the weights, or the configuration, of a run, of a checkpoint or of a preset.

| name | weights | configuration, whose weights are drawn from seeds |
| --- | --- | --- |
| init:RUN | those that the training run in the folder RUN began with, drawn again from its seed | no |
| RUN, or reference:softmax and its like | those that the training run ended with | the run's |
| RUN/checkpoints/step-00001000 | those of that checkpoint of the run | no |
| a preset of pretrain: tiny, 30m, 152m or 1b | none | yes |

`load` and `find_configuration` ask this file by `RESOLVERS` in names.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from sinkscope.errors import InputError
from sinkscope.models.initial import INITIAL, Configuration, drawn, placed, with_tokenizer
from sinkscope.models.loaded import LoadedModel
from sinkscope.names import run_path
from sinkscope.pretrain.checkpoints import FOLDER, RECORD, TENSORS, damage, expected_layouts
from sinkscope.pretrain.presets import PRESETS, decoder_config, preset
from sinkscope.pretrain.runs import initial_configuration
from sinkscope.results.run_folder import is_training_run
from sinkscope.user_paths import user_path


def resolve(source: str | Path, *, dtype: str, device: str, device_map: Any, tokenizer: Any) -> LoadedModel | None:
    """The weights that init:RUN or a checkpoint of a run stands for; None for names that `load` itself knows."""
    checkpoint = user_path(source)
    if str(source) in PRESETS and not checkpoint.exists():
        raise InputError(
            f"{source} is a preset of pretrain, and has no weights. "
            "Train a model of this shape with sinkscope pretrain, or see what it prefers with sinkscope bias."
        )
    is_initial = str(source).startswith(INITIAL)
    if not is_initial and not (checkpoint / RECORD).is_file():
        return None
    if device_map is not None:
        raise InputError(
            f"{source} is built here and not loaded as it was saved, so it takes no `device_map`. Leave it out."
        )
    if is_initial:
        found = _run_configuration(run_path(str(source).removeprefix(INITIAL)))
        assert found.seed is not None
        model = drawn(found, found.seed)
        name = f"{INITIAL}{found.name}"
    else:
        found, model = _checkpoint(checkpoint)
        name = f"{found.name}, {checkpoint.resolve().name}"
    return placed(model, name, tokenizer or found.tokenizer, dtype=dtype, device=device)


def _checkpoint(folder: Path) -> tuple[Configuration, Any]:
    """(configuration of the run, model with a checkpoint's weights)."""
    run = folder.resolve().parent.parent
    if not is_training_run(run):
        raise InputError(
            f"{folder} is not inside the folder of its training run, whose config.yaml describes the model. "
            "Name it where sinkscope pretrain wrote it, or copy the whole folder of the run and name "
            f"COPY/{FOLDER}/{folder.resolve().name}."
        )
    found = _run_configuration(run)
    model = drawn(found, 0)
    if (reason := damage(folder, expected_layouts(dict(model.named_parameters()), []))) is not None:
        raise InputError(f"The checkpoint {folder} is damaged: {reason}. Give another checkpoint of the run.")
    tensors = load_file(folder / TENSORS)
    weights = {name: tensors[f"model.{name}"] for name, _ in model.named_parameters()}
    model.load_state_dict(weights, strict=False)  # tied weights have one name there
    return found, model


def configuration(source: str | Path) -> Configuration | None:
    """The configuration that a training run or a preset stands for; None for other names."""
    path = run_path(source)
    if is_training_run(path):
        return _run_configuration(path)
    if not path.exists() and str(source) in PRESETS:
        return Configuration(name=str(source), config=decoder_config(preset(str(source))))
    return None


def _run_configuration(run: Path) -> Configuration:
    config, tokenizer = initial_configuration(run)
    name = run.resolve().name
    return Configuration(name=name, config=config, tokenizer=with_tokenizer(tokenizer), run=run, seed=config.seed)
