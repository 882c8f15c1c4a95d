"""The tables that `sinkscope audit` and `sinkscope remedy` write; every column is declared with its meaning.

A damage is a change of the next-token loss in nats a token; its interval is at 95 %, over held-out texts.
"""

from __future__ import annotations

from pydantic import BaseModel

from sinkscope.results.kinds import Kind
from sinkscope.results.run import Run, check_known
from sinkscope.results.tables import Column, Schema
from sinkscope.results.validated import Name, Whole, refused

_MODULE = Column("module", "str", "Name of the module, as named_modules() gives it")
_LAYER = Column("layer", "int", "Layer, counted from 0")
_KIND = Column("kind", "str", "Name of the module within its layer")
_SCHEME = Column("scheme", "str", "What is made cheaper; docs/audit.md defines each")
_WHAT = Column("what", "str", "Where it acts: linear layers, cache or window")
_BITS = Column("bits", "float", "Bits a weight of the linear layers, or a number of the cache, on average")


def _interval(name: str, meaning: str) -> tuple[Column, Column, Column]:
    return (
        Column(name, "float", meaning),
        Column(f"{name}_low", "float", "Lower end of its interval", nullable=True),
        Column(f"{name}_high", "float", "Upper end of its interval", nullable=True),
    )


def _whole(name: str, meaning: str) -> tuple[Column, ...]:
    """A value of the whole model, with its interval."""
    return (
        Column(name, "float", f"{meaning}; of the whole model", nullable=True),
        Column(f"{name}_low", "float", "Lower end of its interval", nullable=True),
        Column(f"{name}_high", "float", "Upper end of its interval", nullable=True),
    )


DECISIONS = Schema(
    "decisions",
    (
        _SCHEME,
        _WHAT,
        Column("verdict", "str", "safe, repair, avoid, or undecided where the texts are too few"),
        _BITS,
        *_interval("costs", "Damage as it is"),
        *_interval("left", "Damage after the repair, where there is one"),
        Column("repair", "str", "The remedy that engines load and that leaves least; null without one", nullable=True),
    ),
    is_listed=True,
)
READINGS = Schema(
    "readings",
    (
        _MODULE,
        _LAYER,
        _KIND,
        Column("what", "str", "inputs of a linear layer, or keys or values of attention"),
        Column("largest", "float", "Largest magnitude"),
        Column("channel_ratio", "float", "Largest magnitude over that of the median channel", nullable=True),
        Column("token_ratio", "float", "Largest magnitude over that of the median token", nullable=True),
        Column("kurtosis", "float", "Pearson's kurtosis of all values; 3 for a Gaussian", nullable=True),
        Column("sink_energy", "float", "Share of the sum of squares in sink tokens", nullable=True),
        Column(
            "massive_energy",
            "float",
            "Share of it in values of at least 10 times their token's mean magnitude",
            nullable=True,
        ),
    ),
)
PREDICTIONS = Schema(
    "predictions",
    (
        _MODULE,
        _LAYER,
        _KIND,
        _SCHEME,
        _WHAT,
        Column("predicted", "float", "Predicted damage of the scheme in this module"),
    ),
)
DAMAGES = Schema(
    "damages",
    (
        Column("level", "str", "Where the scheme acted: model, group (a third of the layers) or module"),
        Column("place", "str", "Which group of layers, or which module; all for the model"),
        _SCHEME,
        _WHAT,
        Column("predicted", "float", "Predicted damage"),
        *_interval("measured", "Measured damage"),
        Column("control", "float", "Damage with 24 bits, or a window of all keys; of the whole model", nullable=True),
        *_whole("divergence", "KL divergence of the predictions from the baseline's, in nats a token"),
        *_whole("same_top", "Share of tokens after which the same one is the most probable"),
    ),
    is_listed=True,
)
TRIALS = Schema(
    "remedies",
    (
        Column("remedy", "str", "Name of the remedy"),
        _SCHEME,
        Column("damage", "float", "Damage of the scheme without the remedy"),
        *_interval("left", "Damage with the remedy"),
        *_interval("won", "Damage that the remedy recovers"),
        *_interval("control", "Damage that its control recovers"),
        Column("holds", "bool", "Whether the remedy recovers something, and more than its control on the same texts"),
        Column("what", "str", "Which tokens, modules or basis, in words"),
        _BITS,
        Column("is_loaded", "bool", "Whether engines load what it needs; the others are experiments"),
        Column("control_is", "str", "The control in words"),
    ),
    is_listed=True,
)
CURVE = Schema(
    "curve",
    (
        _SCHEME,
        Column("num_groups", "int", "Fused groups of modules in 16 bits, those with the largest predicted damage"),
        Column("num_modules", "int", "Modules in them"),
        _BITS,
        *_interval("left", "Damage that remains"),
    ),
    is_listed=True,
)
SINKS = Schema(
    "sink_tokens",
    (
        Column("text", "int", "Number of the held-out text"),
        Column("position", "int", "Position of a sink in it"),
        Column("token", "int", "Token id"),
        Column("token_text", "str", "The token decoded; null without a tokenizer", nullable=True),
        Column("before", "str", "Up to 8 tokens before it, decoded; null without a tokenizer", nullable=True),
        Column("after", "str", "Up to 8 tokens after it, decoded; null without a tokenizer", nullable=True),
    ),
    is_listed=True,
)
AUDIT_TABLES = (DECISIONS, READINGS, PREDICTIONS, DAMAGES, TRIALS, CURVE, SINKS)


LOSSES = Schema(
    "losses",
    (
        Column("model", "str", "Which model: baseline, with one remedy or its control, or all together"),
        Column("control", "bool", "Whether it is the control of the remedy before it"),
        Column("scheme", "str", "16 bits, or 8 bits with one scale per tensor; docs/audit.md defines each"),
        Column("loss", "float", "Next-token loss on held-out texts, in nats a token"),
        Column("change", "float", "Loss minus that of the baseline in 16 bits"),
        Column("low", "float", "Lower end of its 95 % interval over texts"),
        Column("high", "float", "Upper end of it"),
        Column(
            "won_back",
            "float",
            "Share of the scheme's damage that is recovered; null where none is seen",
            nullable=True,
        ),
        Column(
            "won_low",
            "float",
            "Lower end of its 95 % interval over texts; the damage itself is taken as exact",
            nullable=True,
        ),
        Column("won_high", "float", "Upper end of it", nullable=True),
    ),
)


CONTROL_FAILS = 0.005
"""A control of the rounding that changes the loss by more has failed, and so has what is measured beside it."""
PLACES = ("linear", "cache", "window")
VERDICTS = ("safe", "repair", "undecided", "avoid")


def check_audit(run: Run) -> None:
    """Refuses unknown places and verdicts, and sink tokens with a text between neighbours without one."""
    for name in ("decisions", "predictions", "damages"):
        check_known(run.path / f"{name}.parquet", "what", run.tables[name], PLACES)
    check_known(run.path / "decisions.parquet", "verdict", run.tables["decisions"], VERDICTS)
    sinks = run.tables["sink_tokens"]
    for text, *around in zip(sinks["token_text"], sinks["before"], sinks["after"], strict=True):
        if text is not None and None in around:
            raise refused(run.path / "sink_tokens.parquet", "a token with a text, between tokens without one")


class Source(BaseModel):
    source: Name | None = None


class AuditSummary(BaseModel):
    model: Name
    family: Name
    tokens: Source
    loss: float
    story: str
    refused: dict[str, str]
    rank_correlation: float | None = None
    repeatability: float | None = None
    sinks_per_text: float


class RemedySummary(BaseModel):
    model: Name
    story: str
    num_texts: Whole
    length: Whole
    source: Name | None = None


KINDS = (
    Kind(
        name="audit",
        called="a run of sinkscope audit",
        schemas=AUDIT_TABLES,
        told_by=DAMAGES.name,
        headline=("damages", "level", "place", "scheme", "predicted", "measured", "measured_low", "measured_high"),
        page="sinkscope.audits.audit_page",
        main_figures=("remedies", "scatter"),
        summary=AuditSummary,
        check=check_audit,
    ),
    Kind(
        name="remedy",
        called="a remedied model",
        schemas=(LOSSES,),
        told_by=LOSSES.name,
        headline=("losses", "model", "scheme", "loss", "change", "won_back"),
        page="sinkscope.audits.remedy_page",
        summary=RemedySummary,
        sized_by=None,
    ),
)
