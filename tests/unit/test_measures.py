"""Every measure against numbers worked out by hand and against its formula written again in float64 numpy.

Axes as in the measures: B sequences, L layers, H heads, T query position, S key position, D head size, C channels,
E width, N tokens, U neurons, M massive dimensions.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkscope.measures.dimension_disparity import (
    dom_ratio,
    effective_rank,
    effective_ranks,
    kurtosis,
    massive_dimensions,
    num_massive_activations,
    participation_ratio,
    top_energy_share,
)
from sinkscope.measures.directional_collapse import cosine_across_sequences, cosine_from_sum
from sinkscope.measures.sink_score import (
    LATER_QUERIES,
    are_sinks,
    eligible_positions,
    mean_received,
    mean_received_later,
    sink_rate,
)
from sinkscope.measures.super_neurons import channel_sparsity, write_share
from sinkscope.measures.value_variance import (
    averaging_law,
    log_r_squared,
    second_moment,
    value_variance,
    variance_ratio,
)

# The tensors of the tests are float64, where a sum of a few thousand terms is good to a dozen digits.
RELATIVE = 1e-11
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=40)


def close(found, expected, rtol=RELATIVE, atol=1e-12) -> None:
    np.testing.assert_allclose(np.asarray(found, dtype=np.float64), expected, rtol=rtol, atol=atol)


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def vectors(draw) -> np.ndarray:
    """[N, E] tokens of every kind that a residual stream shows: noise, one dimension huge, one alone, offset, tiny."""
    num_tokens, width, seed = draw(st.integers(1, 4)), draw(st.integers(2, 65)), draw(seeds)
    kind = draw(st.sampled_from(["noise", "outlier", "one_hot", "offset", "tiny", "sparse"]))
    random = np.random.default_rng(seed)
    h = random.normal(size=(num_tokens, width))
    if kind == "outlier":
        h[:, random.integers(width)] = 1e4 * random.choice([-1, 1])
    elif kind == "one_hot":
        h = np.zeros_like(h)
        h[:, random.integers(width)] = -3.5
    elif kind == "offset":
        h += 50
    elif kind == "tiny":
        h *= 1e-6
    elif kind == "sparse":
        h *= random.random(h.shape) < 0.3
        h[:, 0] = 1.0
    return h


# Dimension disparity


def test_disparity_worked_by_hand():
    # |h| = 1 2 3 10, mean 4; energy 1 + 4 + 9 + 100 = 114, fourth powers 1 + 16 + 81 + 10,000 = 10,098.
    h = double([1.0, -2.0, 3.0, -10.0])
    close(dom_ratio(h), 2.5)
    close(participation_ratio(h), 114**2 / 10_098)
    close(top_energy_share(h), 100 / 114)
    # Mean -2, deviations 3 0 5 -8: squares 9 0 25 64 (mean 24.5), fourth powers 81 0 625 4096 (mean 1200.5).
    close(kurtosis(h), 1200.5 / 24.5**2)


def test_disparity_of_a_basis_vector():
    # The state of a collapsed token: one dimension of E carries everything.
    h = torch.zeros(64, dtype=torch.float64)
    h[9] = -7.0
    close(dom_ratio(h), 64)
    close(participation_ratio(h), 1)
    close(top_energy_share(h), 1)
    # One of E values away from the rest: kurtosis (E^2 - 3E + 3) / (E - 1).
    close(kurtosis(h), (64**2 - 3 * 64 + 3) / 63)


def test_disparity_of_a_spread_vector_is_the_other_extreme():
    h = double([2.0, -2.0] * 16)
    close(dom_ratio(h), 1)
    close(participation_ratio(h), 32)
    close(top_energy_share(h), 1 / 32)
    close(kurtosis(h), 1)


def test_zero_and_constant_vectors():
    zero = torch.zeros(3, 8, dtype=torch.float64)
    for ratio in (dom_ratio, participation_ratio, top_energy_share, kurtosis):
        assert ratio(zero).isnan().all()
    constant = torch.full((2, 8), 0.5, dtype=torch.float64)
    close(kurtosis(constant), np.zeros(2))
    close(dom_ratio(constant), np.ones(2))
    close(participation_ratio(constant), np.full(2, 8.0))


@few
@given(vectors())
def test_disparity_equals_its_formulas(h):
    magnitude = np.abs(h)
    x = torch.from_numpy(h)
    close(dom_ratio(x), magnitude.max(-1) / magnitude.mean(-1))
    close(participation_ratio(x), (h**2).sum(-1) ** 2 / (h**4).sum(-1))
    close(top_energy_share(x), (h**2).max(-1) / (h**2).sum(-1))
    for token, found in zip(h, kurtosis(x).tolist(), strict=True):
        deviation = token - token.sum() / len(token)
        # Tokens far from 0 lose digits to the subtraction of their mean: 50 / 1, squared twice.
        close(found, (deviation**4).mean() / (deviation**2).mean() ** 2, rtol=1e-9)
    # Bounds that hold whatever the vector.
    width = h.shape[-1]
    assert (dom_ratio(x) <= width * (1 + 1e-12)).all()
    assert (dom_ratio(x) >= 1 - 1e-12).all()
    assert (participation_ratio(x) <= width * (1 + 1e-12)).all()
    assert (top_energy_share(x) * participation_ratio(x) >= 1 - 1e-9).all()


@few
@given(vectors(), st.floats(1e-3, 1e3))
def test_disparity_does_not_depend_on_scale(h, scale):
    for measure in (dom_ratio, participation_ratio, top_energy_share, kurtosis):
        close(measure(torch.from_numpy(h * scale)), measure(torch.from_numpy(h)).numpy(), rtol=1e-8)
    # Control: a massive activation is a matter of scale, which is why it is never read alone.
    outlier = torch.tensor([1e4, 0.1, 0.1])
    assert num_massive_activations(outlier, torch.tensor(0.1)) == 1
    assert num_massive_activations(outlier * 1e-4, torch.tensor(1e-5)) == 0


def test_float32_keeps_an_outlier_of_1e4():
    """Fourth powers of 1e4 are 1e16, beyond float32's digits but not its range: six digits must be left."""
    h = np.random.default_rng(0).normal(size=(5, 300))
    h[:, 17] = 1e4
    x, exact = torch.from_numpy(h).float(), torch.from_numpy(h)
    for measure in (dom_ratio, participation_ratio, top_energy_share, kurtosis):
        close(measure(x), measure(exact).numpy(), rtol=1e-5)


def test_constant_vectors_have_no_kurtosis_whatever_the_value():
    for width in (7, 48, 300):
        assert float(kurtosis(torch.full((width,), 0.1))) == 0


@pytest.mark.parametrize("size", [1e-12, 1e10])
def test_float32_keeps_measures_without_scale_at_any_size(size):
    h = torch.tensor([1.0, -2.0, 3.0, -10.0])
    close(participation_ratio(h * size), 114**2 / 10_098, rtol=1e-5)
    close(kurtosis(h * size), 1200.5 / 24.5**2, rtol=1e-5)


def test_massive_activations_worked_by_hand():
    # Median 0.1: above 100 and above 0.1 * 1000 = 100. 100 itself is not above.
    h = double([[150.0, -150.0, 100.0, 0.1], [99.0, 0.1, 0.1, 0.1]])
    assert num_massive_activations(h, torch.tensor(0.1)).tolist() == [2, 0]
    # Median 0.2 asks for more than 200; median 0.01 asks for 10, but 100 stays the least.
    assert num_massive_activations(h, torch.tensor(0.2)).tolist() == [0, 0]
    assert num_massive_activations(h, torch.tensor(0.01)).tolist() == [2, 0]


def test_massive_dimensions_need_ratio_and_contrast():
    # Width 100, all 1 but dimension 3; the position's mean is (99 + v) / 100, so v = 11 gives 10 exactly.
    here = torch.ones(4, 100, dtype=torch.float64)
    here[:, 3] = double([11.0, 10.9, 11.0, 11.0])
    elsewhere = torch.ones(4, 100, dtype=torch.float64)
    elsewhere[:, 3] = double([1.0, 1.0, 5.0, 11 / 3])
    massive, ratio, contrast = massive_dimensions(here, elsewhere)
    # Row 0 has both; row 1 falls short of the ratio; row 2 is large elsewhere too; row 3 has a contrast of 3 exactly.
    assert massive.nonzero().tolist() == [[0, 3], [3, 3]]
    close(ratio[:, 3], [10.0, 10.9 / 1.099, 10.0, 10.0])
    close(contrast[:, 3], [11.0, 10.9, 2.2, 3.0])
    close(ratio.mean(-1), np.ones(4))


def test_effective_rank_of_known_singular_values():
    close(effective_rank(torch.eye(7)), 7)
    close(effective_rank(3 * torch.eye(5, 9)), 5)
    close(effective_rank(torch.outer(torch.arange(1.0, 6), torch.ones(4))), 1, rtol=1e-6)
    # Singular values 3, 2, 1, hidden by rotations on both sides: entropy of 1/2, 1/3, 1/6.
    random = np.random.default_rng(0)
    left, right = (np.linalg.qr(random.normal(size=(size, size)))[0][:, :3] for size in (20, 12))
    entropy = -sum(p * math.log(p) for p in (1 / 2, 1 / 3, 1 / 6))
    matrix = torch.from_numpy(left @ np.diag([3.0, 2.0, 1.0]) @ right.T)
    close(effective_rank(matrix), math.exp(entropy), rtol=1e-9)
    # Control: squared singular values, which a Gram matrix would give, make another number.
    energy = np.array([9, 4, 1]) / 14
    assert abs(math.exp(-(energy * np.log(energy)).sum()) - effective_rank(matrix)) > 0.1


def test_effective_rank_keeps_directions_far_below_a_massive_one():
    values = np.array([1e6, 1.0, 1.0, 1.0])
    weights = values / values.sum()
    expected = math.exp(-(weights * np.log(weights)).sum())
    close(effective_rank(torch.diag(torch.from_numpy(values)).float()), expected, rtol=1e-9)
    assert effective_rank(torch.diag(torch.from_numpy(values))) > 1 + 1e-5


@pytest.mark.parametrize("shape", [(300, 40), (40, 300)])
@pytest.mark.parametrize("massive", [0.0, 1e3, 1e6, 1e9])
def test_effective_rank_beside_a_massive_dimension_is_that_of_the_singular_values(shape, massive):
    tokens = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -3, shape[1])
    tokens[::16, 3] += massive
    values = torch.linalg.svdvals(tokens.double()).numpy()
    weights = values / values.sum()
    close(effective_rank(tokens), math.exp(-(weights * np.log(weights)).sum()), rtol=1e-4 if massive > 1e3 else 1e-9)
    # Without the massive tokens nothing is left of them, not even their rounding.
    apart = torch.zeros(len(tokens), dtype=torch.bool)
    apart[::16] = True
    whole, rest = effective_ranks(tokens, apart)
    close(whole, effective_rank(tokens), rtol=1e-4 if massive > 1e3 else 1e-9)
    close(rest, effective_rank(tokens[~apart]), rtol=1e-9)


def test_effective_rank_is_not_centred():
    tokens = torch.ones(6, 4) + 1e-6 * torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    assert effective_rank(tokens) < 1.001
    assert effective_rank(tokens.double() - tokens.double().mean(0)) > 2  # control


@few
@given(st.integers(1, 12), st.integers(1, 12), seeds)
def test_effective_rank_lies_between_one_and_the_smaller_side(num_tokens, width, seed):
    x = np.random.default_rng(seed).normal(size=(num_tokens, width))
    values = np.linalg.svd(x, compute_uv=False)
    weights = values / values.sum()
    found = effective_rank(torch.from_numpy(x))
    close(found, np.exp(-(weights * np.log(weights)).sum()), rtol=1e-9)
    assert 1 - 1e-9 <= found <= min(num_tokens, width) + 1e-9


# Directional collapse


def test_cosine_worked_by_hand():
    # Position 0: one direction at any length; 1: three directions 120 degrees apart; 2: one pair opposed.
    third = 2 * math.pi / 3
    state = double(
        [
            [[2.0, 0.0], [1.0, 0.0], [1.0, 0.0]],
            [[0.1, 0.0], [math.cos(third), math.sin(third)], [-5.0, 0.0]],
            [[9.0, 0.0], [math.cos(third), -math.sin(third)], [0.0, 3.0]],
        ]
    )
    close(cosine_across_sequences(state), [1.0, -0.5, -1 / 3])
    # Control: averaging in each sequence's cosine with itself would give 1, 0 and 1/9.
    unit = state / state.norm(dim=-1, keepdim=True)
    itself = torch.einsum("bte,cte->t", unit, unit) / 9
    close(itself, [1.0, 0.0, 1 / 9])


@few
@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 20), seeds)
def test_cosine_is_the_mean_over_pairs(num_sequences, length, width, seed):
    state = np.random.default_rng(seed).normal(size=(num_sequences, length, width)) + 0.3
    expected = np.zeros(length)
    for t in range(length):
        pairs = [
            state[b, t] @ state[c, t] / np.linalg.norm(state[b, t]) / np.linalg.norm(state[c, t])
            for b in range(num_sequences)
            for c in range(b)
        ]
        expected[t] = np.mean(pairs)
    close(cosine_across_sequences(torch.from_numpy(state)), expected, atol=1e-10)
    unit = torch.nn.functional.normalize(torch.from_numpy(state), dim=-1)
    close(cosine_from_sum(unit.sum(0), torch.full((length,), num_sequences)), expected, atol=1e-10)


def test_cosine_of_a_single_sequence_is_nan():
    assert cosine_across_sequences(torch.randn(1, 5, 3)).isnan().all()


@few
@given(st.integers(2, 6), st.integers(0, 4), seeds)
def test_cosine_leaves_out_states_of_zeros(num_sequences, num_zeros, seed):
    state = np.random.default_rng(seed).normal(size=(num_sequences, 1, 5))
    whole = np.concatenate([state, np.zeros((num_zeros, 1, 5))])
    expected = cosine_across_sequences(torch.from_numpy(state))
    close(cosine_across_sequences(torch.from_numpy(whole)), expected, atol=1e-10)
    unit = torch.nn.functional.normalize(torch.from_numpy(whole), dim=-1)
    close(cosine_from_sum(unit.sum(0), torch.tensor([num_sequences])), expected, atol=1e-10)
    if num_zeros:  # control: with the zeros counted as directions it is another number
        assert not np.allclose(cosine_from_sum(unit.sum(0), torch.tensor([len(whole)])), expected)


# Sink score


def planted_attention(length: int, share: float = 0.6) -> np.ndarray:
    """[T, S] every query gives `share` to key 0 and the rest to itself; query 0 gives all to itself."""
    attention = np.zeros((length, length))
    attention[:, 0] = share
    attention[range(length), range(length)] += 1 - share
    return attention


def test_attention_received_worked_by_hand():
    length = 20
    received = planted_attention(length).sum(0)
    alpha = mean_received(torch.from_numpy(received))
    # Key 0: (1 + 19 * 0.6) / 20. Key k: 0.4 from itself, over the length - k queries that see it.
    close(alpha, [(1 + 19 * 0.6) / 20, *(0.4 / (length - k) for k in range(1, length))])
    # Control: dividing by the length, whatever the key, makes the last keys look small and gives another number.
    assert abs(float(alpha[-1]) - received[-1] / length) > 0.3


def test_attention_received_of_chosen_keys():
    received = torch.from_numpy(planted_attention(20).sum(0))
    keys = torch.tensor([0, 7, 19])
    close(mean_received(received[keys], keys, 20), mean_received(received)[keys].numpy())


@few
@given(st.integers(1, 24), seeds)
def test_attention_received_is_a_mean_over_the_queries_that_see_the_key(length, seed):
    attention = np.tril(np.random.default_rng(seed).random((2, 3, length, length)))
    attention /= attention.sum(-1, keepdims=True)
    expected = np.empty((2, 3, length))
    for key in range(length):
        expected[..., key] = attention[..., key:, key].mean(-1)
    alpha = mean_received(torch.from_numpy(attention.sum(-2)))
    close(alpha, expected)
    assert (alpha <= 1 + 1e-12).all()


def test_eligible_positions_have_sixteen_later_queries():
    eligible = eligible_positions(64)
    assert eligible.nonzero().flatten().tolist() == list(range(48))
    for key in range(64):
        assert bool(eligible[key]) == (len(range(key + 1, 64)) >= LATER_QUERIES)
    assert not eligible_positions(LATER_QUERIES).any()


def test_a_sink_has_one_head_in_twenty_and_enough_later_queries():
    rate = torch.tensor([0.05, 0.049, 1.0, 0.2] + 16 * [1.0])
    assert are_sinks(rate).tolist() == [True, False, True, True] + 16 * [False]
    keys = torch.tensor([0, 1, 4])
    assert are_sinks(rate[keys], len(rate), keys).tolist() == [True, False, False]
    assert eligible_positions(LATER_QUERIES + 1).tolist() == [True] + [False] * LATER_QUERIES


def test_control_the_last_key_looks_like_a_sink_and_is_none():
    # Every query attends to itself alone, so the last key has alpha 1, and each key its share 1 / (T - k).
    alpha = mean_received(torch.eye(64, dtype=torch.float64).sum(0))
    assert float(alpha[-1]) == 1
    counted = alpha > 0.3
    assert counted.any()
    assert not (counted & eligible_positions(64)).any()


def test_sink_rate_worked_by_hand():
    # 2 sequences, 1 layer, 2 heads: key 0 is counted by 3 of 4, key 1 by 1 of 4; 0.3 itself does not count.
    alpha = double([[[[0.9, 0.3], [0.31, 0.1]]], [[[0.2, 0.1], [0.4, 0.5]]]])
    close(sink_rate(alpha), [0.75, 0.25])
    close(sink_rate(alpha, threshold=0.35), [0.5, 0.25])
    # Control: thresholding the mean attention instead of counting heads gives both keys another verdict.
    close((alpha.mean(dim=(0, 1, 2)) > 0.3).double(), [1.0, 0.0])


def test_sink_rate_of_the_planted_attention():
    alpha = mean_received(torch.from_numpy(planted_attention(64)).sum(0)).expand(3, 2, 4, 64)
    rate = sink_rate(alpha)
    assert rate[eligible_positions(64)].tolist() == [1.0] + [0.0] * 47
    assert sink_rate(alpha, threshold=0.7)[0] == 0


@few
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), seeds)
def test_sink_rate_counts(num_sequences, num_layers, num_heads, length, seed):
    alpha = np.random.default_rng(seed).random((num_sequences, num_layers, num_heads, length))
    expected = [
        sum(value > 0.3 for value in alpha[..., key].ravel()) / (num_sequences * num_layers * num_heads)
        for key in range(length)
    ]
    close(sink_rate(torch.from_numpy(alpha)), expected, rtol=1e-6)  # the mean is taken in float32


# Super neurons


def test_write_share_worked_by_hand():
    # Neuron 0 writes 2^2 * (3^2 + 0) = 36, neuron 1 writes 1 * (0 + 2^2) = 4, neuron 2 nothing.
    share = write_share(double([4.0, 1.0, 100.0]), double([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]]))
    close(share, [0.9, 0.1, 0.0])
    # Control: by activation alone neuron 2 would lead.
    assert write_share(double([4.0, 1.0, 100.0]), torch.ones(2, 3, dtype=torch.float64)).argmax() == 2


def test_write_share_of_no_write_is_zero():
    close(write_share(torch.zeros(3), torch.ones(2, 3)), np.zeros(3))


@few
@given(st.integers(1, 5), st.integers(1, 30), seeds)
def test_write_share_equals_its_formula(num_dimensions, num_neurons, seed):
    random = np.random.default_rng(seed)
    activation, output = random.normal(size=(6, num_neurons)), random.normal(size=(num_dimensions, num_neurons))
    writes = (activation[:, None, :] * output) ** 2  # every token, dimension and neuron
    share = write_share(torch.from_numpy((activation**2).mean(0)), torch.from_numpy(output))
    close(share, writes.sum((0, 1)) / writes.sum())
    close(share.sum(), 1)


def test_channel_sparsity_worked_by_hand():
    # Neuron 0 writes 100 into dimension 2 and 1 into the others; neuron 1 writes the same everywhere.
    output = torch.ones(5, 2, dtype=torch.float64)
    output[2, 0] = -100.0
    sparsity = channel_sparsity(output)
    close(sparsity.max_over_median, [100.0, 1.0])
    close(sparsity.top_share, [1e4 / (1e4 + 4), 0.2])
    close(sparsity.participation_ratio, [(1e4 + 4) ** 2 / (1e8 + 4), 5.0])
    # One of five away from four equals: (25 - 15 + 3) / 4; a constant vector has none.
    close(sparsity.kurtosis, [13 / 4, 0.0])


@few
@given(st.integers(0, 6), st.integers(1, 7), seeds)
def test_channel_sparsity_equals_its_formulas(half, num_neurons, seed):
    output = np.random.default_rng(seed).standard_t(2, size=(2 * half + 3, num_neurons))  # an odd width has one median
    sparsity = channel_sparsity(torch.from_numpy(output))
    magnitude = np.abs(output)
    close(sparsity.max_over_median, magnitude.max(0) / np.median(magnitude, axis=0))
    close(sparsity.top_share, (output**2).max(0) / (output**2).sum(0))
    close(sparsity.participation_ratio, (output**2).sum(0) ** 2 / (output**4).sum(0))
    deviation = output - output.mean(0)
    close(sparsity.kurtosis, (deviation**4).mean(0) / (deviation**2).mean(0) ** 2, rtol=1e-9)


# Value variance


def test_value_variance_worked_by_hand():
    # Two sequences, one position, channels (1, 5) and (0, 0): (1 - 3)^2 + (5 - 3)^2 = 8, over 1, and 0; mean 4.
    aggregation = double([[[1.0, 7.0]], [[5.0, 7.0]]])
    close(value_variance(aggregation), [4.0])
    close(second_moment(aggregation), [(1 + 49 + 25 + 49) / 4])
    # Control: dividing by B, not B - 1, gives half.
    close(aggregation.var(dim=0, correction=0).mean(-1), [2.0])


def test_later_queries_alone_leave_out_the_token_itself():
    attention = torch.tensor([[1.0, 0, 0], [0.4, 0.6, 0], [0.2, 0.5, 0.3]])
    found = mean_received_later(attention.sum(0), attention.diagonal())
    torch.testing.assert_close(found[:2], torch.tensor([0.3, 0.5]))
    # The control: with the token itself its own weight counts.
    torch.testing.assert_close(mean_received(attention.sum(0))[:2], torch.tensor([1.6 / 3, 0.55]))


def test_value_variance_where_there_is_none():
    assert value_variance(torch.randn(1, 4, 3)).isnan().all()
    same = torch.randn(1, 4, 3, dtype=torch.float64).expand(5, 4, 3)
    close(value_variance(same), np.zeros(4), atol=1e-30)
    assert (second_moment(same) > 0).all()  # the second moment is there in every case


@few
@given(st.integers(2, 6), st.integers(1, 5), st.integers(1, 9), seeds)
def test_value_variance_equals_its_formula(num_sequences, length, num_channels, seed):
    aggregation = np.random.default_rng(seed).normal(size=(num_sequences, length, num_channels)) * 3 + 1
    expected = np.zeros(length)
    for t in range(length):
        for c in range(num_channels):
            values = aggregation[:, t, c]
            expected[t] += ((values - values.mean()) ** 2).sum() / (num_sequences - 1) / num_channels
    close(value_variance(torch.from_numpy(aggregation)), expected)
    close(second_moment(torch.from_numpy(aggregation)), (aggregation**2).mean((0, 2)))


def test_averaging_law_of_uniform_attention_falls_as_one_over_t():
    # Values with variance 2 in both sequences' one channel, a_ts = 1 / (t + 1): the sum is 2 / (t + 1).
    length = 8
    attention = torch.ones(length, length, dtype=torch.float64).tril()
    attention = (attention / attention.sum(-1, keepdim=True)).expand(2, 1, length, length)
    value = double([1.0, -1.0]).view(2, 1, 1, 1).expand(2, 1, length, 1)
    close(averaging_law(attention, value), 2 / np.arange(1, length + 1))
    # Control: with the weights themselves in place of their squares there is no fall at all.
    close(attention.sum(-1).mean((0, 1)) * 2, np.full(length, 2.0))


@few
@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 6), st.integers(1, 4), seeds)
def test_averaging_law_equals_its_formula(num_sequences, num_heads, length, head_size, seed):
    random = np.random.default_rng(seed)
    attention = np.tril(random.random((num_sequences, num_heads, length, length)))
    value = random.normal(size=(num_sequences, num_heads, length, head_size))
    expected = np.zeros(length)
    for t in range(length):
        for h in range(num_heads):
            for s in range(length):
                squared = np.mean(attention[:, h, t, s] ** 2)
                variance = np.mean([np.var(value[:, h, s, d], ddof=1) for d in range(head_size)])
                expected[t] += squared * variance / num_heads
    close(averaging_law(torch.from_numpy(attention), torch.from_numpy(value)), expected)


def test_averaging_law_predicts_the_variance_of_independent_values():
    """4,000 sequences: the sampling error of a variance is about 2 %."""
    generator = torch.Generator().manual_seed(0)
    attention = torch.rand(1, 1, 6, 6, generator=generator, dtype=torch.float64).tril()
    attention = attention / attention.sum(-1, keepdim=True)
    value = torch.randn(4000, 1, 6, 5, generator=generator, dtype=torch.float64)
    aggregation = (attention @ value).squeeze(1)
    law = averaging_law(attention.expand(4000, 1, 6, 6), value)
    close(value_variance(aggregation), law.numpy(), rtol=0.1)
    # Control: values that are alike at every position keep all their variance, and the law does not hold.
    alike = value[:, :, :1].expand_as(value)
    ratio = value_variance((attention @ alike).squeeze(1)) / averaging_law(attention.expand(4000, 1, 6, 6), alike)
    assert ratio[3:].min() > 2


def test_variance_ratio_worked_by_hand():
    close(variance_ratio(double([8.0, 1.0, 3.0, 1.0])), 4.0)
    close(variance_ratio(double([8.0, 1.0, 100.0, 3.0, 1.0])), 4.0)  # the later half of five is the last two
    close(variance_ratio(double([[6.0, 2.0], [1.0, 4.0]])), [3.0, 0.25])


def test_log_r_squared_worked_by_hand():
    observed = double([1.0, math.e, math.e**2])  # logs 0 1 2, squares about their mean 2
    close(log_r_squared(observed, observed), 1.0)
    close(log_r_squared(observed, double([math.e] * 3)), 0.0)  # the mean explains nothing
    close(log_r_squared(observed, observed * math.e), 1 - 3 / 2)  # nothing is fitted: a factor e costs 1 each
    close(log_r_squared(observed, double([1.0, math.e, math.e])), 0.5)


@few
@given(st.integers(2, 20), seeds)
def test_log_r_squared_equals_its_formula(length, seed):
    random = np.random.default_rng(seed)
    observed, predicted = np.exp(random.normal(size=(2, 3, length)))
    expected = 1 - ((np.log(observed) - np.log(predicted)) ** 2).sum(-1) / (
        (np.log(observed) - np.log(observed).mean(-1, keepdims=True)) ** 2
    ).sum(-1)
    close(log_r_squared(torch.from_numpy(observed), torch.from_numpy(predicted)), expected, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_measures_keep_the_dtype_they_are_given(dtype):
    h = torch.randn(2, 5, 8, dtype=dtype)
    for measure in (dom_ratio, participation_ratio, top_energy_share, kurtosis, value_variance, second_moment):
        assert measure(h).dtype == dtype
