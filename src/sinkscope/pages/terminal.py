"""What people see of a result on a terminal: a short table and one sentence, on standard output.

Text from models is printed as text, never as markup, and nothing in it moves the cursor.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sinkscope.pages.text import number, printed

if TYPE_CHECKING:
    from sinkscope.audits.audited import Audit
    from sinkscope.audits.remedied import Remedied
    from sinkscope.fingerprints.fingerprint import Fingerprint
    from sinkscope.initial_bias.bias import Bias
    from sinkscope.interventions.intervene import Intervened
    from sinkscope.models.loading import LoadedModel
    from sinkscope.studies.study import Study
    from sinkscope.tracing.findings import Findings
    from sinkscope.tracing.movers import SuperNeuron
    from sinkscope.tracing.trace import Trace

NUM_SHOWN = 8
"""Rows of a list that are shown; the tables hold all of them."""


def show_trace(trace: Trace, loaded: LoadedModel, path: Path) -> None:
    console, findings, recording = Console(soft_wrap=True), trace.findings, trace.recording
    tokens = recording.batch.describe()
    kind = {"repeat": "repeated"}.get(tokens["kind"], tokens["kind"])
    _say(
        console,
        (
            f"{loaded.name} ({recording.anatomy.family.name}, {recording.num_layers} layers, {loaded.dtype}), "
            f"{tokens['count']} sequence{'s' * (tokens['count'] != 1)} of {_length(tokens)} {kind} tokens"
            f"{', BOS first' if tokens['bos'] else ''}; "
            f"attention by {recording.attention_path}, {recording.elapsed_s:.1f} s"
        ),
    )
    if findings.sinks:
        rows = [
            (
                str(s.position),
                f"{s.rate:.1%}",
                "" if math.isnan(s.low) else f"{s.low:.1%} to {s.high:.1%}",
                f"{s.mean_attention:.3f}",
                _span(s.layers),
            )
            for s in findings.sinks
        ]
        _table(console, "sinks", ("position", "sink rate", "95 % interval", "mean attention", "layers"), rows)
    if trace.token_sinks:
        rows = [
            (f"'{trace.token_text(s.id)}'", f"{s.num_sequences} of {s.num_with} with it", _span(list(s.positions)))
            for s in trace.token_sinks
        ]
        _table(console, "sinks within texts, by token", ("token", "texts", "positions"), rows)
    if findings.super_neurons:
        rows = [
            (
                str(u.layer),
                "-" if u.expert is None else str(u.expert),
                str(u.neuron),
                str(u.dimension),
                u.role,
                number(u.write),
                f"{u.write_share:.1%}",
                f"{number(u.contrast)}x",
                f"{float(u.sparsity.top_share):.1%}",
            )
            for u in _from_the_birth(findings)
        ]
        columns = ("layer", "expert", "neuron", "dimension", "role", "write", "share", "contrast", "top share")
        _table(console, f"super neurons at position {findings.focus[0]}", columns, rows)
    _say(console, trace.story, style="bold")
    _say(console, f"Tables and summary: {path}")


def _from_the_birth(findings: Findings) -> list[SuperNeuron]:
    """The super neurons at the foremost position: first those that begin its disparity, which the story names."""
    births = findings.birth_layers
    units = [unit for unit in findings.super_neurons if unit.position == findings.focus[0]]
    return sorted(
        units,
        key=lambda u: births.index(u.layer) if u.layer in births and u.role == "writes" else len(births),
    )


def _length(tokens: dict) -> str:
    """How long the sequences are, such as 12 to 30 for texts of unequal length."""
    lengths = tokens.get("whole") or [tokens["length"]]
    return str(min(lengths)) if min(lengths) == max(lengths) else f"{min(lengths)} to {max(lengths)}"


def show_study(study: Study, path: Path) -> None:
    """The answer in a sentence, the verdicts as a table, and how many there are of each."""
    console = Console()
    _say(console, study.verdict, style="bold")
    rows = []
    for judgement in study.judgements:
        interval = "" if judgement.low is None else f"{judgement.low:.3g} to {judgement.high:.3g}"
        effect = "" if judgement.effect is None else f"{judgement.effect:.3g}"
        control = "" if judgement.control is None else f"{judgement.control:.3g}"
        rows.append((judgement.id.replace("_", " "), judgement.verdict, effect, interval, control))
    _table(console, "claims", ("claim", "verdict", "effect", "interval", "control"), rows, limit=len(rows))
    if study.counts:
        _say(console, study.counts)
    _say_where(console, path)


def show_intervened(result: Intervened, path: Path) -> None:
    """Every observable at the positions acted on and at the sinks, before, after and under the control."""
    from sinkscope.interventions.page import position_texts

    console, texts = Console(), position_texts(result.summary)
    rows = [
        (quantity, f"{position} {texts.get(position, '')}".strip(), *(f"{value:.4g}" for value in values))
        for quantity, position, *values in zip(*result.tables["means"].values(), strict=True)
    ]
    columns = ("quantity", "position", "before", "after", "control")
    _table(console, "means over layers", columns, rows, limit=len(rows))
    for arm in ("before", "after", "control"):
        _say(console, f"{arm.capitalize()}: {getattr(result, arm).story}")
    _say(console, f"The control: {result.control_is}. Calibrated on {result.calibrated_on}.")
    _say_where(console, path)


def show_bias(result: Bias, path: Path) -> None:
    """The preferred tokens, what each control changes, what training leaves, and the answer in sentences."""
    console, summary = Console(), result.summary
    rows = [
        (name, f"{entry['value']:.4g}", _ends(entry["low"], entry["high"])) for name, entry in summary["bias"].items()
    ]
    _table(console, "bias", ("quantity", "value", "95 % interval"), rows)
    rows = []
    for name, entry in summary["controls"].items():
        if "refused" in entry:
            rows.append((name, "refused", "", ""))
            continue
        deficit, cosine = entry["entropy_deficit"], entry["inter_cosine"]
        change = f"{deficit['difference']:+.3g}"
        rows.append(
            (name, change, _ends(deficit["difference_low"], deficit["difference_high"]), f"{cosine['difference']:+.3g}")
        )
    if rows:
        _table(console, "change under each control", ("control", "entropy deficit", "interval", "inter cosine"), rows)
    rows = [
        (
            row["checkpoint"],
            f"{row['value']:.3f}",
            _ends(row["low"], row["high"]),
            _number(row["ceiling"]),
            _number(row["other_seeds"]),
        )
        for row in summary["persistence"]
    ]
    if rows:
        columns = ("checkpoint", "correlation", "interval", "ceiling", "other seeds")
        _table(console, "rank correlation with the beginning", columns, rows, limit=len(rows))
    for name, entry in summary["controls"].items():
        if "refused" in entry:
            _say(console, f"{name}: {entry['refused']}")
    _say(console, result.story)
    _say_where(console, path)


def show_audit(result: Audit, path: Path) -> None:
    """What each scheme costs, what to do about it, and the answer in sentences."""
    from sinkscope.audits.schemes import scheme_in_words
    from sinkscope.audits.texts import held_out_in_words

    console, batch = Console(), result.batch
    _say(console, f"{result.loaded.name}, {held_out_in_words(batch.num_sequences, batch.length, batch.source)}")
    rows = [
        (
            scheme_in_words(cell.scheme),
            f"{cell.measured.change:+.4f}",
            _ends(cell.measured.low, cell.measured.high),
            f"{cell.predicted:.4f}",
        )
        for cell in result.at("model")
    ]
    columns = ("scheme", "damage", "95 % interval", "predicted")
    _table(console, "change of the loss, in nats a token", columns, rows, limit=len(rows))
    rows = [
        (
            trial.remedy,
            scheme_in_words(trial.scheme),
            f"{trial.won.change:.4f} of {trial.damage.change:.4f}",
            _ends(trial.won.low, trial.won.high),
            f"{trial.control.change:+.4f}",
        )
        for trial in result.advice
    ]
    if rows:
        columns = ("remedy", "scheme", "wins back", "95 % interval", "control")
        _table(console, "advice, the largest effect first", columns, rows, limit=2 * NUM_SHOWN)
    for name, reason in result.refused.items():
        _say(console, f"{name.capitalize()} is not possible here: {reason}")
    _say(
        console,
        f"Rank correlation of prediction and measurement over {len(result.at('group'))} cells: "
        f"{result.rank_correlation:.2f}; of two halves of the texts: {result.repeatability:.2f}",
    )
    if result.torchao_says is not None:
        _say(console, result.torchao_says)
    _say(console, result.story, style="bold")
    _say_where(console, path)


def _say_where(console: Console, path: Path) -> None:
    """The page of a run, or its folder where no page could be drawn."""
    page = path / "report.html"
    _say(console, f"Written to {page if page.is_file() else path}")


def _ends(low: float, high: float) -> str:
    return "" if math.isnan(low) else f"{low:.3g} to {high:.3g}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def show_fingerprint(result: Fingerprint, path: Path) -> None:
    """The pairs as a table, surest relations first, and the answer in a sentence."""
    console = Console()
    pairs = sorted(result.pairs, key=lambda pair: (math.isnan(pair.z), -pair.z))
    rows = [
        (
            pair.base,
            pair.suspect,
            pair.verdict,
            f"{pair.effect:.3f}",
            "" if math.isnan(pair.low) else f"{pair.low:.3f} to {pair.high:.3f}",
            f"{pair.z:.1f}",
            _tail(pair.p if math.isnan(pair.q) else pair.q),
        )
        for pair in pairs
    ]
    columns = (
        "base",
        "suspect",
        "verdict",
        "tau" if result.method == "seedprint" else "alignment",
        "95 % interval",
        "z",
        "p" if result.method == "seedprint" else "q",
    )
    _table(console, f"pairs by {result.method}", columns, rows, limit=4 * NUM_SHOWN)
    _say(console, result.story, style="bold")
    _say(console, result.caveat)
    _say(console, f"Written to {path}")


def show_remedied(result: Remedied, path: Path) -> None:
    """The losses before and after, in 16 bits and in 8, and whether each remedy helps."""
    from sinkscope.audits.schemes import SCHEMES, scheme_in_words
    from sinkscope.audits.texts import held_out_in_words

    console = Console()
    _say(console, f"{result.loaded.name}, {held_out_in_words(*result.num_tokens, result.source)}")
    rows = [
        (
            row["model"] + " (control)" * row["control"],
            scheme_in_words(row["scheme"]) if row["scheme"] in SCHEMES else row["scheme"],
            f"{row['loss']:.4f}",
            f"{row['change']:+.4f}",
            _ends(row["low"], row["high"]),
        )
        for row in result.summary["losses"]
    ]
    columns = ("model", "scheme", "loss", "change", "95 %")
    _table(console, "loss in nats a token, and its change from the original in 16 bits", columns, rows, limit=len(rows))
    for verdict in result.verdicts:
        _say(console, verdict)
    _say(console, f"Written to {path}")


def show_families(rows: list[dict]) -> None:
    columns = ("family", "blocks", "output projection", "feed-forward", "notes")
    _table(
        Console(), "families", columns, [tuple(str(value) for value in row.values()) for row in rows], limit=len(rows)
    )


def show_anatomy(name: str, parts: dict) -> None:
    console = Console(soft_wrap=True)
    _say(console, name, style="bold")
    for key, value in parts.items():
        _say(console, f"  {key}: {value}")


def _tail(probability: float) -> str:
    """A p-value as text; far tails are not to be taken literally."""
    return "< 1e-12" if probability < 1e-12 else f"{probability:.2g}"


def _table(
    console: Console, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], limit: int = NUM_SHOWN
) -> None:
    title = f"{title} ({limit} of {len(rows)})" if len(rows) > limit else title
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # for 80 columns
    for column in columns:
        # The end of a name tells two checkpoints apart; words in a heading stay whole.
        table.add_column(column, overflow="fold", min_width=max(map(len, column.split())))
    for row in rows[:limit]:
        table.add_row(*(_text(console, cell) for cell in row))
    console.print(table)


def _say(console: Console, text: str, **style: str) -> None:
    console.print(_text(console, text, **style))


def _text(console: Console, text: str, **style: str) -> Text:
    return Text(printed(text, console.encoding), **style)  # type: ignore[arg-type]


def _span(layers: list[int]) -> str:
    """0, 2-5, 9 for [0, 2, 3, 4, 5, 9]."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], layer]
        else:
            spans.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
