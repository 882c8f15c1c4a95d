"""`fingerprint`: which models share an initialisation, by comparing their signatures, with a verdict for each pair.

The method `alignment`, the default, gives one of three verdicts:

- "same origin" if the false-discovery rate over the pairs of the run is at most 1 % *and* z is above that of every
  unrelated model. Unrelated models are fresh initialisations of the first model's configuration, and those that the
  user names; each is compared with both models of the pair.
- "different origin" if the upper end of the alignment's interval is below the smallest alignment that a long training
  left of a shared initialisation in our own experiments (lab/origins.md).
- "can't tell" otherwise.

`seedprint` is the published test: same origin if p < 0.01, otherwise different origin.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args

from torch import Tensor

from sinkscope.arguments import Method, check_fingerprint
from sinkscope.errors import InputError
from sinkscope.fingerprints.alignment import alignment, alignment_table
from sinkscope.fingerprints.schemas import FINGERPRINT_TABLES, PAIRS, UNRELATED
from sinkscope.fingerprints.seedprint import LEVEL, seedprint
from sinkscope.fingerprints.signature import (
    Inputs,
    Signature,
    check_made_with,
    is_signature_file,
    load_signature,
    sign,
)
from sinkscope.models.initial import INITIAL, draw
from sinkscope.models.loaded import LoadedModel, ModelLike
from sinkscope.models.loading import LoadOptions, load
from sinkscope.models.token_batches import num_embeddings
from sinkscope.progress import Work
from sinkscope.results.parts import Parts
from sinkscope.results.result import Result
from sinkscope.statistics import false_discovery_rates
from sinkscope.tracing.receipt import described
from sinkscope.user_paths import user_path

if TYPE_CHECKING:
    from sinkscope.results.run_folder import RunFolder

Verdict = Literal["same origin", "different origin", "can't tell"]
WEAKEST_RELATION = 0.016
"""The smallest alignment that a model of our experiments had with its initialisation, after 43,000 steps; others had
up to 0.045 (lab/origins.md). If an interval reaches this value, a relation cannot be ruled out. Two trained models that
share an initialisation may still lie below it."""
FRESH = 4
FRESH_SEED = 1_847_362_915
"""Seed of the first fresh initialisation. Nobody would choose it for a model of their own, and it is below 2^32, from
where torch's generator repeats itself."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The comparison of two models."""

    base: str
    suspect: str
    verdict: Verdict
    effect: float
    low: float
    high: float
    z: float
    p: float
    q: float
    num_dimensions: int
    num_unrelated: int
    """Number of comparisons of one of the two models with an unrelated one."""
    unrelated_z: float
    """The largest z of these comparisons."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Fingerprint(Result):
    """Signatures, and every pair of them that was compared."""

    kind = "fingerprint"
    schemas = FINGERPRINT_TABLES
    method: Method
    signatures: list[Signature]
    unrelated: list[Signature]
    pairs: list[Pair]
    unrelated_rows: list[dict[str, Any]]

    @property
    def story(self) -> str:
        """The result in a sentence."""
        counts = Counter(pair.verdict for pair in self.pairs)
        verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict) if verdict in counts)
        if len(self.pairs) > 1:
            return f"Of {len(self.pairs)} pairs: {verdicts}."
        (pair,) = self.pairs
        return f"{pair.suspect} and {pair.base}: {pair.verdict}."

    @property
    def caveat(self) -> str:
        """What the verdicts do not say."""
        text = "A p-value says how rarely two independent initialisations would look so alike. It is no proof of theft."
        if any(pair.verdict == "different origin" for pair in self.pairs):
            text += (
                " Different origin says that the models share no more than unrelated ones do. It is no proof of "
                "innocence: long training erases a shared initialisation too."
            )
            num_sequences, width = self.signatures[0].states.shape
            if num_sequences < width:
                text += f" {num_sequences} sequences are few for {width} dimensions: with more, a relation may show."
        return text

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json of a run."""
        inputs = self.signatures[0].inputs
        return {
            "kind": "fingerprint",
            "method": self.method,
            "story": self.story,
            "caveat": self.caveat,
            "inputs": asdict(inputs),
            "models": [{"name": model.name, "weight_hash": model.weight_hash} for model in self.signatures],
            "unrelated": [model.name for model in self.unrelated],
            "pairs": [asdict(pair) for pair in self.pairs],
            **described(*(signature.receipt for signature in self.signatures)),
        }

    @property
    def tables(self) -> dict[str, dict[str, list]]:
        """Columns by table: pairs, unrelated."""
        rows = [asdict(pair) | {"method": self.method} for pair in self.pairs]
        return {PAIRS.name: PAIRS.from_rows(rows), UNRELATED.name: UNRELATED.from_rows(self.unrelated_rows)}

    def write(self, folder: RunFolder) -> None:
        """Writes summary, tables and signatures into a run folder."""
        super().write(folder)
        (folder.path / "signatures").mkdir()
        for index, signature in enumerate([*self.signatures, *self.unrelated]):
            signature.save(folder.path / "signatures" / f"{index:03d}-{_file_name(signature.name)}.safetensors")


def fingerprint(
    models: Sequence[ModelLike | Signature],
    *,
    matrix: bool = False,
    method: Method = "alignment",
    unrelated: Sequence[ModelLike | Signature] = (),
    fresh: int = FRESH,
    vocabulary: int | None = None,
    length: int | None = None,
    num_sequences: int | None = None,
    seed: int | None = None,
    parts: Parts | None = None,
    work: Work | None = None,
    **loading: Unpack[LoadOptions],
) -> Fingerprint:
    """Compares the first model with each of the others, or with `matrix` all pairs.

        sinkscope.fingerprint(["init:runs/a", "runs/a", "runs/b"]).table("pairs")

    Models are anything that `load` takes, signatures, or files of signatures. If one is a signature, the others are
    shown the same inputs by default. Further options go to `load`. Only one model is in memory at a time.
    """
    check_fingerprint(models, method=method, unrelated=unrelated, fresh=fresh)
    options = {"vocabulary": vocabulary, "length": length, "num_sequences": num_sequences, "seed": seed}
    chosen = {name: value for name, value in options.items() if value is not None}
    # Files are read first: the inputs of signatures are the default, and other files are refused before any work.
    sources = deque(_read_if_signature(source) for source in models)
    unrelated_sources = [_read_if_signature(source) for source in unrelated]
    inputs = _inputs([*sources, *unrelated_sources], chosen)
    if inputs is None:
        sources[0] = _loaded(sources[0], loading)
        inputs = Inputs(vocabulary=num_embeddings(sources[0].model), **chosen)

    def signed(source: Any) -> Signature:
        model = source if isinstance(source, Signature) else _loaded(source, loading)
        num_ids = model.vocabulary if isinstance(model, Signature) else num_embeddings(model.model)
        if vocabulary is None and num_ids != inputs.vocabulary:
            raise InputError(
                f"{model.name} has a vocabulary of {num_ids} ids, and the other models have {inputs.vocabulary}. "
                "If the first ids mean the same tokens in all models, give their number as `vocabulary`."
            )
        if isinstance(model, Signature):
            check_made_with(model, inputs)
            return model
        return sign(model, inputs, parts=parts, progress=work(model.name) if work else None)

    signatures: list[Signature] = []
    while sources:  # popped, so that no model stays in memory once it is signed
        signatures.append(signed(sources.popleft()))
        _check_widths(signatures)
    unrelated_signatures = [signed(source) for source in unrelated_sources]
    if fresh and method == "alignment":
        dtype, device = loading.get("dtype", "auto"), loading.get("device", "auto")
        configuration = signatures[0].configuration()
        for index in range(fresh):
            fresh_model = draw(configuration, FRESH_SEED + index, name=f"fresh-{index}", dtype=dtype, device=device)
            unrelated_signatures.append(signed(fresh_model))
            del fresh_model  # only one model is in memory at a time
    _check_widths([signatures[0], *unrelated_signatures])
    signatures = _with_distinct_names(signatures)
    pairs = itertools.combinations(range(len(signatures)), 2)
    return _compare(signatures, [pair for pair in pairs if matrix or pair[0] == 0], unrelated_signatures, method)


def _compare(
    signatures: list[Signature], indices: list[tuple[int, int]], unrelated: list[Signature], method: Method
) -> Fingerprint:
    """The pairs of signatures at these indices, compared by the method."""
    rows: list[dict[str, Any]] = []
    if method == "seedprint":
        pairs = [_seedprint_pair(signatures[a], signatures[b]) for a, b in indices]
    else:
        tables = [alignment_table(signature.states, signature.embeddings) for signature in signatures]
        for other in unrelated:
            other_table = alignment_table(other.states, other.embeddings)
            for signature, table in zip(signatures, tables, strict=True):
                result = alignment(table, other_table)
                rows.append({"model": signature.name, "unrelated": other.name, "effect": result.effect, "z": result.z})
        pairs = _alignment_pairs(signatures, indices, tables, rows)
    return Fingerprint(method=method, signatures=signatures, unrelated=unrelated, pairs=pairs, unrelated_rows=rows)


def _alignment_pairs(
    signatures: list[Signature], indices: list[tuple[int, int]], tables: list[Tensor], rows: list[dict[str, Any]]
) -> list[Pair]:
    """The pairs with their verdicts by alignment; `rows` are the comparisons with unrelated models."""
    alignments = [alignment(tables[a], tables[b]) for a, b in indices]
    rates = false_discovery_rates([result.p for result in alignments])
    pairs = []
    for (a, b), result, q in zip(indices, alignments, rates, strict=True):
        names = (signatures[a].name, signatures[b].name)
        unrelated_z = [row["z"] for row in rows if row["model"] in names and not math.isnan(row["z"])]
        pair = Pair(
            base=names[0],
            suspect=names[1],
            verdict="can't tell",
            **asdict(result),
            q=float(q),
            num_unrelated=len(unrelated_z),
            unrelated_z=max(unrelated_z, default=math.nan),
        )
        pairs.append(replace(pair, verdict=alignment_verdict(pair)))
    return pairs


def alignment_verdict(pair: Pair) -> Verdict:
    """The verdict on a pair by alignment. Every comparison with NaN is false, so without numbers it is "can't tell"."""
    above_all = not pair.num_unrelated or pair.z > pair.unrelated_z
    if pair.q <= LEVEL and above_all:
        return "same origin"
    if pair.q > LEVEL and pair.high < WEAKEST_RELATION:
        return "different origin"
    return "can't tell"


def _seedprint_pair(base: Signature, suspect: Signature) -> Pair:
    """The pair with its verdict by the published test, which has no interval and no unrelated models."""
    result = seedprint(base.states, suspect.states)
    nan = math.nan
    verdict: Verdict = "same origin" if result.p < LEVEL else "different origin"
    if math.isnan(result.p):
        verdict = "can't tell"
    return Pair(
        base=base.name,
        suspect=suspect.name,
        verdict=verdict,
        effect=result.tau,
        low=nan,
        high=nan,
        z=result.z,
        p=result.p,
        q=nan,
        num_dimensions=result.num_dimensions,
        num_unrelated=0,
        unrelated_z=nan,
    )


def _check_widths(signatures: list[Signature]) -> None:
    first = signatures[0]
    for other in signatures[1:]:
        if (other.embeddings is None) != (first.embeddings is None):
            without = first if first.embeddings is None else other
            raise InputError(
                f"{without.name} has no embeddings of the width of its layers, and the other models have them. "
                "Leave it out: signatures with and without embeddings cannot be compared."
            )
        if other.width != first.width:
            raise InputError(
                f"{first.name} has {first.width} hidden dimensions, and {other.name} has {other.width}. Leave one out: "
                "only models of the same width can be compared."
            )


def _read_if_signature(source: Any) -> Any:
    """The signature in a file; any other source as it is."""
    if not isinstance(source, str | Path):
        return source
    path = user_path(str(source).removeprefix(INITIAL))  # a name that no model can have is refused here too
    return load_signature(path) if is_signature_file(source) else source


def _inputs(sources: Sequence[Any], chosen: dict[str, int]) -> Inputs | None:
    """The chosen inputs, completed from the first signature among the models; None if the vocabulary is unknown."""
    for source in sources:
        if isinstance(source, Signature):
            return Inputs(**(asdict(source.inputs) | chosen))
    return Inputs(**chosen) if "vocabulary" in chosen else None


def _loaded(source: Any, loading: LoadOptions) -> LoadedModel:
    """The loaded model, named as in the call: its folder's name is "model" for every training run."""
    if isinstance(source, LoadedModel):
        return source
    loaded = load(source, **loading)
    if not isinstance(source, str | Path):
        return loaded
    # Run folders are passed on to others, so of an absolute path only the last part is recorded.
    prefix = INITIAL if str(source).startswith(INITIAL) else ""
    path = user_path(str(source).removeprefix(prefix))
    return replace(loaded, name=f"{prefix}{path.name}" if path.is_absolute() else str(source))


def _with_distinct_names(signatures: list[Signature]) -> list[Signature]:
    """The same signatures; a name that occurs again gets a number, such as "model (2)"."""
    counts: dict[str, int] = {}
    result = []
    for signature in signatures:
        count = counts[signature.name] = counts.get(signature.name, 0) + 1
        result.append(signature if count == 1 else replace(signature, name=f"{signature.name} ({count})"))
    return result


def _file_name(name: str) -> str:
    return (
        "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name).strip("-.")[:80] or "model"
    )
