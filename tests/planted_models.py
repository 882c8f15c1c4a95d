"""Tiny Llama models whose weights are set by hand: one with the whole sink chain, and decoys that lack a link of it.

A token is written in slots, each a direction of the residual stream: a constant, a unit vector of its own (the code),
noise. The basis of the slots is random, so that nothing is aligned with a dimension but the massive one. Attention of
the first layers is nearly uniform: it averages codes, and keeps the constant. The chain, layer by layer:

0  attention writes the mean of the constant, and the mean of the codes (the deviation): of length 1 at position 0,
   1 / sqrt(t + 1) at position t
1  attention writes both once more, into other slots; ordinary units write
   OPENING ~ (deviation of layer 0) . (deviation of layer 1) - threshold * (mean of layer 0) (mean of layer 1),
   which is positive at position 0 only, keeps its sign when the aggregation is scaled, and asks that the deviations of
   two layers agree
2  the super neuron opens where OPENING is positive, and writes one massive dimension
3+ heads with a constant query and a key that reads the massive dimension: position 0 is their sink

Axes: E width, F neurons, V vocabulary, N size of a code, S slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, E, F, NUM_HEADS, HEAD_SIZE, N = 64, 64, 208, 4, 32, 12
CONSTANT, MASSIVE, OPENING, SPECIAL = 0, 1, 2, 3
MEANS = (4, 5)
CODE, DEVIATIONS, NOISE = slice(6, 18), (slice(18, 30), slice(30, 42)), slice(42, 64)
NUM_NOISE = NOISE.stop - NOISE.start
BOS = 0
STILL = HEAD_SIZE // 2 - 1
"""The channel of a head that rotary embeddings turn least: by 0.0002 over 64 positions at the theta in use."""
CONSTANT_SIZE, CODE_SIZE, TOKEN_SIZE = 4.0, 4.0, E**0.5
MEAN_SIZE = 2.0
"""Of the constant in the aggregation, whose deviation has size 1 at position 0, and in the slots MEANS."""
OPEN_GATE = 6.0
"""What the super neuron's gate reads at position 0."""
KEY_GAINS = {MASSIVE: (0.05, 0.35), CONSTANT: (0.6, 2.5), OPENING: (0.2, 0.6), SPECIAL: (0.06, 0.4)}
"""Range by slot of gain in: logit = gain * constant at the query * slot at the key. Its low end leaves a head without
a sink, or nearly."""

_MEDIATION = {
    f"mediation_{cause}_{mediator}"
    for cause in ("mask", "amplification")
    for mediator in ("super_neurons", "dimensions")
}
_READ = {"super_neurons", "channel_sparsity", "dimension_disparity"}
_UNITS = {"super_neurons_necessary", "channel_sparsity_necessary", "super_neurons_sufficient", *_MEDIATION}
_VARIANCE = {
    "unmixing_creates_sink",
    "amplification_creates_sink",
    "dose_response",
    "equalising_removes_sink",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is planted. Heads of the `readers` layers find their sink through a slot of the normalised stream."""

    num_layers: int = 4
    key_slot: int | None = MASSIVE
    key_sign: float = 1.0
    readers: range = range(3, 6)
    neuron_layer: int | None = 2
    """The layer of the super neuron; None leaves it out."""
    neuron_slot: int = MASSIVE
    activation: float = 60.0
    """Of the super neuron at position 0; a token has size 8."""
    output_size: float = 1.0
    """Of the super neuron's output vector; other units have 0.7 to 1.3."""
    dense: bool = False
    """Whether the slot MASSIVE is a direction of equal entries instead of a dimension."""
    deviation: float = 2.0
    """Size at position 0 of what layer 1 writes of the deviation."""
    opening: float = 3.0
    """Of OPENING, per unit of the deviation's energy."""
    bos: bool = False
    """Whether sequences begin with the special token."""
    not_holds: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is true of a planted model."""

    sink: int | None
    super_neurons: list[tuple[int, int]]
    """(layer, neuron) of units that open at position 0 only, whether or not a sink depends on them."""
    massive_dimension: int | None
    bos: bool
    """Whether every sequence begins with token BOS, which stands nowhere else."""
    not_holds: frozenset[str]
    """Claims that a study must not find to hold."""


_NORM_SINK = dict(key_slot=CONSTANT, key_sign=-1.0, readers=range(2, 4), deviation=14.0)
_OPENING_SINK = dict(key_slot=OPENING, readers=range(2, 4), opening=9.0)

DECOYS: dict[str, Plan] = {
    # Keys avoid the constant, which the norm makes small where the aggregation is large: no unit has a part in it.
    "sink_from_norm": Plan(
        **_NORM_SINK, neuron_layer=None, not_holds=frozenset(_UNITS | _READ | {"directional_collapse"})
    ),
    # Keys read what many ordinary units write along a dense direction.
    "sink_from_ordinary_units": Plan(
        **_OPENING_SINK, neuron_layer=None, not_holds=frozenset(_UNITS | _READ | {"directional_collapse"})
    ),
    "disparity_without_sink": Plan(key_slot=None, not_holds=frozenset({"sink"} | _UNITS | _VARIANCE)),
    # The unit is as active as a super neuron, and writes a little into a dense direction that nobody reads.
    "large_neuron": Plan(
        **_NORM_SINK,
        neuron_slot=NOISE.start,
        output_size=0.05,
        not_holds=frozenset(_UNITS | _READ | {"directional_collapse"}),
    ),
    # One cause, two effects: what opens the super neuron is also what the keys read.
    "disparity_beside_sink": Plan(**_OPENING_SINK, activation=16.0, not_holds=frozenset(_UNITS)),
    # The heads have their sink before the disparity is born, and those behind it read nothing.
    "disparity_after_sink": Plan(**{**_NORM_SINK, "readers": range(2, 3)}, not_holds=frozenset(_UNITS)),
    "special_token": Plan(
        key_slot=SPECIAL,
        readers=range(1, 4),
        neuron_layer=None,
        bos=True,
        not_holds=frozenset({"variance_discrepancy"} | _VARIANCE | _UNITS | _READ),
    ),
    # The unit is necessary, its output vector is not channel-sparse.
    "dense_neuron": Plan(
        dense=True,
        not_holds=frozenset({"channel_sparsity_necessary"} | _READ | {m for m in _MEDIATION if "dimensions" in m}),
    ),
}


def planted_chain(seed: int) -> tuple[LlamaForCausalLM, Facts]:
    """A model in which every link of the chain holds, and what is planted in it."""
    return _Planting(Plan(num_layers=6), seed).result()


def decoy(kind: str, seed: int) -> tuple[LlamaForCausalLM, Facts]:
    """A model that lacks a link of the chain, by a kind of `DECOYS`, and what is planted in it."""
    return _Planting(DECOYS[kind], seed).result()


def random_tokens(facts: Facts, *, num_sequences: int = 32, length: int = 64, seed: int = 0) -> Tensor:
    """[B, T] uniformly random tokens, with the special token first where the model wants it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1 if facts.bos else 0, VOCABULARY, (num_sequences, length), generator=generator)
    if facts.bos:
        ids[:, 0] = BOS
    return ids


class _Planting:
    """One model while it is being built; everything that is not planted is drawn from the seed."""

    def __init__(self, plan: Plan, seed: int):
        self.plan = plan
        self.generator = torch.Generator().manual_seed(seed)
        self.dimension = int(torch.randint(E, (), generator=self.generator))
        self.neuron = int(torch.randint(2 * N + 2, F, (), generator=self.generator))
        self.threshold = self.uniform(0.68, 0.78)
        self.slots_ES = self.basis()
        self.deviations = (2.0, plan.deviation)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=E,
            intermediate_size=F,
            num_hidden_layers=plan.num_layers,
            num_attention_heads=NUM_HEADS,
            num_key_value_heads=NUM_HEADS,
            head_dim=HEAD_SIZE,
            max_position_embeddings=256,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            bos_token_id=BOS if plan.bos else None,
            eos_token_id=None,
            pad_token_id=None,
            tie_word_embeddings=False,
        )
        with torch.random.fork_rng():
            self.model = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            self.model.model.embed_tokens.weight.copy_(self.tokens() @ self.slots_ES.T)
            self.model.lm_head.weight.copy_(self.normal(VOCABULARY, E, size=0.05))
            for layer in range(plan.num_layers):
                self.plant_attention(layer)
                self.plant_feed_forward(layer)

    def result(self) -> tuple[LlamaForCausalLM, Facts]:
        plan = self.plan
        massive = plan.neuron_layer is not None and plan.neuron_slot == MASSIVE and not plan.dense
        return self.model, Facts(
            sink=None if plan.key_slot is None else 0,
            super_neurons=[] if plan.neuron_layer is None else [(plan.neuron_layer, self.neuron)],
            massive_dimension=self.dimension if massive else None,
            bos=plan.bos,
            not_holds=plan.not_holds,
        )

    def normal(self, *shape: int, size: float = 1.0) -> Tensor:
        return size * torch.randn(*shape, generator=self.generator)

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=self.generator))

    def directions(self, *shape: int) -> Tensor:
        """Random vectors of size 1."""
        return torch.nn.functional.normalize(self.normal(*shape), dim=-1)

    def basis(self) -> Tensor:
        """[E, S] orthonormal slots, random but for MASSIVE: a dimension of either sign, or a vector of equal
        magnitudes."""
        columns = self.normal(E, E)
        signs = columns[:, 0].sign()
        columns[:, 0] = signs if self.plan.dense else signs * torch.eye(E)[self.dimension]
        basis = torch.linalg.qr(columns).Q
        basis[:, [0, MASSIVE]] = basis[:, [MASSIVE, 0]]
        return basis

    def tokens(self) -> Tensor:
        """[V, S] tokens of one size. Codes come in opposite pairs, so that their mean is zero."""
        half = self.directions(VOCABULARY // 2, N)
        tokens_VS = torch.zeros(VOCABULARY, E)
        tokens_VS[:, CONSTANT] = CONSTANT_SIZE
        tokens_VS[:, CODE] = CODE_SIZE * torch.cat([half, -half])
        rest = (TOKEN_SIZE**2 - CONSTANT_SIZE**2 - CODE_SIZE**2) ** 0.5
        tokens_VS[:, NOISE] = rest * self.directions(VOCABULARY, NUM_NOISE)
        if self.plan.bos:
            tokens_VS[BOS] = 0
            tokens_VS[BOS, CONSTANT] = CONSTANT_SIZE
            tokens_VS[BOS, SPECIAL] = (TOKEN_SIZE**2 - CONSTANT_SIZE**2) ** 0.5
        return tokens_VS

    def plant_attention(self, layer: int) -> None:
        part, slots = self.model.model.layers[layer].self_attn, self.slots_ES
        channels = NUM_HEADS * HEAD_SIZE
        part.q_proj.weight.copy_(self.normal(channels, E, size=0.05))
        part.k_proj.weight.copy_(self.normal(channels, E, size=0.05))
        # Every layer keeps mean and code in directions of its own, spread over all heads: a direction of the
        # aggregation that is drawn at random then means different codes to two layers.
        frame = torch.linalg.qr(self.normal(channels, 1 + N + NUM_NOISE)).Q
        mean, code, rest = frame[:, :1], frame[:, 1 : N + 1], frame[:, -NUM_NOISE:]
        value = MEAN_SIZE / CONSTANT_SIZE * mean @ slots[:, [CONSTANT]].T + code / CODE_SIZE @ slots[:, CODE].T
        part.v_proj.weight.copy_(value + self.normal(channels, E, size=0.005))
        output = slots[:, NOISE] @ self.normal(NUM_NOISE, channels, size=0.03)
        if layer < len(DEVIATIONS):
            size = self.deviations[layer]
            output += slots[:, [MEANS[layer]]] @ mean.T + size * slots[:, DEVIATIONS[layer]] @ code.T
            if size > TOKEN_SIZE:  # whatever direction the aggregation grows in, the norm must see it
                output += 2 * size * slots[:, NOISE] @ rest.T
        part.o_proj.weight.copy_(output)
        if self.plan.key_slot is not None and layer in self.plan.readers:
            for row in range(STILL, channels, HEAD_SIZE):
                gain = self.plan.key_sign * self.uniform(*KEY_GAINS[self.plan.key_slot])
                part.q_proj.weight[row] = HEAD_SIZE**0.5 * slots[:, CONSTANT]
                part.k_proj.weight[row] = gain * slots[:, self.plan.key_slot]

    def plant_feed_forward(self, layer: int) -> None:
        part, plan = self.model.model.layers[layer].mlp, self.plan
        gate_FE, up_FE = self.normal(F, E, size=0.04), self.normal(F, E, size=0.04)
        # Ordinary units leave the slots of the chain alone, all but MASSIVE.
        ordinary = [MASSIVE, *range(NOISE.start, NOISE.stop)]
        down_FE = self.directions(F, len(ordinary)) @ self.slots_ES[:, ordinary].T
        down_FE *= 0.7 + 0.6 * torch.rand(F, 1, generator=self.generator)
        if layer == 1 and (plan.neuron_layer is not None or plan.key_slot == OPENING):
            self.plant_opening(gate_FE, up_FE, down_FE)
        if layer == plan.neuron_layer:
            gate_FE[self.neuron] = OPEN_GATE / self.at_first(OPENING) * self.slots_ES[:, OPENING]
            up_FE[self.neuron] = plan.activation / OPEN_GATE / self.at_first(CONSTANT) * self.slots_ES[:, CONSTANT]
            down_FE[self.neuron] = plan.output_size * (self.slots_ES[:, plan.neuron_slot] + self.normal(E, size=0.003))
        part.gate_proj.weight.copy_(gate_FE)
        part.up_proj.weight.copy_(up_FE)
        part.down_proj.weight.copy_(down_FE.T)

    def plant_opening(self, gate_FE: Tensor, up_FE: Tensor, down_FE: Tensor) -> None:
        """Pairs of units that multiply: silu(a) b + silu(-a) (-b) = a b, exactly and at any scale."""
        first, second = (self.slots_ES[:, [*range(E)][deviation]].T for deviation in DEVIATIONS)
        first = torch.cat([first, self.slots_ES[:, [MEANS[0]]].T])
        second = torch.cat([second, self.slots_ES[:, [MEANS[1]]].T])
        weight = torch.full((N + 1,), self.plan.opening / (self.deviations[0] * self.deviations[1]))
        weight[N] = -self.threshold * self.plan.opening / MEAN_SIZE**2
        num_units = 2 * (N + 1)
        gate_FE[:num_units] = torch.cat([first, -first])
        up_FE[:num_units] = torch.cat([second, -second])
        down_FE[:num_units] = torch.cat([weight, weight])[:, None] * self.slots_ES[:, OPENING]

    def at_first(self, slot: int) -> float:
        """What a normalised token shows in a slot at position 0 behind layer 1."""
        first, second = self.deviations
        before = 1 + (MEAN_SIZE**2 + first**2) / TOKEN_SIZE**2
        energy = before + (MEAN_SIZE**2 + second**2) / before / TOKEN_SIZE**2
        opening = self.plan.opening * (1 - self.threshold) / before**0.5 / energy
        value = {OPENING: opening, CONSTANT: CONSTANT_SIZE}[slot]
        return value / energy**0.5
