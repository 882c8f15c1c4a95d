"""sinkscope: why language models pour their attention into the first token, shown link by link.

    import sinkscope
    model = sinkscope.load("reference:softmax")
    sinkscope.trace(model, "The cat sat on the mat, and the dog lay on the rug, until it was dark.")

What there is to call:

    load(source)                  a model: Hugging Face name, folder, .gguf file, training run, or a model object
    token_batch(model, tokens)    token ids to read: random, of a text file, one repeated
    trace(model, text)            the sink chain of a text, several or a batch, from one forward pass
    study(model)                  whether the chain holds, link by link, by interventions with controls
    intervene(model, {kind: ...})  any interventions: every observable before, after and under a control
    audit(model, text)            what breaks in fewer bits or with a smaller cache, where, and what to do
    bias(model)                   which tokens a model prefers before any training
    fingerprint(models)           which models began with the same weights
    train(data, out)              a training run: a small decoder from scratch, the chain measured meanwhile
    compare_training(runs)        training runs over variants and seeds, side by side; or one run alone
    sink_tokens(model, ids)       which tokens of each text are sinks, as a mask
    sink_neurons(model, calibration)  a few neurons that recognise sinks without reading attention
    remedy(model, text)           a model made 8-bit-safe by rotate, sink_prefix or unplug, each beside a control
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

from functools import cache
from importlib import import_module

__version__ = "0.1.0"


@cache
def _homes() -> dict[str, str]:
    """By public name, the module where it lives: the stub beside this file is what type checkers read, and the one list
    of what is public. Read when first asked for: until this file is done, the command line does not hear Ctrl-C."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    return {line.names[0].name: line.module for line in stub.body if isinstance(line, ast.ImportFrom) if line.module}


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


def __getattr__(name: str):
    """Public names are imported when first used, so that the command line answers --help without loading torch."""
    if name == "__all__":
        return sorted([*_homes(), "__version__"])
    # Python looks for names such as __path__ here too.
    if name.startswith("__") or name not in _homes():
        raise AttributeError(f"module 'sinkscope' has no attribute '{name}'")
    return getattr(import_module(f"sinkscope.{_homes()[name]}"), name)
