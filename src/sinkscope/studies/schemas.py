"""The tables that a study writes beside those of a trace; every column is declared with its meaning.

Verdicts: holds, does not hold, not applicable, undecided. A condition is what was done to the model, such as
`mask_to_self`; `untouched` has neither target nor factor.
"""

from __future__ import annotations

from sinkscope.results.kinds import Kind
from sinkscope.results.tables import Column, Schema
from sinkscope.tracing.schemas import TRACE_TABLES, TRACED, check_heads

_TARGET = Column("target", "int", "Position acted on; null where none is", nullable=True)
_FACTOR = Column("factor", "float", "Strength of the intervention; null where it has none", nullable=True)
_CONDITION = Column("condition", "str", "What was done to the model")
_LAYER = Column("layer", "int", "Layer, counted from 0")
_EXPERT = Column("expert", "int", "Expert of the neuron; -1 is the shared expert; null in a dense layer", nullable=True)
_NEURON = Column("neuron", "int", "Neuron within the layer or expert")
_ENTERING = Column("entering", "str", "What the aggregation enters there: the output projection, or a norm on it")
_N = Column("n", "int", "Sequences that the numbers are made of")

CLAIMS = Schema(
    "claims",
    (
        Column("id", "str", "Name of the claim"),
        Column("statement", "str", "The claim in words"),
        Column(
            "link",
            "str",
            "Link of the chain: variance_discrepancy, super_neurons, channel_sparsity, dimension_disparity, "
            "directional_collapse, sink, or causal",
        ),
        Column("verdict", "str", "holds, does not hold, not applicable, or undecided"),
        Column("effect", "float", "The claim's statistic", nullable=True),
        Column("low", "float", "Lower end of its interval", nullable=True),
        Column("high", "float", "Upper end of its interval", nullable=True),
        Column("confidence", "float", "Confidence of the interval, such as 0.95", nullable=True),
        Column("threshold", "float", "What the rule compares with", nullable=True),
        Column("rule", "str", "When the claim holds, such as 'low >= threshold'"),
        Column("control", "float", "The same statistic under the control", nullable=True),
        Column("control_name", "str", "What the control is", nullable=True),
        _N,
        Column("p_value", "float", "p-value before Holm's correction", nullable=True),
        Column("note", "str", "What else must be known to read the verdict; may be empty"),
    ),
    is_listed=True,
)
RATES = Schema(
    "rates",
    (
        _CONDITION,
        _TARGET,
        _FACTOR,
        Column("position", "int", "Key position, counted from 0"),
        Column("rate", "float", "Sink rate at the position"),
        Column("low", "float", "Lower end of its interval"),
        Column("high", "float", "Upper end of its interval"),
        Column("later_rate", "float", "The same by later queries alone, which interventions are judged on"),
    ),
)
FACTORIAL = Schema(
    "factorial",
    (
        Column("mixing", "str", "Whom the target sees: untouched, see_self, see_previous, ... up to the birth"),
        Column("variance_of", "str", "The mixing at whose level the batch variance is; null where it follows", True),
        Column("energy_of", "str", "The mixing at whose level the energy is; null where it follows", True),
        _ENTERING,
        Column("targets", "str", "Positions that the numbers are means over"),
        Column("rise", "float", "Change of the sink rate at the target, by later queries"),
        Column("low", "float", "Lower end of its interval"),
        Column("high", "float", "Upper end of its interval"),
        Column("variance", "float", "Batch variance over the untouched one, geometric mean over layers", True),
        Column("energy", "float", "Energy over the untouched one, geometric mean over layers", True),
        Column("squared_mean", "float", "Squared mean over the untouched one, geometric mean over layers", True),
        Column("mean_share", "float", "|mu| / |o| over the untouched one, geometric mean over layers", True),
        Column("missed", "str", "What the manipulation check found missing; empty where nothing"),
        _N,
    ),
)
MANIPULATION = Schema(
    "manipulation",
    (
        _CONDITION,
        _TARGET,
        _FACTOR,
        _ENTERING,
        _LAYER,
        Column("variance", "float", "Batch variance of the aggregation at the target, over the untouched one", True),
        Column("energy", "float", "Its energy, over the untouched one", True),
        Column("squared_mean", "float", "Its squared mean, over the untouched one", True),
        Column("mean_share", "float", "Its |mu| / |o|, the root of their ratio: likewise over the untouched one", True),
        Column("missed", "str", "What the condition did not do at its targets, though its name says so; may be empty"),
    ),
)
EFFECTS = Schema(
    "effects",
    (
        _CONDITION,
        _TARGET,
        _FACTOR,
        Column("quantity", "str", "What was measured, such as sink_rate_at_target or loss"),
        Column("before", "float", "Its mean in the untouched model; null where every state there is zero", True),
        Column("after", "float", "Its mean under the condition", True),
        Column("difference", "float", "after - before, paired by sequence", True),
        Column("low", "float", "Lower end of the difference's interval", True),
        Column("high", "float", "Upper end of the difference's interval", True),
        _N,
    ),
    is_listed=True,
)
_BEFORE_AND_AFTER = (
    Column("before", "float", "Its mean in the untouched model"),
    Column("after", "float", "Its mean under the condition"),
    Column("low", "float", "Lower end of the interval of after - before, paired by sequence"),
    Column("high", "float", "Upper end of that interval"),
)
ATTENTION_ROWS = Schema(
    "attention_rows",
    (
        _CONDITION,
        _TARGET,
        _FACTOR,
        Column("quantity", "str", "entropy, or mixing (sum a^2), of a position's attention, mean over layers"),
        Column("position", "int", "Query position, counted from 0"),
        *_BEFORE_AND_AFTER,
    ),
)
NORMS = Schema(
    "norms",
    (
        _CONDITION,
        _TARGET,
        _FACTOR,
        _LAYER,
        Column("place", "str", "Where the norm of the residual was read: target, sink, or elsewhere (their mean)"),
        *_BEFORE_AND_AFTER,
    ),
)
MEDIATION = Schema(
    "mediation",
    (
        Column("intervention", "str", "mask_to_self or amplify_variance"),
        Column("mediator", "str", "What was held at its untouched values: super_neurons or massive_dimensions"),
        Column("total", "float", "Rise of the sink rate at the target"),
        Column("random", "float", "Rise that remains while as many matched random ones are held"),
        Column("direct", "float", "Rise that remains while the mediator is held"),
        Column("indirect", "float", "random - direct"),
        Column("share", "float", "indirect / total; null where there is no total effect", nullable=True),
        Column("low", "float", "Lower end of the share's interval", nullable=True),
        Column("high", "float", "Upper end of the share's interval", nullable=True),
        _N,
    ),
    is_listed=True,
)
RANDOM_SETS = Schema(
    "random_sets",
    (
        Column("set", "int", "Number of the matched random set, counted from 0"),
        Column("num_units", "int", "Neurons in it"),
        Column("write", "float", "What they write at the sink, over what those removed do; empty under 0.1"),
        Column("rate", "float", "Sink rate at the sink without these neurons"),
        Column("remaining", "float", "That rate over the untouched one"),
    ),
    is_listed=True,
)
MINIMAL_SET = Schema(
    "minimal_set",
    (
        _LAYER,
        _EXPERT,
        _NEURON,
        Column("share", "float", "Share of the layer's squared write into the massive dimensions at the sink"),
    ),
    is_listed=True,
)
HISTOGRAMS = Schema(
    "histograms",
    (
        _CONDITION,
        _TARGET,
        _LAYER,
        _EXPERT,
        _NEURON,
        Column("place", "str", "Where the activation was recorded: sink, target or elsewhere"),
        Column("bin_low", "float", "Lower edge of the bin of activations"),
        Column("bin_high", "float", "Upper edge of the bin"),
        Column("count", "int", "Tokens in the bin"),
    ),
)
OUTPUT_ENERGY = Schema(
    "output_energy",
    (
        _LAYER,
        _EXPERT,
        _NEURON,
        Column("kind", "str", "super: a super neuron; median: the layer's neuron of median sparsity"),
        Column("rank", "int", "Place of the dimension among those of the output vector by energy, counted from 0"),
        Column("dimension", "int", "Output dimension"),
        Column("energy_share", "float", "Share of the vector's energy in this dimension"),
        Column("value", "float", "Entry of the vector"),
    ),
)

STUDY_TABLES = (
    CLAIMS,
    RATES,
    EFFECTS,
    FACTORIAL,
    MANIPULATION,
    ATTENTION_ROWS,
    NORMS,
    MEDIATION,
    RANDOM_SETS,
    MINIMAL_SET,
    HISTOGRAMS,
    OUTPUT_ENERGY,
)


KINDS = (
    Kind(
        name="study",
        called="a study",
        schemas=TRACE_TABLES + STUDY_TABLES,
        told_by=CLAIMS.name,
        headline=("claims", "verdict", "statement", "effect", "low", "high", "control"),
        page="sinkscope.studies.page",
        summary=TRACED,
        picture="sinkscope.tracing.picture",
        check=check_heads,
    ),
)
