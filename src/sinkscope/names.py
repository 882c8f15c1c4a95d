"""Names of models that are neither folders, files nor on the Hub.

reference:softmax, the default, reference:head_norm and reference:learned_sink come with the package. They were trained
alike but for the attention. Each is the folder of its training run, with the final weights in model/. Others are known
to the layers above, which RESOLVERS names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sinkscope.errors import InputError
from sinkscope.user_paths import user_path

PREFIX = "reference:"
REFERENCES = (f"{PREFIX}softmax", f"{PREFIX}head_norm", f"{PREFIX}learned_sink")
DEFAULT_MODEL = REFERENCES[0]
RESOLVERS = ["sinkscope.pretrain.model_specs"]
"""Modules with a function `resolve`, which `load` asks for the model of a name before it looks for a folder or file.
They are named, not imported: a name is all that may point upward, and `--help` must not import torch."""
FOLDER = Path(__file__).resolve().parent / "reference"


def is_reference(source: Any) -> bool:
    """Whether a name has the form reference:NAME, of a model that comes with the package."""
    return isinstance(source, str) and source.startswith(PREFIX)


def reference_run(name: str) -> Path:
    """The folder of the training run that reference:NAME stands for."""
    if name not in REFERENCES:
        raise InputError(
            f"There is no {name!r} in the package. Choose one of {', '.join(REFERENCES)}, or give another model."
        )
    run = FOLDER / name.removeprefix(PREFIX)
    if not (run / "model" / "model.safetensors").is_file():
        raise InputError(f"The weights of {name} are not in {run}. Install sinkscope again, or clone its repository.")
    return run


def run_path(source: str | Path) -> Path:
    """The folder of a training run: that of reference:NAME, or the path that a user typed."""
    return reference_run(str(source)) if is_reference(source) else user_path(source)
