"""Every trait of the table, in every family it is planted into, under every command: the numbers of the plain
definition, or a refusal that says why."""

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from traits.plain import plain_numbers, see_everything, see_itself_only
from traits.traits import CHAIN, TRAITS, Trait, build

import sinkscope
from sinkscope import InputError, Neuron
from sinkscope.results.run_folder import RunFolder

B, T = 4, 24
BY_POSITION = ("attention_received", "sink_rate", "value_variance", "dom_ratio", "largest_write")
SMALLEST = dict(length=32, num_sequences=16)
"""The smallest study there is."""
SELF = 5
"""Where the token that sees itself alone stands."""
CELLS = [(name, family, command) for name, trait in TRAITS.items() for family, command in trait.cells()]


@dataclass(frozen=True)
class Subject:
    """A model with its trait, as the plain definition takes it and as a user gives it."""

    trait: Trait
    family: str
    model: nn.Module
    given: Any

    @property
    def ids(self) -> Tensor:
        return self.trait.tokens(all_tokens())

    def plain(self, ids: Tensor, **edits: Any) -> dict[str, np.ndarray]:
        # Outside of what the trait puts around a call.
        return plain_numbers(self.model, "llama" if self.family == CHAIN else self.family, ids, **edits)


@functools.cache
def built(name: str, family: str) -> nn.Module:
    return build(TRAITS[name], family)


@functools.cache
def subject(name: str, family: str) -> Subject:
    trait, model = TRAITS[name], built(name, family)
    if trait.save is None:
        return Subject(trait, family, model, trait.wrap(model))
    with tempfile.TemporaryDirectory() as folder:
        trait.save(model, Path(folder))
        with trait.around():
            return Subject(trait, family, model, sinkscope.load(folder))


@pytest.mark.parametrize(("name", "family", "command"), CELLS, ids=["-".join(cell) for cell in CELLS])
def test_right_numbers_or_a_refusal(name, family, command, tmp_path):
    trait = TRAITS[name]
    if word := trait.refused.get(command):
        with trait.around(), pytest.raises(InputError, match=word):
            RUN[command](subject(name, family), tmp_path)
        return
    with trait.around():
        check = RUN[command](subject(name, family), tmp_path)
    check()


# One function a command: it runs the command, and returns what compares its numbers afterwards.


def run_trace(given: Subject, tmp_path: Path):
    found = sinkscope.trace(given.given, given.ids)
    found.write(RunFolder(tmp_path))  # where a column that is declared never empty would be refused
    return lambda: compare_trace(found, given, given.ids)


def run_bos(given: Subject, tmp_path: Path):
    loaded = sinkscope.load(given.given)
    batch = sinkscope.token_batch(loaded, bos=True, length=T, num_sequences=B)
    found = sinkscope.trace(loaded, batch)

    def check():
        assert (batch.ids[:, 0] == 1).all()
        compare_trace(found, given, batch.ids)

    return check


def run_text(given: Subject, tmp_path: Path):
    loaded, ids = sinkscope.load(given.given), 10 + torch.arange(B * T).view(B, T)
    ids = ids if given.trait.refused.get("text") else 10 + ids % 40
    (tmp_path / "words.txt").write_text(" ".join(f"w{i}x" for i in ids.flatten().tolist()))
    batch = sinkscope.token_batch(loaded, f"text:{tmp_path}/words.txt", length=T, num_sequences=B)
    found = sinkscope.trace(loaded, batch)

    def check():
        assert torch.equal(batch.ids, ids)
        compare_trace(found, given, ids)

    return check


def run_intervene(given: Subject, tmp_path: Path):
    """One neuron taken away, then one token that sees itself alone."""
    loaded = sinkscope.load(given.given)
    with sinkscope.ablate_neurons(loaded, [Neuron(0, None, 3)]):
        without_neuron = sinkscope.trace(loaded, given.ids)
    with sinkscope.mask_to_self(loaded, SELF):
        alone = sinkscope.trace(loaded, given.ids)

    def check():
        untouched = given.plain(given.ids)
        for found, edit in (
            (without_neuron, {"zeroed": [(0, 3)]}),
            (alone, {"edit_mask": see_itself_only(SELF)}),
        ):
            expected = given.plain(given.ids, **edit)
            compare(by_position(found), expected, given.trait.tolerance)
            # Control: the untouched model has other numbers, or there was nothing to take away.
            if not all(np.array_equal(expected[name], untouched[name], equal_nan=True) for name in BY_POSITION):
                assert differs(by_position(found), untouched, 1e-6)

    return check


def run_bias(given: Subject, tmp_path: Path):
    loaded = sinkscope.load(given.given)
    controls = None if given.family == "llama" else ()  # all of them once; they take most of the time
    found = sinkscope.bias(loaded, num_sequences=16, length=T, controls=controls)
    ids = sinkscope.token_batch(loaded, length=T, num_sequences=16).ids

    def check():
        table = dict(zip(found.tables["bias"]["quantity"], found.tables["bias"]["value"], strict=True))
        names = ("inter_cosine", "intra_cosine", "entropy")
        values = {name: np.asarray(table[name]) for name in names}
        compare(values, given.plain(ids), 10 * given.trait.tolerance)
        # Control: other sequences have other numbers.
        assert differs(values, given.plain(ids.flip(1)), 10 * given.trait.tolerance)

    return check


def run_fingerprint(given: Subject, tmp_path: Path):
    loaded = sinkscope.load(given.given)
    found = sinkscope.fingerprint([loaded, loaded], num_sequences=64, length=8, fresh=1)

    def check():
        (pair,), signature = found.pairs, found.signatures[0]
        assert pair.effect == pytest.approx(1, abs=1e-3)
        assert pair.verdict == "same origin"
        expected = given.plain(signature.inputs.ids)
        compare({"final_state": signature.states.numpy()}, expected, given.trait.tolerance)
        # Control: a fresh model of the same shape is not this one.
        assert abs(found.unrelated_rows[0]["effect"]) < 0.5

    return check


def run_study(given: Subject, tmp_path: Path):
    found = sinkscope.study(sinkscope.load(given.given), **SMALLEST)
    found.write(RunFolder(tmp_path))

    def check():
        compare_trace(found.trace, given, found.trace.recording.batch.ids)
        if given.family == CHAIN and not given.trait.changes_numbers:
            truth = studied_without_trait()
            assert [judgement.verdict for judgement in found.judgements] == [each.verdict for each in truth.judgements]
            assert found.minimal_set == truth.minimal_set
            assert found.minimal_set

    return check


@functools.cache
def studied_without_trait() -> sinkscope.Study:
    return sinkscope.study(built("nothing", CHAIN), **SMALLEST)


RUN = {
    "trace": run_trace,
    "bos": run_bos,
    "text": run_text,
    "intervene": run_intervene,
    "bias": run_bias,
    "fingerprint": run_fingerprint,
    "study": run_study,
}


# Comparison


def by_position(found: sinkscope.Trace) -> dict[str, np.ndarray]:
    """[L, T] by name, empty values as NaN."""
    table = found.tables["positions"]
    num_layers = max(table["layer"]) + 1
    return {name: np.asarray(table[name], dtype=np.float64).reshape(num_layers, -1) for name in BY_POSITION}


def compare(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    """Relative, with a floor for values that are small beside the largest; empty exactly where the definition is."""
    for name, value in found.items():
        floor = tolerance * np.abs(expected[name][np.isfinite(expected[name])]).max(initial=0)
        np.testing.assert_allclose(value, expected[name], rtol=tolerance, atol=floor, err_msg=name)


def differs(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> bool:
    try:
        compare(found, expected, tolerance)
    except AssertionError:
        return True
    return False


def compare_trace(found: sinkscope.Trace, given: Subject, ids: Tensor) -> None:
    expected, tolerance = given.plain(ids), given.trait.tolerance
    values = by_position(found)
    compare(values, expected, tolerance)
    ranks = {"effective_rank": np.asarray(found.tables["layers"]["effective_rank"], dtype=np.float64)}
    compare(ranks, expected, tolerance)
    # Control: queries that see the future have other numbers.
    assert differs(values, given.plain(ids, edit_mask=see_everything), tolerance)


# The table itself


def all_tokens() -> Tensor:
    return torch.randint(9, 60, (B, T), generator=torch.Generator().manual_seed(0))


PLANTED = [
    (name, family)
    for name, family in dict.fromkeys(cell[:2] for cell in CELLS)
    if family != CHAIN and (TRAITS[name].plant or TRAITS[name].config) and not TRAITS[name].refused.get("trace")
]


@pytest.mark.parametrize(("name", "family"), PLANTED, ids=["-".join(pair) for pair in PLANTED])
def test_a_trait_changes_numbers_as_its_entry_says(name, family):
    """Control of the table: a trait that never got into its model would pass every other test."""
    ids = TRAITS[name].tokens(all_tokens())
    planted, bare = (plain_numbers(built(each, family), family, ids) for each in (name, "nothing"))
    planted, bare = ({column: numbers[column] for column in BY_POSITION} for numbers in (planted, bare))
    assert differs(planted, bare, 1e-9) == TRAITS[name].changes_numbers


DRAWN = [(name, family) for name, trait in TRAITS.items() if trait.never_drawn for family in trait.families]


@pytest.mark.parametrize(("name", "family"), DRAWN, ids=["-".join(pair) for pair in DRAWN])
def test_random_tokens_leave_out_what_was_never_trained(name, family):
    def drawn(given: Any) -> set[int]:
        return set(sinkscope.token_batch(sinkscope.load(given), length=64, num_sequences=16).ids.flatten().tolist())

    left_out = set(TRAITS[name].never_drawn)
    assert not drawn(subject(name, family).given) & left_out
    # Control: without the trait they are drawn.
    assert drawn(built("nothing", family)) & left_out
