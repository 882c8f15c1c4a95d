"""Models whose bias is known: none where nothing is asymmetric, and the number worked out by hand where it is planted.

Tokens come in opposite pairs, so states that are an odd function of the last token have mean zero over the vocabulary.
Every sequence of the population ends with another token: measures over it are exact, not estimates.
"""

import math

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from sinkscope.errors import InputError
from sinkscope.initial_bias.bias import bias
from sinkscope.initial_bias.measurement import measure_bias, preference_correlation, sample_interval
from sinkscope.measures.token_preference import uniform_entropy
from sinkscope.models.given_ids import given_batch
from sinkscope.models.loading import load
from sinkscope.models.token_batches import TokenBatch, token_batch
from sinkscope.statistics import rank_correlation

V, E, LENGTH = 64, 24, 5


def paired_tokens(seed: int) -> torch.Tensor:
    """[V, E] unit vectors in opposite pairs, orthogonal to the vector of ones and to the direction of the push."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(V // 2, E, generator=generator)
    half[:, -2:] = 0  # what lies in the plane of the push
    half[:, :-2] -= half[:, :-2].mean(1, keepdim=True)  # a layer norm then only scales
    half = torch.nn.functional.normalize(half, dim=-1)
    return torch.cat([half, -half])


def push_direction() -> torch.Tensor:
    """A unit vector orthogonal to all tokens, and to the vector of ones."""
    direction = torch.zeros(E)
    direction[-2:] = torch.tensor([0.5**0.5, -(0.5**0.5)])
    return direction


def planted(activation: str = "tanh", feed_forward: float = 0.0, push: float = 0.0, head: float = 0.0, seed: int = 0):
    """A GPT-2 without positions or attention. `feed_forward` is the size of its random feed-forward, `push` what every
    token is pushed by along one direction, and `head` how strongly token 7 reads that direction."""
    config = GPT2Config(
        vocab_size=V, n_embd=E, n_layer=2, n_head=2, n_positions=16, activation_function=activation,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, layer_norm_epsilon=1e-12,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.transformer.wte.weight.copy_(paired_tokens(seed))
        model.transformer.wpe.weight.zero_()
        for block in model.transformer.h:
            block.attn.c_proj.weight.zero_()
            block.mlp.c_fc.weight.copy_(torch.randn(E, 4 * E, generator=generator))
            block.mlp.c_proj.weight.copy_(feed_forward * torch.randn(4 * E, E, generator=generator))
        model.transformer.h[1].mlp.c_proj.bias.copy_(push * push_direction())
        model.lm_head.weight.zero_()
        model.lm_head.weight[7] = head * push_direction()
        if not head:
            model.lm_head.weight.copy_(model.transformer.wte.weight)
    return load(model)


def population() -> TokenBatch:
    """Sequences that end with each token once; what goes before is random."""
    ids = torch.randint(V, (V, LENGTH), generator=torch.Generator().manual_seed(2))
    ids[:, -1] = torch.arange(V)
    return given_batch(ids)


def test_an_odd_activation_without_attention_has_no_bias():
    # Opposite tokens have opposite states, whose sum is zero: all pairs add up to -N / 2.
    strong = measure_bias(planted("tanh", feed_forward=0.1), population())
    assert strong.contraction.inter_SN.mean(-1) == pytest.approx(-1 / (V - 1), abs=1e-5)
    # A weaker feed-forward leaves each token the nearest to its own state. (A strong one is a random map of V tokens to
    # V tokens, under which some have several that lead to them: a preference, but none of a direction.)
    loaded = planted("tanh", feed_forward=0.01)
    exact = measure_bias(loaded, population())
    assert exact.values["entropy"].mean() == pytest.approx(math.log(V), abs=1e-9), "each token predicts itself"
    # And on random sequences every number is one that chance gives: intervals at 95 % hold it that often.
    expected = {"inter_cosine": 0, "intra_cosine": 0, "entropy_deficit": 0, "probability_ratio": 1}
    held = dict.fromkeys(expected, 0)
    for seed in range(30):
        sampled = measure_bias(loaded, token_batch(loaded, length=LENGTH, num_sequences=128, seed=seed))
        for quantity, value in expected.items():
            low, high = sample_interval(sampled.values[quantity])
            held[quantity] += int(low <= value <= high)
    assert min(held.values()) >= 25, held


def test_control_an_asymmetric_activation_has_one():
    loaded = planted("relu", feed_forward=0.1)
    assert measure_bias(loaded, population()).values["inter_cosine"].mean() > 0.2
    sampled = measure_bias(loaded, token_batch(loaded, length=LENGTH, num_sequences=256))
    assert sample_interval(sampled.values["inter_cosine"])[0] > 0.1
    assert sample_interval(sampled.values["entropy_deficit"])[0] > 0.1
    assert sampled.contraction.split_half_S[-1] > 0.9


def test_a_rank_one_push_gives_the_numbers_worked_out_by_hand():
    c, a = 0.7, 1.3
    found = measure_bias(planted(push=c, head=a), population())
    # States e + c d, with e . d = 0 and the mean of e . e' over pairs -1 / (V - 1).
    inter = (c**2 - 1 / (V - 1)) / (1 + c**2)
    expected_S = [-1 / (V - 1)] * 4 + [inter]  # the push stands in the feed-forward of the last layer
    assert found.contraction.inter_SN.mean(-1) == pytest.approx(expected_S, abs=1e-6)
    assert found.contraction.alignment_S[-1] == pytest.approx(1, abs=1e-6)
    assert found.contraction.top_share_S[-1] == pytest.approx(c**2 / (1 + c**2), abs=1e-6)
    assert found.contraction.mean_state_SE[-1] == pytest.approx(
        (push_direction() * c / math.sqrt(1 + c**2)).numpy(), abs=1e-6
    )
    # The last norm makes states of size sqrt(E), of which the share c / sqrt(1 + c^2) lies along d.
    logit = a * c / math.sqrt(1 + c**2) * math.sqrt(E)
    probability = math.exp(logit) / (math.exp(logit) + V - 1)
    assert found.values["probability_ratio"] == pytest.approx(V * probability, rel=1e-5)
    assert found.values["prediction_ratio"].tolist() == [V] * V
    assert found.values["entropy"].mean() == 0
    assert found.values["entropy_deficit"].mean() == pytest.approx(uniform_entropy(V, V))
    assert found.preferred_K[0] == 7
    assert found.predicted_share_K[0] == 1


def test_controls_find_what_was_planted():
    """The feed-forward is the cause, and neither attention nor the spread of the values has a part in it."""
    loaded = planted("relu", feed_forward=0.1)
    result = bias(loaded, num_sequences=256, length=LENGTH)
    change = {
        name: entry["inter_cosine"] for name, entry in result.summary["controls"].items() if "refused" not in entry
    }
    for name in ("tanh_activation", "odd_feed_forward", "no_feed_forward"):
        assert change[name]["difference_high"] < -0.1, name
        assert abs(change[name]["value"]) < 0.05, name
    assert change["no_attention"]["difference"] == pytest.approx(0, abs=1e-6)
    assert abs(change["redrawn_embeddings"]["difference"]) < 0.3
    assert result.summary["prefers_tokens"] is True
    assert "removed" in result.story or "odd" in result.story


def test_attention_that_averages_is_found_by_its_own_control():
    """Values that are copied and averaged bring positions together, which rescaling them does not undo."""
    loaded = planted()
    with torch.no_grad():
        for block in loaded.model.transformer.h:
            block.attn.c_attn.weight.zero_()
            block.attn.c_attn.weight[:, 2 * E :] = torch.eye(E)
            block.attn.c_proj.weight.copy_(2 * torch.eye(E))
    result = bias(
        loaded, num_sequences=64, length=16, controls=["no_attention", "no_feed_forward", "calibrated_variance"]
    )
    intra = {name: entry["intra_cosine"] for name, entry in result.summary["controls"].items()}
    assert intra["no_attention"]["difference_high"] < -0.2
    assert intra["no_feed_forward"]["difference"] == pytest.approx(0, abs=1e-6)
    rows = result.tables["contraction"]
    added = [
        (part, value) for part, value in zip(rows["part"], rows["intra_added"], strict=True) if part != "embeddings"
    ]
    assert all(value > 0.05 for part, value in added if part == "attention")
    assert all(abs(value) < 1e-6 for part, value in added if part == "feed_forward")
    # Uniform averaging of independent values: variance 1 / (t + 1) of position 0's in layer 0.
    positions = result.tables["contraction_positions"]
    variance = [v for v, layer in zip(positions["value_variance"], positions["layer"], strict=True) if layer == 0]
    assert np.array(variance) / variance[0] == pytest.approx(1 / np.arange(1, 17), rel=0.35)
    cosine = [v for v, layer in zip(positions["inter"], positions["layer"], strict=True) if layer == 0]
    assert result.summary["variance_link"][0] == pytest.approx(rank_correlation(np.array(variance), np.array(cosine)))


def test_agreement_is_a_preference_and_not_the_same_answer_to_the_same_sequence():
    models = planted("tanh"), planted("tanh", seed=5), planted("relu", feed_forward=0.1)
    one, other, biased = (measure_bias(model, token_batch(model, length=LENGTH, num_sequences=96)) for model in models)
    assert biased.ceiling.correlation > 0.8
    low, high = sample_interval(biased.ceiling.values)
    assert low < biased.ceiling.correlation < high
    assert biased.ceiling.values.mean() == pytest.approx(biased.ceiling.correlation)
    # Two unrelated models that copy their last token prefer none; on the same sequences they only seem to agree.
    assert abs(preference_correlation(one, other)) < 0.35
    assert rank_correlation(one.probability_V, other.probability_V) > 0.6


def test_weights_that_are_not_numbers_and_too_few_sequences_are_refused():
    loaded = planted()
    with pytest.raises(InputError, match="`num_sequences` must be at least 16"):
        bias(loaded, num_sequences=8, length=LENGTH)
    with pytest.raises(InputError, match="`seeds` is for a configuration"):
        bias(loaded, seeds=4)
    loaded.model.transformer.h[0].mlp.c_fc.weight.data[0, 0] = math.nan
    with pytest.raises(InputError, match="NaN in"):
        bias(loaded.model)
    with pytest.raises(InputError, match="NaN or infinity in what leaves layer 0"):
        measure_bias(loaded, population())
