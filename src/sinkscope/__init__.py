"""sinkscope: why language models pour their attention into the first token, shown link by link.

import sinkscope
model = sinkscope.load("path-or-name")
trace = sinkscope.trace(model, sinkscope.token_batch(model))
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sinkscope.pretrain.registration import register_decoder

__version__ = "0.1.0"

_HOMES = {
    "load": "sinkscope.models.loading",
    "LoadedModel": "sinkscope.models.loading",
    "token_batch": "sinkscope.models.token_batches",
    "TokenBatch": "sinkscope.models.token_batches",
    "anatomy_of": "sinkscope.models.anatomy",
    "trace": "sinkscope.capture.trace",
    "Trace": "sinkscope.capture.trace",
    "Findings": "sinkscope.capture.findings",
    "InputError": "sinkscope.errors",
    "HeadRMSNorm": "sinkscope.attention.head_norm",
    "insert_head_norm": "sinkscope.models.insert_head_norm",
    "remove_head_norm": "sinkscope.models.insert_head_norm",
    "SinkProbe": "sinkscope.pretrain.sink_probe",
}
__all__ = sorted([*_HOMES, "__version__"])

register_decoder()

if TYPE_CHECKING:
    from sinkscope.attention.head_norm import HeadRMSNorm as HeadRMSNorm
    from sinkscope.capture.findings import Findings as Findings
    from sinkscope.capture.trace import Trace as Trace
    from sinkscope.capture.trace import trace as trace
    from sinkscope.errors import InputError as InputError
    from sinkscope.models.anatomy import anatomy_of as anatomy_of
    from sinkscope.models.insert_head_norm import insert_head_norm as insert_head_norm
    from sinkscope.models.insert_head_norm import remove_head_norm as remove_head_norm
    from sinkscope.models.loading import LoadedModel as LoadedModel
    from sinkscope.models.loading import load as load
    from sinkscope.models.token_batches import TokenBatch as TokenBatch
    from sinkscope.models.token_batches import token_batch as token_batch
    from sinkscope.pretrain.sink_probe import SinkProbe as SinkProbe


def __getattr__(name: str):
    """Public names are imported when first used, so that the command line answers --help without loading torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sinkscope' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
