"""Makes transformers' Auto classes know the decoder as soon as `sinkscope` is imported, without importing transformers.

transformers has no entry point for the models of other packages, only `register`, which needs the classes and with
them seconds of imports that `sinkscope --help` must not pay. So where the Auto classes are not loaded yet, a finder
waits for them in the import system, and our module registers itself right behind each.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

BEHIND = {
    # In two steps: transformers loads the first of them while its base class of models is still being made.
    "transformers.models.auto.configuration_auto": "sinkscope.pretrain.decoder_config",
    "transformers.models.auto.modeling_auto": "sinkscope.pretrain.decoder",
}


def register_decoder() -> None:
    """Registers configuration and model: now if the Auto classes are loaded, else right after they are."""
    for theirs, ours in BEHIND.items():
        if theirs in sys.modules:
            importlib.import_module(ours)
        elif not any(isinstance(finder, _Behind) and finder.theirs == theirs for finder in sys.meta_path):
            sys.meta_path.insert(0, _Behind(theirs, ours))


class _Behind(MetaPathFinder, Loader):
    """Loads one module as it would be loaded without us, then imports one of ours."""

    def __init__(self, theirs: str, ours: str) -> None:
        self.theirs, self.ours = theirs, ours

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.theirs:
            return None
        sys.meta_path.remove(self)  # one use, and the search below must not come back here
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        importlib.import_module(self.ours)
