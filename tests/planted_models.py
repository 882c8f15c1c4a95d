"""Tiny Llama models whose weights are set by hand: one with the whole sink chain, decoys that lack a link of it, and
models whose super neuron opens by something else than the variance.

A token is written in slots, each a direction of the residual stream: a constant, a unit vector of its own (the code),
noise. The basis of the slots is random, so that nothing is aligned with a dimension but the massive one. Attention of
the first layers is nearly uniform: it averages codes, and keeps the constant. The chain, layer by layer:

0  attention writes the mean of the constant, and the mean of the codes (the deviation): of length 1 at position 0,
   1 / sqrt(t + 1) at position t
1  attention writes both once more, into other slots; ordinary neurons write
   OPENING ~ (deviation of layer 0) . (deviation of layer 1) - threshold * (mean of layer 0) (mean of layer 1),
   which is positive at position 0 only, keeps its sign when the aggregation is scaled, and asks that the deviations of
   two layers agree
2  the super neuron opens where OPENING is positive, and writes one massive dimension
3+ heads with a constant query and a key that reads the massive dimension: position 0 is their sink

The other causes (`CAUSES`) have the same layers and another OPENING, each a sum of products of slots:

energy    |aggregation of layer 0|^2, seen along code, mean and a random projection of all else, - threshold
unmixed   codes are single coordinates of either sign; with x and y the deviations of layers 0 and 1, and a layer later,
          sum (x_k y_k)^2 - 0.55 |x|^2 |y|^2: positive where both are one and the same coordinate, at any scale
own       the same with the code of the token itself for y: the value of another key is mostly another coordinate
mean      half of the tokens are dull, and in layer 0 attention falls on them alone; values say -1 if dull, else 1;
          what arrives + 1/2: later tokens see -1, the first one -1 or 1, and 0 on average
position  a slot of learned positions, as GPT-2 has them, that position 0 alone has

What the heads lock on to (`LOCKS`) is behind the opening, which is that of the variance in each:

coordinate  the chain: one neuron writes one dimension, and keys read that dimension
direction   the same along a vector of equal magnitudes: no dimension stands out
aside       one neuron writes one dimension, keys read a vector of equal magnitudes, so they see an eighth of the write,
            and would of any other dimension with the right sign
sparsity    a layer after the super neuron a neuron for each dimension and sign opens where that one alone is nearly all
            of the normalised stream, and all of them write one dense slot, which keys read

With `early` a neuron of layer 0 also writes a weaker dimension at position 0, which no head reads.

Axes: E width, F neurons, V vocabulary, N size of a code, S slots, P products.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, E, F, NUM_HEADS, HEAD_SIZE, N = 64, 64, 208, 4, 32, 12
CONSTANT, MASSIVE, OPENING, SPECIAL = 0, 1, 2, 3
MEANS = (4, 5)
CODE, DEVIATIONS, NOISE = slice(6, 18), (slice(18, 30), slice(30, 42)), slice(42, 64)
NUM_NOISE = NOISE.stop - NOISE.start
EARLY = NOISE.stop - 1
"""The slot of an early dimension, in place of one of noise."""
SQUARES = slice(52, 64)
"""Of the models that open by an unmixed value, in place of some of the noise."""
BOS = 0
STILL = HEAD_SIZE // 2 - 1
"""The channel of a head that rotary embeddings turn least: by 0.0002 over 64 positions at the theta in use."""
CONSTANT_SIZE, CODE_SIZE, SPECIAL_SIZE, TOKEN_SIZE = 4.0, 4.0, 2.0, E**0.5
SEEN = 0.5
"""What the stream shows of an aggregation of size 1 whose energy opens: so little that 8 times as much still leaves the
constant to be read."""
DETECTED, DETECTOR_GATE, DETECTOR_WRITE = 4.5, 4.0, 60.0
"""A dimension of the normalised stream is alone where it exceeds the first: it is 8 if it is all, and 3 at most in a
dense state. What it then writes outweighs the 1/8 of any dimension that SPECIAL happens to hold."""
KEY_GAINS = {MASSIVE: (0.05, 0.35), CONSTANT: (0.6, 2.5), OPENING: (0.2, 0.6), SPECIAL: (0.06, 0.4)}
"""Range by slot of gain in: logit = gain * constant at the query * slot at the key. Its low end leaves a head without
a sink, or nearly."""

_BY_VARIANCE = {
    *("unmixing_creates_sink", "opening_removes_sink"),
    *("variance_is_what_matters", "variance_suffices"),
}
_DISPARITY = {"super_neurons", "dimension_disparity"}
_OF_NEURON = {"neurons_necessary", "super_neurons_sufficient", "mediation_mask_super_neurons"}

Truth = tuple[set[str], str]
"""Claims that are true of a model, and why."""
_OPENS: Truth = (_BY_VARIANCE, "what opens is the deviation over the mean: the energy, or one key's value, has no part")
_AVERAGES: Truth = (
    {"variance_discrepancy"},
    "attention is nearly uniform up to the sink, over tokens drawn at random",
)
_SINK: Truth = ({"sink"}, "heads read what position 0 has")
_TOKEN: Truth = ({"first_token_needed", "token_carries_sink"}, "keys read a slot that one token has, at any place")
_IDLE: Truth = (_DISPARITY, "one neuron writes one dimension at position 0, and no head reads it")
_CROWD: Truth = (
    {"neurons_necessary"},
    "an eighth of a layer's neurons write the slot that keys read, and no others do",
)
TRUTHS: dict[str, list[Truth]] = {
    "sink_from_norm": [_SINK, _AVERAGES, _OPENS],
    "sink_from_ordinary_units": [
        *(_SINK, _AVERAGES, _OPENS, _CROWD),
        ({"lock"}, "keys read one slot, which all states at position 0 share"),
    ],
    "disparity_without_sink": [_AVERAGES, (_DISPARITY, "the neuron and its dimension are there; there is no sink")],
    "large_neuron": [_SINK, _AVERAGES, _OPENS],
    "disparity_beside_sink": [
        *(_SINK, _AVERAGES, _OPENS, _IDLE, _CROWD),
        ({"lock"}, "keys read one slot, not the dimension"),
    ],
    "disparity_after_sink": [_SINK, _AVERAGES, _OPENS, _IDLE],
    "special_token": [
        *(_SINK, _TOKEN),
        ({"lock"}, "every sequence has the same token there, and keys read its slot"),
    ],
    "dense_neuron": [
        *(_SINK, _AVERAGES, _OPENS),
        ({"lock"}, "keys read one dense direction, and position 0 is little else"),
        (_OF_NEURON, "one neuron writes it, and opens by what makes the sink"),
    ],
}
"""Of each decoy, by its construction: every other claim is false of it, and `holds` is then wrong."""


MECHANISM = {"disparity_without_sink": "no_sink", "special_token": "token"}
"""Of the decoys; of those that are not named, variance: what the keys read opens by it."""
MECHANISM_OF_CAUSE = {
    **{"variance": "variance", "energy": "no_averaging", "unmixed": "no_averaging", "own": "no_averaging"},
    "position": "position",
}
"""Of the causes. A token that attends to one key alone has more energy, or a value that is not averaged. That of `mean`
is undecided: half of the tokens are dull, and none of these is a sink."""


def true_of(kind: str) -> set[str]:
    """The claims that are true of a decoy."""
    return set().union(*(claims for claims, _ in TRUTHS[kind]))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is planted. Heads of the `readers` layers find their sink through a slot of the normalised stream."""

    cause: str = "variance"
    """What opens the super neuron: variance, energy, unmixed, own, mean or position."""
    num_layers: int = 4
    key_slot: int | None = MASSIVE
    key_sign: float = 1.0
    readers: range = range(3, 6)
    neuron_layer: int | None = 2
    """The layer of the super neuron; None leaves it out."""
    neuron_slot: int = MASSIVE
    activation: float = 60.0
    """Of the super neuron at position 0; a token has size 8."""
    gate: float = 6.0
    """What the super neuron's gate reads at position 0."""
    output_size: float = 1.0
    """Of the super neuron's output vector; other neurons have 0.7 to 1.3."""
    dense: bool = False
    """Whether the slot MASSIVE is a direction of equal entries instead of a dimension."""
    aside: bool = False
    """Whether the super neuron writes a dimension though the slot MASSIVE, which keys read, is dense."""
    detectors: int | None = None
    """The layer whose neurons each open where one dimension is nearly all of the stream, and write SPECIAL."""
    key_gain: float = 1.0
    """Times KEY_GAINS."""
    deviation: float = 2.0
    """Size at position 0 of what layer 1 writes of the deviation."""
    mean_size: float = 2.0
    """Of the constant in the aggregation, whose deviation has size 1 at position 0, and in the slots MEANS."""
    opening: float = 3.0
    """Of OPENING, per unit of the deviation's energy."""
    bos: bool = False
    """Whether sequences begin with the special token."""
    early: float = 0.0
    """What a neuron of layer 0 writes into a dimension of its own at position 0, which a learned position marks."""

    @property
    def marks_first(self) -> bool:
        """Whether the embedding of position 0 differs from all others."""
        return self.cause == "position" or self.early > 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is true of a planted model."""

    sink: int | None
    super_neurons: list[tuple[int, int]]
    """(layer, neuron) of neurons that open at position 0 only, whether or not a sink depends on them."""
    massive_dimension: int | None
    early_dimension: int | None
    """The dimension that stands first and that no head reads."""
    early_neuron: int
    bos: bool
    """Whether every sequence begins with token BOS, which stands nowhere else."""


_NORM_SINK = dict(key_slot=CONSTANT, key_sign=-1.0, readers=range(2, 4), deviation=14.0)
_OPENING_SINK = dict(key_slot=OPENING, readers=range(2, 4), opening=9.0)

DECOYS: dict[str, Plan] = {
    # Keys avoid the constant, which the norm makes small where the aggregation is large: no neuron has a part in it.
    "sink_from_norm": Plan(**_NORM_SINK, neuron_layer=None),
    # Keys read what many ordinary neurons write along a dense direction.
    "sink_from_ordinary_units": Plan(**_OPENING_SINK, neuron_layer=None),
    "disparity_without_sink": Plan(key_slot=None),
    # The neuron is as active as a super neuron, and writes a little into a dense direction that nobody reads.
    "large_neuron": Plan(**_NORM_SINK, neuron_slot=NOISE.start, output_size=0.05),
    # One cause, two effects: what opens the super neuron is also what the keys read.
    "disparity_beside_sink": Plan(**_OPENING_SINK, activation=16.0),
    # The heads have their sink before the disparity is born, and those behind it read nothing.
    "disparity_after_sink": Plan(**{**_NORM_SINK, "readers": range(2, 3)}),
    "special_token": Plan(key_slot=SPECIAL, readers=range(1, 4), neuron_layer=None, bos=True),
    # The neuron is necessary, its output vector is not channel-sparse.
    "dense_neuron": Plan(dense=True),
}


CAUSES: dict[str, Plan] = {
    "variance": Plan(num_layers=6),
    # As much mean as there is deviation at position 0: it can be taken where the energy must come down.
    "energy": Plan(num_layers=6, cause="energy", mean_size=1.0, opening=0.05),
    # At a tenth of its variance what opens is a hundredth: the neuron must still be open, and its write large, there.
    "unmixed": Plan(
        num_layers=7, cause="unmixed", neuron_layer=3, readers=range(4, 7), activation=2e4, gate=2e3, opening=1.0
    ),
    "own": Plan(num_layers=7, cause="own", neuron_layer=3, readers=range(4, 7), activation=2e4, gate=2e3, opening=1.0),
    "mean": Plan(num_layers=6, cause="mean", mean_size=1.5),
    "position": Plan(num_layers=6, cause="position"),
}
"""Models in which one thing opens the super neuron; behind it the chain is whole in each."""


LOCKS: dict[str, Plan] = {
    "coordinate": CAUSES["variance"],
    "direction": Plan(num_layers=6, dense=True),
    "aside": Plan(num_layers=6, dense=True, aside=True, key_gain=E**0.5),
    "sparsity": Plan(num_layers=7, activation=48.0, detectors=3, key_slot=SPECIAL, key_gain=0.7, readers=range(4, 7)),
}
"""Models whose heads lock on to one dimension, to a dense direction, or to whatever stands in a single dimension."""


def locked(lock: str, seed: int) -> tuple[LlamaForCausalLM, Facts]:
    """A model whose heads lock on to something of `LOCKS`, and what is planted in it."""
    return _Planting(LOCKS[lock], seed).result()


def caused(cause: str, seed: int) -> tuple[LlamaForCausalLM, Facts]:
    """A model whose super neuron opens by a cause of `CAUSES`, and what is planted in it."""
    return _Planting(CAUSES[cause], seed).result()


def with_early_dimension(seed: int) -> tuple[LlamaForCausalLM, Facts]:
    """The chain, with a weak dimension from layer 0 on: the one that heads read appears two layers later."""
    return _Planting(Plan(num_layers=6, early=14.0), seed).result()


def planted_chain(seed: int) -> tuple[LlamaForCausalLM, Facts]:
    """A model in which every link of the chain holds, and what is planted in it."""
    return caused("variance", seed)


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
        self.early_dimension, self.early_neuron = (self.dimension + 1) % E, self.neuron - 1
        self.threshold = self.uniform(0.68, 0.78)
        self.slots_ES = self.basis()
        self.deviations = (2.0, plan.deviation)
        self.noise = slice(NOISE.start, SQUARES.start) if plan.cause in ("unmixed", "own") else NOISE
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
            mlp_bias=plan.detectors is not None,
        )
        with torch.random.fork_rng():
            self.model = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            if plan.marks_first:
                self.model.model.embed_tokens = WithFirstPosition(2 * SPECIAL_SIZE * self.slots_ES[:, SPECIAL])
            self.model.model.embed_tokens.weight.copy_(self.tokens() @ self.slots_ES.T)
            self.model.lm_head.weight.copy_(self.normal(VOCABULARY, E, size=0.05))
            for layer in range(plan.num_layers):
                self.plant_attention(layer)
                self.plant_feed_forward(layer)

    def result(self) -> tuple[LlamaForCausalLM, Facts]:
        plan = self.plan
        sparse = plan.aside or not plan.dense
        massive = plan.neuron_layer is not None and plan.neuron_slot == MASSIVE and sparse
        return self.model, Facts(
            sink=None if plan.key_slot is None else 0,
            super_neurons=[] if plan.neuron_layer is None else [(plan.neuron_layer, self.neuron)],
            massive_dimension=self.dimension if massive else None,
            early_dimension=self.early_dimension if plan.early else None,
            early_neuron=self.early_neuron,
            bos=plan.bos,
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
        # No zero below zero: LAPACKs differ in the sign that they give to such a column.
        columns[:, 0] = signs if self.plan.dense else signs * torch.eye(E)[self.dimension] + 0.0
        if self.plan.early:
            columns[:, 1] = torch.eye(E)[self.early_dimension]
        basis = torch.linalg.qr(columns).Q
        if self.plan.early:
            basis[:, [1, EARLY]] = basis[:, [EARLY, 1]]
        basis[:, [0, MASSIVE]] = basis[:, [MASSIVE, 0]]
        return basis

    def tokens(self) -> Tensor:
        """[V, S] tokens of one size. Codes come in opposite pairs, so that their mean is zero."""
        half = self.directions(VOCABULARY // 2, N)
        if self.plan.cause in ("unmixed", "own"):
            half = torch.eye(N)[torch.arange(VOCABULARY // 2) % N]
        tokens_VS = torch.zeros(VOCABULARY, E)
        tokens_VS[:, CONSTANT] = CONSTANT_SIZE
        tokens_VS[:, CODE] = CODE_SIZE * torch.cat([half, -half])
        if self.plan.cause == "mean":  # every second token is dull
            tokens_VS[:, SPECIAL] = SPECIAL_SIZE * (-1.0) ** torch.arange(VOCABULARY)
        rest_V = (TOKEN_SIZE**2 - tokens_VS.square().sum(-1)).sqrt()
        tokens_VS[:, self.noise] = rest_V[:, None] * self.directions(VOCABULARY, self.noise.stop - self.noise.start)
        if self.plan.bos:
            tokens_VS[BOS] = 0
            tokens_VS[BOS, CONSTANT] = CONSTANT_SIZE
            tokens_VS[BOS, SPECIAL] = (TOKEN_SIZE**2 - CONSTANT_SIZE**2) ** 0.5
        return tokens_VS

    def plant_attention(self, layer: int) -> None:
        part, slots, plan = self.model.model.layers[layer].self_attn, self.slots_ES, self.plan
        channels = NUM_HEADS * HEAD_SIZE
        part.q_proj.weight.copy_(self.normal(channels, E, size=0.05))
        part.k_proj.weight.copy_(self.normal(channels, E, size=0.05))
        # Every layer keeps mean and code in directions of its own, spread over all heads: a direction of the
        # aggregation that is drawn at random then means different codes to two layers.
        frame = torch.linalg.qr(self.normal(channels, 1 + N + NUM_NOISE)).Q
        mean, code, rest = frame[:, :1], frame[:, 1 : N + 1], frame[:, -NUM_NOISE:]
        value = plan.mean_size / CONSTANT_SIZE * mean @ slots[:, [CONSTANT]].T + code / CODE_SIZE @ slots[:, CODE].T
        if plan.cause == "mean":
            value -= rest[:, :1] / SPECIAL_SIZE @ slots[:, [SPECIAL]].T
        part.v_proj.weight.copy_(value + self.normal(channels, E, size=0.005))
        output = slots[:, self.noise] @ self.normal(self.noise.stop - self.noise.start, channels, size=0.03)
        if layer < len(DEVIATIONS) and plan.cause in ("variance", "unmixed", "own"):
            size = self.deviations[layer]
            output += size * slots[:, DEVIATIONS[layer]] @ code.T
            if plan.cause == "variance":
                output += slots[:, [MEANS[layer]]] @ mean.T
            if size > TOKEN_SIZE:  # whatever direction the aggregation grows in, the norm must see it
                output += 2 * size * slots[:, NOISE] @ rest.T
        if layer == 0 and plan.cause == "energy":
            seen = torch.cat([mean, code], dim=1)
            others = self.normal(N, channels, size=N**-0.5)
            others -= others @ seen @ seen.T
            output += SEEN * (slots[:, [MEANS[0]]] @ mean.T + slots[:, DEVIATIONS[0]] @ code.T)
            output += SEEN * slots[:, DEVIATIONS[1]] @ others
        if layer == 0 and plan.cause == "mean":
            output += 2 * slots[:, [MEANS[0]]] @ rest[:, :1].T
            for row in range(STILL, channels, HEAD_SIZE):
                part.q_proj.weight[row] = HEAD_SIZE**0.5 * slots[:, CONSTANT]
                part.k_proj.weight[row] = slots[:, SPECIAL]
        part.o_proj.weight.copy_(output)
        if plan.key_slot is not None and layer in plan.readers:
            for row in range(STILL, channels, HEAD_SIZE):
                gain = plan.key_sign * plan.key_gain * self.uniform(*KEY_GAINS[plan.key_slot])
                part.q_proj.weight[row] = HEAD_SIZE**0.5 * slots[:, CONSTANT]
                part.k_proj.weight[row] = gain * slots[:, plan.key_slot]

    def plant_feed_forward(self, layer: int) -> None:
        part, plan = self.model.model.layers[layer].mlp, self.plan
        gate_FE, up_FE = self.normal(F, E, size=0.04), self.normal(F, E, size=0.04)
        # Ordinary neurons leave the slots of the chain alone, all but MASSIVE.
        ordinary = [MASSIVE, *range(self.noise.start, self.noise.stop)]
        down_FE = self.directions(F, len(ordinary)) @ self.slots_ES[:, ordinary].T
        down_FE *= 0.7 + 0.6 * torch.rand(F, 1, generator=self.generator)
        if plan.neuron_layer is not None or plan.key_slot == OPENING:
            first_PS, second_PS, written_PS = self.products(layer)
            pairs = 2 * len(first_PS)
            gate_FE[:pairs] = torch.cat([first_PS, -first_PS]) @ self.slots_ES.T
            up_FE[:pairs] = torch.cat([second_PS, -second_PS]) @ self.slots_ES.T
            down_FE[:pairs] = torch.cat([written_PS, written_PS]) @ self.slots_ES.T
        if layer == 0 and plan.early:
            marked_BS = self.first_state(layer)
            gate_FE[self.early_neuron] = plan.gate / marked_BS[:, SPECIAL].mean() * self.slots_ES[:, SPECIAL]
            up_FE[self.early_neuron] = (
                plan.early / plan.gate / marked_BS[:, CONSTANT].mean() * self.slots_ES[:, CONSTANT]
            )
            down_FE[self.early_neuron] = self.slots_ES[:, EARLY]
        if layer == plan.neuron_layer:
            opening, constant = self.at_first(layer)
            gate_FE[self.neuron] = plan.gate / opening * self.slots_ES[:, OPENING]
            up_FE[self.neuron] = plan.activation / plan.gate / constant * self.slots_ES[:, CONSTANT]
            written_E = self.slots_ES[:, plan.neuron_slot]
            if plan.aside:
                written_E = written_E[self.dimension].sign() * torch.eye(E)[self.dimension]
            down_FE[self.neuron] = plan.output_size * (written_E + self.normal(E, size=0.003))
        if layer == plan.detectors:
            gate_FE[: 2 * E] = DETECTOR_GATE * torch.cat([torch.eye(E), -torch.eye(E)])
            up_FE[: 2 * E] = 0
            opened = DETECTOR_GATE * (TOKEN_SIZE - DETECTED)  # of a state that is one dimension
            down_FE[: 2 * E] = DETECTOR_WRITE / opened * self.slots_ES[:, SPECIAL]
        part.gate_proj.weight.copy_(gate_FE)
        part.up_proj.weight.copy_(up_FE)
        part.down_proj.weight.copy_(down_FE.T)
        if plan.detectors is not None:
            for projection in (part.gate_proj, part.up_proj, part.down_proj):
                projection.bias.zero_()
        if layer == plan.detectors:
            part.gate_proj.bias[: 2 * E] = -DETECTOR_GATE * DETECTED
            part.up_proj.bias[: 2 * E] = 1

    def products(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """([P, S] first factors, [P, S] second factors, [P, S] where their product is written) of a layer.

        A pair of neurons multiplies: silu(a) b + silu(-a) (-b) = a b, exactly and at any scale.
        """
        plan, slot = self.plan, torch.eye(E)
        size = plan.opening * slot[[OPENING]]
        nothing = slot[:0]
        if layer == 1 and plan.cause == "variance":
            first, second = (torch.cat([slot[dev], slot[[mean]]]) for dev, mean in zip(DEVIATIONS, MEANS, strict=True))
            weight = torch.full((N + 1, 1), 1 / (self.deviations[0] * self.deviations[1]))
            weight[N] = -self.threshold / plan.mean_size**2
            return first, second, weight * size
        if layer == 1 and plan.cause == "energy":
            seen = torch.cat([slot[DEVIATIONS[0]], slot[DEVIATIONS[1]], slot[[MEANS[0], CONSTANT]]])
            weight = torch.full((len(seen), 1), SEEN**-2)
            weight[-1] = (
                -2 * self.threshold / CONSTANT_SIZE**2
            )  # of an energy that is 2 at position 0, and near 1 elsewhere
            return seen, seen, weight * size
        if layer == 1 and plan.cause in ("unmixed", "own"):
            first, second = slot[DEVIATIONS[0]], slot[CODE if plan.cause == "own" else DEVIATIONS[1]]
            sums = [slot[[mean]].expand(N, -1) for mean in MEANS]
            return (
                torch.cat([first, first, second]),
                torch.cat([second, first, second]),
                torch.cat([slot[SQUARES], *sums]),
            )
        if layer == 2 and plan.cause in ("unmixed", "own"):
            first, second = (torch.cat([slot[SQUARES], slot[[mean]]]) for mean in MEANS)
            weight = torch.ones(N + 1, 1)
            weight[N] = -0.55  # two tokens of equal weight have 0.5
            return first, second, weight * size
        if layer == 1 and plan.cause == "mean":
            weight = torch.tensor([[1 / 2 / CONSTANT_SIZE], [1 / 2 / CONSTANT_SIZE**2]])
            return slot[[MEANS[0], CONSTANT]], slot[[CONSTANT, CONSTANT]], weight * size
        if layer == 1 and plan.cause == "position":
            weight = torch.tensor([[1 / (2 * SPECIAL_SIZE * CONSTANT_SIZE)], [-1 / 2 / CONSTANT_SIZE**2]])
            return slot[[SPECIAL, CONSTANT]], slot[[CONSTANT, CONSTANT]], weight * size
        return nothing, nothing, nothing

    def at_first(self, layer: int) -> tuple[float, float]:
        """What the feed-forward of a layer reads of OPENING and CONSTANT at position 0, where it opens."""
        state_BS = self.first_state(layer)
        opens = state_BS[:, OPENING] > 0
        return float(state_BS[opens, OPENING].mean()), float(state_BS[opens, CONSTANT].mean())

    def first_state(self, layer: int) -> Tensor:
        """[B, S] what the feed-forward of a layer reads at position 0."""
        seen: list[Tensor] = []
        part = self.model.model.layers[layer].mlp
        handle = part.register_forward_pre_hook(lambda module, args: seen.append(args[0][:, 0] @ self.slots_ES))
        ids = torch.randint(1, VOCABULARY, (64, 2), generator=torch.Generator().manual_seed(0))
        self.model.model(ids, use_cache=False)
        handle.remove()
        return seen[0]


class WithFirstPosition(nn.Embedding):
    """Embeddings of tokens and, at position 0, of the position: learned positions, as GPT-2 has them."""

    def __init__(self, first_E: Tensor):
        super().__init__(VOCABULARY, E)
        self.first_E = first_E

    def forward(self, ids: Tensor) -> Tensor:
        tokens_BTE = super().forward(ids)
        return torch.cat([tokens_BTE[:, :1] + self.first_E, tokens_BTE[:, 1:]], dim=1)
