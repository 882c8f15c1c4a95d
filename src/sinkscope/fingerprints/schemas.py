"""The tables that `sinkscope fingerprint` writes; every column is declared with its meaning."""

from __future__ import annotations

from sinkscope.results.tables import Column, Schema

PAIRS = Schema(
    "pairs",
    (
        Column("base", "str", "First model of the pair"),
        Column("suspect", "str", "Second model of the pair"),
        Column("method", "str", "alignment, or seedprint: the published test"),
        Column("verdict", "str", "same origin, different origin, or can't tell"),
        Column("effect", "float", "Alignment, 1 for a model with itself; mean Kendall tau of seedprint", nullable=True),
        Column("low", "float", "Lower end of the effect's 95 % interval over dimensions", nullable=True),
        Column("high", "float", "Upper end of the interval", nullable=True),
        Column("z", "float", "Effect in standard deviations of unrelated models", nullable=True),
        Column("p", "float", "One-sided p-value", nullable=True),
        Column("q", "float", "Rate of false discoveries if this pair is called same origin", nullable=True),
        Column("num_dimensions", "int", "Hidden dimensions compared"),
        Column("num_unrelated", "int", "Comparisons of either model with an unrelated one"),
        Column("unrelated_z", "float", "Largest z among them", nullable=True),
    ),
)
UNRELATED = Schema(
    "unrelated",
    (
        Column("model", "str", "A model of the run"),
        Column("unrelated", "str", "A fresh initialisation, or a model that the user said is unrelated"),
        Column("effect", "float", "Their alignment", nullable=True),
        Column("z", "float", "Its z", nullable=True),
    ),
)
FINGERPRINT_TABLES = (PAIRS, UNRELATED)
