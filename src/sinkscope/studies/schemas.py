"""The tables that a study writes beside those of a trace, every column with its meaning, and the kind of result.

Verdicts are holds, does not hold, not applicable and undecided. A condition is what was done to the model, such as
`mask_to_self`. The baseline is called `untouched`, which has neither target nor factor.
"""

from __future__ import annotations

from dataclasses import replace

from sinkscope.results.kinds import Kind
from sinkscope.results.tables import Column, Schema
from sinkscope.results.validated import Name
from sinkscope.tracing.schemas import CHAIN_PANELS, TRACE_TABLES, TraceSummary, check_heads

_TARGET = Column("target", "int", "Position that the condition acts on; null for the baseline", nullable=True)
_FACTOR = Column("factor", "float", "Strength of the intervention, such as 8; null if it has none", nullable=True)
_CONDITION = Column("condition", "str", "What was done to the model, such as mask_to_self; untouched is the baseline")
_LAYER = Column("layer", "int", "Layer, counted from 0")
_EXPERT = Column("expert", "int", "Expert of the neuron; -1 is the shared expert; null in a dense layer", nullable=True)
_NEURON = Column("neuron", "int", "Number of the neuron within the layer or expert, counted from 0")
_ENTERING = Column(
    "entering", "str", "Where the value aggregation was read: as it enters the output projection, or the norm before it"
)
_N = Column("n", "int", "Number of judging sequences behind the row")

CLAIMS = Schema(
    "claims",
    (
        Column("id", "str", "Name of the claim, such as variance_suffices"),
        Column("statement", "str", "The claim in words"),
        Column(
            "link",
            "str",
            "Link of the chain: variance_discrepancy, super_neurons, channel_sparsity, dimension_disparity, "
            "directional_collapse, sink, or causal",
        ),
        Column("verdict", "str", "holds, does not hold, not applicable, or undecided"),
        Column("effect", "float", "The number that was judged", nullable=True),
        Column("low", "float", "Lower end of its interval", nullable=True),
        Column("high", "float", "Upper end of its interval", nullable=True),
        Column("confidence", "float", "Confidence level of the interval, such as 0.95", nullable=True),
        Column("threshold", "float", "What the end of the interval is compared with", nullable=True),
        Column("rule", "str", "When the claim holds, such as 'low >= threshold'"),
        Column("control", "float", "The same number under the control", nullable=True),
        Column("control_name", "str", "What was done for the control", nullable=True),
        _N,
        Column("p_value", "float", "p-value, before Holm's correction for the number of claims", nullable=True),
        Column("note", "str", "What else must be known to read the verdict; often empty"),
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
        Column(
            "later_rate",
            "float",
            "Sink rate counted over later queries only, without the position's own; interventions are judged on it",
        ),
    ),
)
FACTORIAL = Schema(
    "factorial",
    (
        Column(
            "mixing",
            "str",
            "Which keys the target attends to in the early layers: untouched (all earlier ones), see_self, "
            "see_previous, ...",
        ),
        Column(
            "variance_of", "str", "The mixing to whose level the variance was brought; null if it was left alone", True
        ),
        Column("energy_of", "str", "The mixing to whose level the energy was brought; null if it was left alone", True),
        _ENTERING,
        Column("targets", "str", "Positions acted on, one at a time; the numbers are means over them"),
        Column("rise", "float", "Change of the sink rate at the target, counted over later queries"),
        Column("low", "float", "Lower end of its interval"),
        Column("high", "float", "Upper end of its interval"),
        Column(
            "variance", "float", "Variance across sequences over that of the baseline, geometric mean over layers", True
        ),
        Column("energy", "float", "Energy (mean square) over that of the baseline, geometric mean over layers", True),
        Column(
            "squared_mean",
            "float",
            "Squared mean over sequences, over that of the baseline, geometric mean over layers",
            True,
        ),
        Column(
            "mean_share",
            "float",
            "|mu| / |o|, norm of the mean over that of the aggregation; over the baseline's, geometric mean over "
            "layers",
            True,
        ),
        Column("missed", "str", "How the condition failed its manipulation check; empty if it passed"),
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
        Column(
            "variance",
            "float",
            "Variance across sequences of the value aggregation at the target, over that of the baseline",
            True,
        ),
        Column("energy", "float", "Its energy (mean square), over that of the baseline", True),
        Column("squared_mean", "float", "Its squared mean over sequences, over that of the baseline", True),
        Column(
            "mean_share", "float", "|mu| / |o|, norm of its mean over its own norm; over that of the baseline", True
        ),
        Column("missed", "str", "How the condition failed its manipulation check; empty if it passed"),
    ),
)
EFFECTS = Schema(
    "effects",
    (
        _CONDITION,
        _TARGET,
        _FACTOR,
        Column("quantity", "str", "What was measured, such as sink_rate_at_target or loss"),
        Column("before", "float", "Its mean in the baseline; null if every state there is zero", True),
        Column("after", "float", "Its mean under the condition", True),
        Column("difference", "float", "after - before, paired by sequence", True),
        Column("low", "float", "Lower end of the difference's interval", True),
        Column("high", "float", "Upper end of the difference's interval", True),
        _N,
    ),
    is_listed=True,
)
_BEFORE_AND_AFTER = (
    Column("before", "float", "Its mean in the baseline"),
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
        Column("quantity", "str", "entropy or mixing (sum a^2) of the attention of one query, mean over layers"),
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
        Column(
            "place",
            "str",
            "Where the norm of the residual was read: target, sink, or elsewhere (mean of the other positions)",
        ),
        *_BEFORE_AND_AFTER,
    ),
)
MEDIATION = Schema(
    "mediation",
    (
        Column("intervention", "str", "The intervention whose effect is taken apart: mask_to_self or amplify_variance"),
        Column("mediator", "str", "What was held at its baseline values: super_neurons or massive_dimensions"),
        Column("total", "float", "Rise of the sink rate at the target"),
        Column(
            "random",
            "float",
            "Rise under the control: as large a change of the super neurons along other directions, or as many matched "
            "random dimensions held",
        ),
        Column("direct", "float", "Rise while the mediator is held"),
        Column("indirect", "float", "total - direct"),
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
        Column("num_units", "int", "Number of neurons in it"),
        Column(
            "write",
            "float",
            "What they write at the sink, over what the minimal set or the writers do",
        ),
        Column("rate", "float", "Sink rate at the sink without these neurons"),
        Column("remaining", "float", "That rate over the rate in the baseline"),
    ),
    is_listed=True,
)
MINIMAL_SET = Schema(
    "minimal_set",
    (
        _LAYER,
        _EXPERT,
        _NEURON,
        Column(
            "share", "float", "The neuron's share of the layer's squared write into the massive dimensions at the sink"
        ),
        Column("left_alone", "float", "Share of the sink that is left without this neuron alone", True),
        Column("left_low", "float", "Lower end of its interval", True),
        Column("left_high", "float", "Upper end of its interval", True),
        Column(
            "role",
            "str",
            "needed: without it alone less than half of the sink is left, with the whole interval; back-up: others of "
            "the set can stand in for it; null if it was not removed alone",
            True,
        ),
    ),
    is_listed=True,
)
NEEDED, BACK_UP = "needed", "back-up"
"""What a neuron of the minimal set is."""
SINGLE_LAYERS = Schema(
    "single_layers",
    (
        _LAYER,
        Column("target", "int", "Position that attends only to itself in this layer alone"),
        Column("rise", "float", "Change of its sink rate, counted over later queries"),
        Column("low", "float", "Lower end of its interval"),
        Column("high", "float", "Upper end of its interval"),
        _N,
    ),
    is_listed=True,
    can_lack=True,
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
        Column("kind", "str", "super: a super neuron; median: the layer's neuron of median sparsity, for comparison"),
        Column("rank", "int", "Rank of the dimension among those of the output vector, by energy, counted from 0"),
        Column("dimension", "int", "Output dimension"),
        Column("energy_share", "float", "Share of the vector's energy in this dimension"),
        Column("value", "float", "Entry of the vector"),
    ),
)

TEXT_CLAIMS = replace(CLAIMS, name="text_claims", can_lack=True)
"""The claims that decide the mechanism, judged on text beside random tokens."""
TEXT_LOSSES = Schema(
    "text_losses",
    (
        Column(
            "removed",
            "str",
            "What was removed: the neurons that write the sink, or its massive dimensions, everywhere or at the sink "
            "alone; or as many random ones, the control",
        ),
        Column("loss", "float", "Mean loss on text without it, in nats"),
        Column("change", "float", "Change against the baseline, paired by sequence"),
        Column("low", "float", "Lower end of its interval"),
        Column("high", "float", "Upper end of its interval"),
        _N,
    ),
    can_lack=True,
)
HEAD_ROLES = Schema(
    "head_roles",
    (
        _LAYER,
        Column("head", "int", "Head with the sink, counted from 0"),
        Column("role", "str", "dormant or active on both kinds of text, depends on the kind, or undecided"),
        *(
            Column(name, "float", f"{what} on {kind}, over what the heads of the model are worth on average")
            for kind in ("text", "code")
            for name, what in (
                (kind, "Rise of the loss without the head, to first order,"),
                (f"{kind}_low", "Lower end of its interval"),
                (f"{kind}_high", "Upper end of its interval"),
            )
        ),
    ),
    can_lack=True,
)

STUDY_TABLES = (
    CLAIMS,
    TEXT_CLAIMS,
    TEXT_LOSSES,
    HEAD_ROLES,
    RATES,
    EFFECTS,
    FACTORIAL,
    MANIPULATION,
    ATTENTION_ROWS,
    NORMS,
    MEDIATION,
    RANDOM_SETS,
    MINIMAL_SET,
    SINGLE_LAYERS,
    HISTOGRAMS,
    OUTPUT_ENERGY,
)


class StudySummary(TraceSummary):
    """The checked entries of a study's summary; the first two are not in those of earlier versions."""

    mechanism: Name | None = None
    cause: str | None = None


KINDS = (
    Kind(
        name="study",
        called="a study",
        schemas=TRACE_TABLES + STUDY_TABLES,
        told_by=CLAIMS.name,
        headline=("claims", "verdict", "statement", "effect", "low", "high", "control"),
        page="sinkscope.studies.page",
        summary=StudySummary,
        main_figures=CHAIN_PANELS,
        is_pictured=True,
        check=check_heads,
    ),
)
