"""What `import sinkscope` gives: every public name can be found, is there, and costs nothing before it is used."""

import inspect
import subprocess
import sys
import typing

import sinkscope
from sinkscope.models.loading import LoadOptions
from sinkscope.pretrain.config import TrainingConfig, TrainingOptions


def test_public_names_are_there_and_are_listed():
    assert {"load", "token_batch", "trace", "study", "fingerprint", "compare_training"} <= set(sinkscope.__all__)
    for name in sinkscope.__all__:
        assert getattr(sinkscope, name) is not None
    assert set(sinkscope.__all__) <= set(dir(sinkscope)), "tab completion asks dir()"
    assert not hasattr(sinkscope, "no_such_name")


def test_help_begins_with_what_there_is_to_call():
    for name in sinkscope.__all__:
        if callable(getattr(sinkscope, name)) and name[0].islower():
            assert name in sinkscope.__doc__, name


def test_importing_loads_no_torch():
    code = "import sys, sinkscope; dir(sinkscope); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_options_that_are_handed_on_are_all_typed():
    """A type checker knows them from a TypedDict, which must not fall behind."""
    assert typing.get_type_hints(TrainingOptions) == typing.get_type_hints(TrainingConfig)
    named = list(inspect.signature(sinkscope.load).parameters)[1:]
    assert list(LoadOptions.__annotations__) == named
    for name in ("train", "audit", "bias", "fingerprint"):
        *_, last = inspect.signature(getattr(sinkscope, name)).parameters.values()
        assert last.annotation.startswith("Unpack["), name


def test_every_parameter_has_a_type():
    """Any tells a reader nothing. Of classes, those that a user makes himself."""
    own = [getattr(sinkscope, name) for name in sinkscope.__all__ if name[0].islower()]
    for call in [*own, sinkscope.SinkProbe, sinkscope.SinkWatch, sinkscope.HeadRMSNorm]:
        if callable(call):
            hints = {parameter.name: parameter.annotation for parameter in inspect.signature(call).parameters.values()}
            untyped = {
                name for name, hint in hints.items() if hint in ("Any", "Sequence[Any]", inspect.Parameter.empty)
            }
            assert not untyped, (call, untyped)
