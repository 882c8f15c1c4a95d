"""sinkscope: why language models pour their attention into the first token, shown link by link.

    import sinkscope
    model = sinkscope.load("reference:softmax")
    sinkscope.trace(model, "The cat sat on the mat, and the dog lay on the rug, until it was dark.")

What there is to call:

    load(source)                  a model: Hugging Face name, folder, .gguf file, training run, or a model object
    token_batch(model, tokens)    token ids to read: random, of a text file, one repeated
    trace(model, text)            the sink chain of a text, several or a batch, from one forward pass
    study(model)                  whether the chain holds, link by link, by interventions with controls
    intervene(model, requests)    any interventions: every observable before, after and under a control
    audit(model, text)            what breaks in fewer bits or with a smaller cache, where, and what to do
    bias(model)                   which tokens a model prefers from birth
    fingerprint(models)           which models began with the same weights
    train(data, out)              a training run: a small decoder from scratch, the chain measured meanwhile
    compare_training(runs)        training runs over variants and seeds, side by side; or one run alone
    sink_tokens(model, ids)       which tokens of each text are sinks, as a mask
    sink_neurons(model, calibration)  a few neurons that recognise sinks without reading attention
    remedy(model, text)           a model that 8 bits harm less, by rotate, sink_prefix or unplug, each with a control
    anatomy_of(model)             where a model keeps its modules
    load_result(folder)           a saved result, without its model

Each of trace, study, intervene, audit, bias, fingerprint and compare_training gives a result with .story, .summary,
.tables, .table(name) for pyarrow and pandas, .plot(), .save(folder) and .report(file).

Interventions are context managers: mask_to_self, edit_mask; amplify_variance, scale_norm, shift_mean, swap_deviation,
random_direction, equalise_variance; match_variance, match_energy, match_moments; ablate_neurons, densify_neurons,
transplant_neurons; set_dimensions, clamp.

    with sinkscope.mask_to_self(model, 10):
        sinkscope.trace(model, batch)

For training: probe(model, batch) in any loop; SinkProbe, a callback of the Hugging Face Trainer; HeadRMSNorm,
insert_head_norm and remove_head_norm.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sinkscope.names import RESOLVERS

__version__ = "0.1.0"

_HOMES = {
    "load": "sinkscope.models.loading",
    "LoadedModel": "sinkscope.models.loaded",
    "token_batch": "sinkscope.models.token_batches",
    "TokenBatch": "sinkscope.models.token_batches",
    "anatomy_of": "sinkscope.models.anatomy",
    "trace": "sinkscope.tracing.trace",
    "Trace": "sinkscope.tracing.trace",
    "Findings": "sinkscope.tracing.findings",
    "Observable": "sinkscope.tracing.observables",
    "Recording": "sinkscope.tracing.recorder",
    "study": "sinkscope.studies.study",
    "Study": "sinkscope.studies.study",
    "intervene": "sinkscope.interventions.intervene",
    "InterventionResult": "sinkscope.interventions.intervene",
    "InputError": "sinkscope.errors",
    "Result": "sinkscope.results.result",
    "load_result": "sinkscope.results.saved",
    "SavedResult": "sinkscope.results.saved",
    "Unit": "sinkscope.models.anatomy",
    "mask_to_self": "sinkscope.interventions.mask",
    "edit_mask": "sinkscope.interventions.mask",
    "amplify_variance": "sinkscope.interventions.aggregation",
    "scale_norm": "sinkscope.interventions.aggregation",
    "shift_mean": "sinkscope.interventions.aggregation",
    "swap_deviation": "sinkscope.interventions.aggregation",
    "random_direction": "sinkscope.interventions.aggregation",
    "equalise_variance": "sinkscope.interventions.aggregation",
    "match_variance": "sinkscope.interventions.matching",
    "match_energy": "sinkscope.interventions.matching",
    "match_moments": "sinkscope.interventions.matching",
    "ablate_neurons": "sinkscope.interventions.neurons",
    "densify_neurons": "sinkscope.interventions.neurons",
    "transplant_neurons": "sinkscope.interventions.neurons",
    "set_dimensions": "sinkscope.interventions.residual",
    "clamp": "sinkscope.interventions.residual",
    "HeadRMSNorm": "sinkscope.attention.head_norm",
    "insert_head_norm": "sinkscope.models.insert_head_norm",
    "remove_head_norm": "sinkscope.models.insert_head_norm",
    "train": "sinkscope.pretrain.train",
    "SinkProbe": "sinkscope.pretrain.probes",
    "probe": "sinkscope.pretrain.probes",
    "audit": "sinkscope.audits.audit",
    "AuditResult": "sinkscope.audits.audit_result",
    "bias": "sinkscope.initial_bias.bias",
    "Bias": "sinkscope.initial_bias.bias",
    "fingerprint": "sinkscope.fingerprints.fingerprint",
    "Fingerprint": "sinkscope.fingerprints.fingerprint",
    "sink_tokens": "sinkscope.audits.sink_tokens",
    "SinkTokens": "sinkscope.audits.sink_tokens",
    "sink_neurons": "sinkscope.audits.sink_tokens",
    "SinkNeurons": "sinkscope.audits.sink_neurons",
    "sink_prefix": "sinkscope.audits.prefix",
    "SinkPrefix": "sinkscope.audits.prefix",
    "unplug": "sinkscope.audits.unplug",
    "rotate": "sinkscope.models.rotation",
    "remedy": "sinkscope.audits.remedy",
    "RemedyResult": "sinkscope.audits.remedy_result",
    "SinkWatch": "sinkscope.audits.sink_neurons",
    "compare_training": "sinkscope.pretrain.comparison",
    "TrainingComparison": "sinkscope.pretrain.comparison",
}
# Type checkers take the names from the imports below.
__all__ = sorted([*_HOMES, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]

RESOLVERS.append("sinkscope.pretrain.model_specs")

if TYPE_CHECKING:
    from sinkscope.attention.head_norm import HeadRMSNorm as HeadRMSNorm
    from sinkscope.audits.audit import audit as audit
    from sinkscope.audits.audit_result import AuditResult as AuditResult
    from sinkscope.audits.prefix import SinkPrefix as SinkPrefix
    from sinkscope.audits.prefix import sink_prefix as sink_prefix
    from sinkscope.audits.remedy import remedy as remedy
    from sinkscope.audits.remedy_result import RemedyResult as RemedyResult
    from sinkscope.audits.sink_neurons import SinkNeurons as SinkNeurons
    from sinkscope.audits.sink_neurons import SinkWatch as SinkWatch
    from sinkscope.audits.sink_tokens import SinkTokens as SinkTokens
    from sinkscope.audits.sink_tokens import sink_neurons as sink_neurons
    from sinkscope.audits.sink_tokens import sink_tokens as sink_tokens
    from sinkscope.audits.unplug import unplug as unplug
    from sinkscope.errors import InputError as InputError
    from sinkscope.fingerprints.fingerprint import Fingerprint as Fingerprint
    from sinkscope.fingerprints.fingerprint import fingerprint as fingerprint
    from sinkscope.initial_bias.bias import Bias as Bias
    from sinkscope.initial_bias.bias import bias as bias
    from sinkscope.interventions.aggregation import amplify_variance as amplify_variance
    from sinkscope.interventions.aggregation import equalise_variance as equalise_variance
    from sinkscope.interventions.aggregation import random_direction as random_direction
    from sinkscope.interventions.aggregation import scale_norm as scale_norm
    from sinkscope.interventions.aggregation import shift_mean as shift_mean
    from sinkscope.interventions.aggregation import swap_deviation as swap_deviation
    from sinkscope.interventions.intervene import InterventionResult as InterventionResult
    from sinkscope.interventions.intervene import intervene as intervene
    from sinkscope.interventions.mask import edit_mask as edit_mask
    from sinkscope.interventions.mask import mask_to_self as mask_to_self
    from sinkscope.interventions.matching import match_energy as match_energy
    from sinkscope.interventions.matching import match_moments as match_moments
    from sinkscope.interventions.matching import match_variance as match_variance
    from sinkscope.interventions.neurons import ablate_neurons as ablate_neurons
    from sinkscope.interventions.neurons import densify_neurons as densify_neurons
    from sinkscope.interventions.neurons import transplant_neurons as transplant_neurons
    from sinkscope.interventions.residual import clamp as clamp
    from sinkscope.interventions.residual import set_dimensions as set_dimensions
    from sinkscope.models.anatomy import Unit as Unit
    from sinkscope.models.anatomy import anatomy_of as anatomy_of
    from sinkscope.models.insert_head_norm import insert_head_norm as insert_head_norm
    from sinkscope.models.insert_head_norm import remove_head_norm as remove_head_norm
    from sinkscope.models.loaded import LoadedModel as LoadedModel
    from sinkscope.models.loading import load as load
    from sinkscope.models.rotation import rotate as rotate
    from sinkscope.models.token_batches import TokenBatch as TokenBatch
    from sinkscope.models.token_batches import token_batch as token_batch
    from sinkscope.pretrain.comparison import TrainingComparison as TrainingComparison
    from sinkscope.pretrain.comparison import compare_training as compare_training
    from sinkscope.pretrain.probes import SinkProbe as SinkProbe
    from sinkscope.pretrain.probes import probe as probe
    from sinkscope.pretrain.train import train as train
    from sinkscope.results.result import Result as Result
    from sinkscope.results.saved import SavedResult as SavedResult
    from sinkscope.results.saved import load_result as load_result
    from sinkscope.studies.study import Study as Study
    from sinkscope.studies.study import study as study
    from sinkscope.tracing.findings import Findings as Findings
    from sinkscope.tracing.observables import Observable as Observable
    from sinkscope.tracing.recorder import Recording as Recording
    from sinkscope.tracing.trace import Trace as Trace
    from sinkscope.tracing.trace import trace as trace


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str):
    """Public names are imported when first used, so that the command line answers --help without loading torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sinkscope' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
