"""The tables that `sinkscope fingerprint` writes; every column is declared with its meaning."""

from __future__ import annotations

from pydantic import BaseModel

from sinkscope.results.kinds import Kind
from sinkscope.results.run import Run, check_known
from sinkscope.results.tables import Column, Schema
from sinkscope.results.validated import Name, Whole, refused

PAIRS = Schema(
    "pairs",
    (
        Column("base", "str", "First model of the pair"),
        Column("suspect", "str", "Second model of the pair"),
        Column("method", "str", "alignment, or seedprint: the published test"),
        Column("verdict", "str", "same origin, different origin, or can't tell"),
        Column(
            "effect", "float", "Alignment, 1 for a model with itself; for seedprint the mean Kendall tau", nullable=True
        ),
        Column("low", "float", "Lower end of the effect's 95 % interval over dimensions", nullable=True),
        Column("high", "float", "Upper end of the interval", nullable=True),
        Column("z", "float", "Effect in standard deviations of what unrelated models would show", nullable=True),
        Column("p", "float", "One-sided p-value", nullable=True),
        Column(
            "q",
            "float",
            "False-discovery rate if this pair and all with a smaller p are called same origin",
            nullable=True,
        ),
        Column("num_dimensions", "int", "Hidden dimensions compared"),
        Column("num_unrelated", "int", "Number of comparisons of one of the two models with an unrelated one"),
        Column("unrelated_z", "float", "Largest z among them", nullable=True),
    ),
    is_listed=True,
)
UNRELATED = Schema(
    "unrelated",
    (
        Column("model", "str", "A model of the run"),
        Column("unrelated", "str", "A fresh initialisation, or a model that the user named as unrelated"),
        Column("effect", "float", "Alignment of the two", nullable=True),
        Column("z", "float", "Its z, as in the table pairs", nullable=True),
    ),
    is_listed=True,
)
FINGERPRINT_TABLES = (PAIRS, UNRELATED)


class Inputs(BaseModel):
    vocabulary: Whole
    length: Whole
    num_sequences: Whole


class Model(BaseModel):
    name: Name


class Summary(BaseModel):
    method: Name
    story: str
    caveat: str
    inputs: Inputs
    models: list[Model]


METHOD = {
    "alignment": "Every model reads the same uniformly random sequences. Alignment correlates the whitened ranks of "
    "their hidden dimensions one by one, in the last layer and in the embeddings of the last tokens: 1 for a model "
    "with itself, 0 on average for models that began with different weights, however alike they respond. z counts "
    "standard deviations over random permutations of one model's dimensions; q is the false-discovery rate over "
    "the pairs of this run. Same origin needs q of at most 1 % and a z above that of every unrelated model.",
    "seedprint": "The published test: Kendall's tau over the tenth of the dimensions with the smallest mean that both "
    "models share. Its p-value assumes independent dimensions and is not calibrated; use it for comparison only.",
}
"""Each method in words."""
MOST_MODELS = 1000


def check_pairs(run: Run) -> None:
    """Refuses models without a name, and pairs of others than those that the summary lists."""
    models, method = run.summary["models"], run.summary["method"]
    if not 0 < len(models) <= MOST_MODELS:
        raise refused(run.path / "summary.json", f"it lists {len(models)} models, not 1 to {MOST_MODELS}")
    if method not in METHOD:
        raise refused(run.path / "summary.json", f"method is {method!r}, not one of {', '.join(METHOD)}")
    for column in ("base", "suspect"):
        check_known(run.path / "pairs.parquet", column, run.tables["pairs"], {model["name"] for model in models})


KINDS = (
    Kind(
        name="fingerprint",
        called="a run of sinkscope fingerprint",
        schemas=FINGERPRINT_TABLES,
        told_by=PAIRS.name,
        headline=("pairs", "base", "suspect", "verdict", "effect", "low", "high", "z", "q"),
        page="sinkscope.fingerprints.page",
        summary=Summary,
        sized_by=None,
        check=check_pairs,
    ),
)
