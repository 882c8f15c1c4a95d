"""Verdicts and their intervals: worked out by hand where that is possible, simulated where coverage is promised."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sinkscope.statistics import bootstrap_p_value, bootstrap_tail, holm_levels, resample_weights
from sinkscope.studies.causal_claims import _least_over_first
from sinkscope.studies.checks import MarkedError
from sinkscope.studies.claims import CLAIMS
from sinkscope.studies.conditions import Condition
from sinkscope.studies.judging import (
    ALSO_CONTROL,
    Bar,
    Claim,
    ClaimNumbers,
    Empty,
    Judgement,
    gone,
    judge,
    least_left,
    mediated,
    most,
    second_over_first,
    the_mean,
)
from sinkscope.studies.minimal_set import minimal_set, shortest
from sinkscope.studies.study import _numbers

N = 32


def found(*bars_and_values, name="sink"):
    """A claim of some bars, with its numbers."""
    bars, by_bar = zip(*bars_and_values, strict=True)
    claim = Claim(id=name, link="sink", statement="", bars=bars, numbers=lambda study: numbers, figures=())
    numbers = ClaimNumbers(by_bar=[v if isinstance(v, Empty) else np.asarray(v, float) for v in by_bar])
    return claim, claim.numbers(None)


def claim(values, threshold=0.05, rule="at least", name="sink"):
    return found((Bar(rule, threshold), values), name=name)


def verdict(*args, **kwargs) -> str:
    return judge([claim(*args, **kwargs)], N)[0].verdict


def spread(mean: float, width: float) -> np.ndarray:
    """N values evenly spread around a mean."""
    return mean + np.linspace(-width, width, N)


def test_a_claim_holds_fails_or_stays_undecided_by_where_its_interval_lies():
    assert verdict(spread(0.5, 0.2)) == "holds"
    assert verdict(spread(0.01, 0.01)) == "does not hold"
    assert verdict(spread(0.05, 0.2)) == "undecided"


def test_an_equivalence_claim_needs_its_whole_interval_below_the_margin():
    assert verdict(spread(0.0, 0.02), rule="below") == "holds"
    assert verdict(spread(0.2, 0.02), rule="below") == "does not hold"
    # A wide interval around 0 is no evidence of equivalence: failing to reject is not enough.
    assert verdict(spread(0.0, 0.5), rule="below") == "undecided"


def test_all_bars_must_be_cleared_and_the_one_that_is_not_is_shown():
    good = (Bar("at least", 0.5), spread(0.9, 0.1))
    bad = (Bar("at least", 10.0), spread(2.0, 0.5))
    both = judge([found(good, good)], N)[0]
    assert both.verdict == "holds"
    failed = judge([found(good, bad)], N)[0]
    assert failed.verdict == "does not hold"
    assert failed.effect == pytest.approx(2.0)
    assert failed.bar is bad[0]


def test_a_control_that_clears_the_threshold_too_is_told():
    holds, numbers = claim(spread(0.5, 0.2))
    for control, told in ((0.4, True), (0.05, True), (0.01, False), (None, False)):
        judged = judge([(holds, replace(numbers, control=control))], N)[0]
        assert (judged.verdict, ALSO_CONTROL in judged.note) == ("holds", told)
    fails, numbers = claim(spread(0.01, 0.01))
    assert judge([(fails, replace(numbers, control=0.4))], N)[0].note == ""


def test_a_ratio_of_means_is_judged_as_one():
    columns = np.stack([spread(0.8, 0.1), spread(0.08, 0.05)], 1)
    judged = judge([found((Bar("below", 0.25, second_over_first), columns))], N)[0]
    assert judged.effect == pytest.approx(0.1)
    assert judged.low < 0.1 < judged.high < 0.25
    assert judged.verdict == "holds"


def test_a_statistic_sees_the_axes_that_its_numbers_have():
    values_BLT = np.stack([spread(layer + 1, 0.1) for layer in range(6)], 1).reshape(N, 2, 3)
    judged = judge([found((Bar("above", 0.5, lambda means: means[..., 0, 0] / means[..., 1, 2]), values_BLT))], N)[0]
    assert judged.effect == pytest.approx(1 / 6)


def test_a_centred_interval_holds_its_effect_where_resampling_is_biased():
    """Minus the spread of variances that are all 1 in truth: every resample scatters more than the sample."""
    squares = np.random.default_rng(2).normal(size=(N, 40)) ** 2

    def agreement(means):
        return -np.log(means).std(-1)

    judged = judge([found((Bar("at least", -1.0, agreement, centred=True), squares))], N)[0]
    assert judged.low < judged.effect < judged.high
    # The control: as they are, the resamples all lie below it.
    assert judge([found((Bar("at least", -1.0, agreement), squares))], N)[0].high < judged.effect


def test_a_sequence_without_a_number_is_left_out():
    values = spread(0.5, 0.2)
    some = np.where(np.arange(N) % 4 == 0, np.nan, values)
    judged = judge([claim(some)], N)[0]
    assert judged.effect == pytest.approx(np.nanmean(some))
    assert judged.verdict == "holds"
    # The control: counted as 0, they would pull the mean down by a quarter.
    assert judge([claim(np.nan_to_num(some))], N)[0].effect == pytest.approx(0.75 * np.nanmean(some))
    nothing = judge([claim(np.full(N, np.nan))], N)[0]
    assert nothing.verdict == "undecided"
    assert np.isnan(nothing.effect)


def test_claims_without_numbers_keep_the_verdict_they_come_with():
    without = [(CLAIMS["sink"], Empty("why")), (CLAIMS["super_neurons"], Empty("why", "does not hold"))]
    judged = judge(without, N)
    assert [j.verdict for j in judged] == ["not applicable", "does not hold"]
    assert judged[0].effect is None
    assert judged[0].note == "why"


def test_a_statistic_that_is_never_defined_decides_nothing():
    nothing = Bar("below", 0.25, lambda m: m[..., 1] / m[..., 0] - m[..., 1] / m[..., 0])
    assert judge([found((nothing, np.tile([0.0, 1.0], (N, 1))))], N)[0].verdict == "undecided"


def test_the_same_number_in_every_sequence_has_no_sampling_error_only_if_it_is_read_from_weights():
    judged, numbers = claim(np.full(N, 0.3), threshold=0.25)
    exact = judge([(judged, replace(numbers, exact=True))], N)[0]
    assert (exact.verdict, exact.low, exact.high) == ("holds", exact.effect, exact.effect)
    # By hand: with 32 sequences alike, a share of 1 - 0.05^(1/32) = 8.9 % may give 0, and leave 0.273.
    sampled = judge([(judged, numbers)], N)[0]
    assert (sampled.verdict, sampled.low) == ("holds", pytest.approx(0.3 * 0.05 ** (1 / N), abs=1e-3))
    assert judge([claim(np.full(N, 0.26), threshold=0.25)], N)[0].verdict == "undecided"
    # More tokens behind each number exclude more.
    at_targets = (Bar("at least", 0.05, at_targets=True), np.zeros(N))
    assert judge([found(at_targets)], N, num_targets=1)[0].verdict == "undecided"
    assert judge([found(at_targets)], N, num_targets=3)[0].verdict == "does not hold"


@pytest.mark.parametrize("num_sequences", [16, 32])
def test_a_sink_in_few_sequences_is_seldom_said_to_be_none(num_sequences, monkeypatch):
    """5 of 32 sequences have it, in 36 to 49 % of heads, and so 6.6 % have it in truth, above the 5 % it is asked
    for."""
    random = np.random.default_rng(3)

    def wrong(rounds: int) -> float:
        verdicts = []
        for _ in range(rounds):
            has = random.random(num_sequences) < 5 / 32
            values = has * random.uniform(0.36, 0.49, num_sequences)
            verdicts.append(judge([claim(values)], num_sequences, largest=0.49)[0].verdict)
        return verdicts.count("does not hold") / rounds

    assert wrong(300) <= 0.01
    # The control: by the bootstrap alone the same is said to be no sink far more often.
    monkeypatch.setattr("sinkscope.studies.judging._unseen", lambda *arguments: None)
    assert num_sequences == 32 or wrong(200) > 0.03
    # Where no token of the study is a sink, a rate of 0 is told as that.
    monkeypatch.undo()
    assert judge([claim(np.zeros(num_sequences))], num_sequences, largest=0.02)[0].verdict == "does not hold"


def test_what_never_moves_is_not_said_to_be_above_zero():
    assert verdict(np.zeros(N), threshold=0.0, rule="above") == "undecided"
    assert verdict(np.full(N, 0.5), threshold=0.0, rule="above") == "holds"


def test_more_claims_make_each_interval_wider():
    alone = judge([claim(spread(0.5, 0.4), threshold=0.45)], N)[0]
    among = judge([claim(spread(0.5, 0.4), threshold=0.45, name=f"claim {n}") for n in range(20)], N)[0]
    assert among.high - among.low > alone.high - alone.low
    assert alone.confidence == pytest.approx(0.95)


def test_holm_steps_down_by_hand():
    # 0.01 <= 0.05 / 4; 0.013 <= 0.05 / 3; 0.04 > 0.05 / 2, so it and the next stay.
    rejected, levels = holm_levels([0.04, 0.01, 0.9, 0.013])
    assert rejected == [False, True, False, True]
    assert levels == pytest.approx([0.025, 0.0125, 0.025, 0.05 / 3])


def test_the_tail_is_that_of_a_t_interval():
    # n = 32, 95 %: t(31) = 2.0395 times sqrt(32 / 31) = 2.0722, and Phi(-2.0722) = 0.01912.
    assert bootstrap_tail(32, 0.95) == pytest.approx(0.01912, abs=2e-5)
    assert bootstrap_tail(100_000, 0.95) == pytest.approx(0.025, abs=1e-4)


def test_the_p_value_is_the_level_at_which_the_interval_just_excludes_the_threshold():
    resampled = np.sort(resample_weights(N) @ spread(0.5, 0.5))
    p_value = bootstrap_p_value(resampled, 0.4, N)
    for level, excluded in ((p_value * 0.9, False), (p_value * 1.1, True)):
        tail = bootstrap_tail(N, 1 - level)
        assert (np.quantile(resampled, tail) > 0.4) == excluded


# Coverage, simulated.

ROUNDS = 250
"""Their standard error is 1.4 points at 95 %."""


def rates(random, mean: float, *shape: int) -> np.ndarray:
    """Shares of 36 heads, the chance of each drawn anew for every sequence."""
    return random.binomial(36, random.beta(4 * mean, 4 * (1 - mean), shape)) / 36


def sides(random, before: float, after: float) -> np.ndarray:
    """[N, 2, 2] a rate before and after, of which one side of a norm leaves a tenth more."""
    first = rates(random, before, N)
    return np.stack([np.stack([first, rates(random, share, N)], 1) for share in (after, after + 0.1)], 1)


def products(random) -> np.ndarray:
    """[N, 2, 4] q . k of four heads, as it is and after a removal that takes 60 % away."""
    whole = random.normal([2.0, 1.0, 0.5, 3.0], 0.3, (N, 4))
    return np.stack([whole, 0.4 * whole + random.normal(0, 0.2, (N, 4))], 1)


KINDS_OF_BARS = {
    "a mean": (the_mean, lambda random: rates(random, 0.3, N), 0.3),
    "a skewed mean": (the_mean, lambda random: random.gamma(2.0, 0.1, N), 0.2),
    "a mean, mostly 0": (the_mean, lambda random: (random.random(N) < 0.1) * random.uniform(0.3, 0.5, N), 0.04),
    "a share left": (second_over_first, lambda random: sides(random, 0.6, 0.3)[:, 0], 0.5),
    "the least share left": (least_left, lambda random: sides(random, 0.6, 0.3), 0.5),
    "the most": (most, lambda random: sides(random, 0.2, 0.5)[:, 0], 0.5),
    "a share of q . k": (gone, products, 0.6),
    "a share through a mediator": (mediated, lambda random: random.normal([0.4, 0.1], 0.05, (N, 2)), 0.75),
    "the worst of some sets": (
        _least_over_first,
        lambda random: np.concatenate([rates(random, 0.6, N, 1), rates(random, 0.54, N, 3) - [0, -0.1, -0.2]], 1),
        0.9,
    ),
}


@pytest.mark.parametrize("name", KINDS_OF_BARS)
def test_the_intervals_of_each_kind_of_bar_cover_the_truth(name):
    statistic, drawn, truth = KINDS_OF_BARS[name]
    random, covered, naive = np.random.default_rng(5), 0, 0
    for _ in range(ROUNDS):
        judged = judge([found((Bar("at least", truth, statistic), drawn(random)))], N, largest=0.5)[0]
        middle, quarter = judged.effect, (judged.high - judged.low) / 4
        covered += judged.low <= truth <= judged.high
        naive += abs(middle - truth) <= quarter
    assert covered / ROUNDS >= 0.915
    # The control: intervals of half the width are told apart.
    assert naive / ROUNDS < 0.9


def test_all_verdicts_together_are_wrong_in_at_most_five_percent_of_studies():
    """Twelve claims whose truth lies at the threshold's edge: any decided verdict on the wrong side is an error."""
    random, wrong, undecided = np.random.default_rng(11), 0, 0
    for _ in range(400):
        shared = random.normal(0, 0.5, N)  # claims of one study share their sequences
        claims = [
            claim(0.05 + 0.1 * (shared + random.normal(0, 1, N)), name=name, threshold=0.05 + 1e-9)
            for name in list(CLAIMS)[:12]
        ]
        verdicts = [j.verdict for j in judge(claims, N)]
        wrong += "holds" in verdicts or "does not hold" in verdicts
        undecided += verdicts.count("undecided")
    assert wrong / 400 <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 400)
    assert undecided > 0


# The search for a minimal set, on set functions that are known.


def test_one_neuron_that_carries_the_sink_is_found_alone():
    found = minimal_set([5, 3, 8], lambda neurons: 0.0 if 3 in neurons else 1.0, lambda neurons: [], 0.2)  # type: ignore[arg-type]
    assert found == (3,)


def test_neurons_that_back_one_another_up_are_all_found():
    found = minimal_set(range(10), lambda neurons: 1.0 - len({2, 7} & set(neurons)) / 2, lambda neurons: [], 0.2)  # type: ignore[arg-type]
    assert found == (2, 7)


def test_a_backup_that_wakes_only_when_the_first_is_gone_is_found():
    woken = minimal_set([1], lambda u: 0.0 if {1, 9} <= set(u) else 1.0, lambda u: [9] if 1 in u else [], 0.2)  # type: ignore[arg-type]
    assert woken == (1, 9)
    # Control: where nothing wakes there is no set.
    assert minimal_set([1], lambda u: 0.0 if {1, 9} <= set(u) else 1.0, lambda u: [], 0.2) == ()  # type: ignore[arg-type]


def test_as_many_writers_are_taken_as_it_takes_and_none_where_all_are_not_enough():
    """Each of them carries a fortieth: 32 are the first power of 2 that leaves at most a fifth."""
    ranked: Any = tuple(range(64))
    assert shortest(ranked, lambda neurons: 1 - len(neurons) / 40, 0.2) == ranked[:32]
    # The last try is all of them.
    assert shortest(ranked[:33], lambda neurons: 1 - len(neurons) / 41, 0.2) == ranked[:33]
    assert shortest(ranked[:31], lambda neurons: 1 - len(neurons) / 40, 0.2) == ()


def test_no_neuron_of_a_minimal_set_can_be_put_back():
    needed = {0, 4, 11, 12, 30}
    weight = {neuron: 1 + neuron % 3 for neuron in needed}

    def remaining(neurons):
        return 1 - sum(weight.get(neuron, 0) for neuron in neurons) / sum(weight.values())

    found = minimal_set(range(40), remaining, lambda neurons: [], 0.2)  # type: ignore[arg-type]
    assert remaining(found) <= 0.2
    for neuron in found:
        assert remaining([other for other in found if other != neuron]) > 0.2


def test_a_bar_without_a_number_can_leave_a_claim_refuted_and_never_carries_it():
    good, bad, wide = ((Bar("at least", 0.5), spread(*values)) for values in ((0.9, 0.1), (0.1, 0.1), (0.5, 1)))
    marked = (Bar("at least", 0.5), Empty("a cell misses"))
    for bar, verdict in ((good, "not applicable"), (wide, "not applicable"), (bad, "does not hold")):
        for bars in ((bar, marked), (marked, bar)):
            judged = judge([found(*bars)], N)[0]
            assert judged.verdict == verdict
            assert "a cell misses" in judged.note
            assert (judged.effect is None) == (verdict == "not applicable")
    # Controls: with a number for each bar the first holds; without any there is nothing to judge.
    assert judge([found(good, good)], N)[0].verdict == "holds"
    assert judge([found(marked, marked)], N)[0].verdict == "not applicable"
    # What could have been refuted counts in Holm's family, whatever came of it; what has no number at all does not.
    other = claim(spread(0.06, 0.3), name="other")
    alone, beside = (judge([other, found(*bars)], N)[0].confidence for bars in ((marked,), (good, marked)))
    assert (alone, beside) == (pytest.approx(0.95), pytest.approx(0.975))


RETURNED = "see_self+variance_of_untouched"
KEPT = f"{RETURNED}+energy_of_see_self"
"""The two cells of `variance_is_what_matters`: with the energy that follows, and with its own energy kept."""
MIXED = ("untouched+variance_of_see_self", "untouched+energy_of_see_self")


@pytest.mark.parametrize(
    ("marked", "without_control", "not_judged"),
    [
        (None, set(), set()),
        ("see_self+energy_of_untouched", {"variance_is_what_matters"}, set()),
        ("untouched+energy_of_see_self", {"variance_suffices"}, set()),
        ("untouched+variance_of_see_self", set(), {"variance_suffices"}),
        (KEPT, set(), set()),
        (RETURNED, set(), set()),
    ],
)
def test_a_marked_cell_supports_nothing_and_is_no_control(marked, without_control, not_judged):
    """An ordinary token never rises; one that attends to one key keeps all of its rise, so other cells can refute."""
    found = judged_with(dict.fromkeys(MIXED, 0.0), marked)
    assert {claim for claim, judged in found.items() if judged.verdict == "not applicable"} == not_judged
    assert {c for c, j in found.items() if j.verdict != "not applicable" and j.control is None} == without_control
    judged = found["variance_is_what_matters"]
    assert judged.verdict == "does not hold"
    assert (f"not counted: {marked}" in judged.note) == (marked in (KEPT, RETURNED))


def test_other_ways_to_more_variance_speak_for_or_against_it():
    """One that raises none, and one that is marked, say nothing."""
    rises = {"scale_norm": 0.3, "random_direction": 0.01}
    scaled = "aggregation scaled (variance 30x) +30 points, for the claim"
    random = "a random deviation added (variance 30x) +1 points, against the claim"
    assert judged_with(rises, None)["variance_suffices"].note.endswith(f"variance: {scaled}; {random}")
    assert judged_with(rises, "scale_norm")["variance_suffices"].note.endswith(
        "variance: a random deviation added (variance 30x) +1 points, against the claim"
    )


def test_dropping_a_cell_makes_no_claim_hold():
    """One cell leaves nothing of the rise, as the claim says; the other is marked, or leaves all of it, or nothing."""
    one, both = {RETURNED: 0.0, "mean_of_itself": 0.0}, {RETURNED: 0.0, KEPT: 0.0, "mean_of_itself": 0.0}
    runs = judged_with(one, KEPT), judged_with(one, None), judged_with(both, None)
    verdicts = [found["variance_is_what_matters"].verdict for found in runs]
    assert verdicts == ["not applicable", "does not hold", "holds"]
    # The mean alone, which has no variance at all, refutes it by itself.
    assert judged_with({**both, "mean_of_itself": 0.2}, None)["variance_is_what_matters"].verdict == "does not hold"


def judged_with(rises: dict[str, float], marked: str | None) -> dict[str, Judgement]:
    """The claims about variance, by the rises of some cells, 0.2 in the others, and a marked cell."""
    study = study_of(lambda condition: rises.get(condition.label, 0.2), marked)
    claims = [CLAIMS[name] for name in ("variance_is_what_matters", "variance_suffices")]
    numbers = [(each, _numbers(each, study)) for each in claims]
    return {judged.id: judged for judged in judge(numbers, N, num_targets=3, largest=0.5)}


def study_of(rise: Callable[[Condition], float], marked: str | None = None, sides: tuple[bool, ...] = (False,)) -> Any:
    """Data of a study with one target, by the rise under each condition."""

    def supports(*conditions: Condition) -> None:
        if any(condition.label == marked for condition in conditions):
            raise MarkedError(marked)

    def at_targets(name, factor=None, held=None, **more) -> list[Condition]:
        return [Condition(name, 10, factor, held, **more)]

    def risen_B(conditions) -> np.ndarray:
        return np.full(N, rise(conditions[0]))

    def rise_B(*args, **kwargs) -> np.ndarray:
        supports(*at_targets(*args, **kwargs))
        return risen_B(at_targets(*args, **kwargs))

    return SimpleNamespace(
        plan=SimpleNamespace(targets=(10,)),
        sides=sides,
        supports=supports,
        at_targets=at_targets,
        risen_B=risen_B,
        rise_B=rise_B,
        times_the_variance=lambda name, factor: {"swap_deviation": 1.0}.get(name, 30.0),
        where="",
        by_side=lambda values: "",
    )


SIDED = {
    "variance_suffices": (("untouched+variance_of_see_self",), 0.3),
    "variance_is_what_matters": ((RETURNED, KEPT), 0.1),
}
"""Of each claim the conditions that it is judged by, and their number on the side that decides; 0.2 on the other."""


@pytest.mark.parametrize("decides", [True, False])
@pytest.mark.parametrize("name", SIDED)
def test_a_claim_and_its_control_are_of_the_side_of_a_norm_that_speaks_most_for_it(name, decides):
    """The control is 0.4 before the norm and 0.5 after it; a token that attends only to itself rises by 1, and by
    nothing with its mean alone."""
    judged_by, deciding = SIDED[name]

    def rise(condition: Condition) -> float:
        label = condition.label.removesuffix("+before_norm")
        if label in ("see_self", "mean_of_itself"):
            return float(label == "see_self")
        if label in judged_by:
            return deciding if condition.before_norm == decides else 0.2
        return 0.4 if condition.before_norm else 0.5

    study = study_of(rise, sides=(False, True))
    (judgement,) = judge([(CLAIMS[name], CLAIMS[name].numbers(study))], N, num_targets=3, largest=0.5)
    assert judgement.control == pytest.approx(0.4 if decides else 0.5)
    if name == "variance_is_what_matters":
        assert (judgement.verdict, judgement.effect) == ("holds", pytest.approx(deciding))
