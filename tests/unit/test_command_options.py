"""A command's options are the fields of the configurations that it takes."""

import inspect
import re
from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

import sinkscope
from sinkscope import arguments, cli
from sinkscope.attention.variants import VARIANTS
from sinkscope.cli_options import command
from sinkscope.cli_output import Output
from sinkscope.initial_bias.controls import CONTROLS
from sinkscope.pretrain.cli import TrainingFlags
from sinkscope.pretrain.config import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class Asked:
    name: Annotated[str, typer.Argument()]
    length: Annotated[int, typer.Option(help="Tokens.")] = 64
    units: Annotated[list[str] | None, typer.Option()] = None


def test_a_command_gets_its_configurations_filled():
    seen = []

    def run(asked: Asked, output: Output) -> None:
        seen.append((asked, output))

    app = typer.Typer()
    app.command()(command(run))
    app(["it", "--units", "1:2", "--units", "3:4", "--json"], standalone_mode=False)
    assert seen == [(Asked(name="it", length=64, units=["1:2", "3:4"]), Output(as_json=True))]


def test_help_lists_every_command_in_a_group_with_its_whole_sentence():
    output = CliRunner().invoke(cli.app, ["--help"]).output
    assert re.findall(r"(?m)^(\w+):$", output)[1:] == ["Look", "Prove", "Quantise", "Train", "Origins"]
    for name, known in cli.command_line().commands.items():
        sentence = " ".join(known.help.partition("\n\n")[0].split())
        assert f" {name} {sentence}" in " ".join(output.split())


def test_names_that_are_known_before_torch_are_those_of_the_tables():
    assert tuple(VARIANTS) == arguments.VARIANTS
    assert tuple(CONTROLS) == arguments.CONTROLS


@pytest.mark.parametrize("name", ["trace", "study", "intervene", "audit", "bias", "fingerprint", "remedy", "pretrain"])
def test_a_command_has_the_defaults_of_its_function(name):
    function = sinkscope.train if name == "pretrain" else getattr(sinkscope, name)
    functions = (function, sinkscope.token_batch) if name == "trace" else (function,)
    parameters = {key: value for each in functions for key, value in inspect.signature(each).parameters.items()}
    options = {option.name: option.default for option in cli.command_line().commands[name].params}
    plain = {key: value.default for key, value in parameters.items() if isinstance(value.default, int | float | str)}
    compared = {key: value for key, value in plain.items() if key in options}
    assert len(compared) >= 2
    assert {key: options[key] for key in compared} == compared


@pytest.mark.parametrize("name", ["audit", "remedy"])
def test_the_number_of_texts_that_calibrate_is_told_as_it_is(name):
    option = next(each for each in cli.command_line().commands[name].params if each.name == "num_sequences")
    assert option.help == f"Held-out texts to measure on; {arguments.CALIBRATION} more calibrate."
    assert re.search(
        rf"\b{arguments.CALIBRATION} (that )?calibrate", " ".join(getattr(sinkscope, name).__doc__.split())
    )


def test_every_entry_of_a_training_is_an_option():
    options = {parameter.name for parameter in cli.command_line().commands["pretrain"].params}
    entries = {field.name for field in fields(TrainingConfig)}
    assert entries <= options
    assert {field.name for field in fields(TrainingFlags)} == entries - {"snapshots"}  # --keep, a list
