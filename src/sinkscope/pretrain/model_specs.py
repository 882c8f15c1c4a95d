"""Names of models that only training knows: what `load` and `find_configuration` get for them.

| name | `load`: weights | `find_configuration`: a shape whose weights are drawn from seeds |
| --- | --- | --- |
| init:RUN | the initial weights of the run in the folder RUN, drawn again from its seed | no |
| RUN, or reference:softmax and its like | the final weights of the run | that of the run |
| RUN/checkpoints/step-00001000 | the weights of that checkpoint of the run | no |
| a preset of pretrain: tiny, 30m, 152m or 1b | none | that of the preset |

Both find `resolve` and `configuration` through `RESOLVERS` in names.py, so that models need not know training.
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
    """The model with the weights of init:RUN or of a checkpoint; None for names that `load` knows without this file."""
    checkpoint = user_path(source)
    if str(source) in PRESETS and not checkpoint.exists():
        raise InputError(
            f"{source} is a preset of pretrain, and has no weights. Train a model of this shape with sinkscope "
            "pretrain, or see with sinkscope bias which tokens it prefers before training."
        )
    is_initial = str(source).startswith(INITIAL)
    if not is_initial and not (checkpoint / RECORD).is_file():
        return None
    if device_map is not None:
        raise InputError(
            f"{source} is built from a training run, not loaded from a model folder, so it takes no `device_map`. "
            "Leave it out."
        )
    if is_initial:
        run = _run_configuration(run_path(str(source).removeprefix(INITIAL)))
        assert run.seed is not None
        model = drawn(run, run.seed)
        name = f"{INITIAL}{run.name}"
    else:
        run, model = _checkpoint(checkpoint)
        name = f"{run.name}, {checkpoint.resolve().name}"
    return placed(model, name, tokenizer or run.tokenizer, dtype=dtype, device=device)


def _checkpoint(folder: Path) -> tuple[Configuration, Any]:
    """(configuration of the run, model with the weights of its checkpoint in `folder`)."""
    run = folder.resolve().parent.parent
    if not is_training_run(run):
        raise InputError(
            f"{folder} is not inside the folder of its training run, whose config.yaml describes the model. "
            "Give its path in the folder that sinkscope pretrain wrote. If you copy the run, copy its whole folder and "
            f"give COPY/{FOLDER}/{folder.resolve().name}."
        )
    run_configuration = _run_configuration(run)
    model = drawn(run_configuration, 0)  # any seed: the checkpoint replaces every weight
    if (reason := damage(folder, expected_layouts(dict(model.named_parameters()), []))) is not None:
        raise InputError(f"The checkpoint {folder} is damaged: {reason}. Give another checkpoint of the run.")
    tensors = load_file(folder / TENSORS)
    weights = {name: tensors[f"model.{name}"] for name, _ in model.named_parameters()}
    model.load_state_dict(weights, strict=False)  # not strict: the checkpoint has tied weights under one name
    return run_configuration, model


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
