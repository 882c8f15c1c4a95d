"""What `remedy` gives back: the remedied model with its card, its losses beside the baseline's, and what helps.

Axes: N texts, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from sinkscope.audits.advice import NEGLIGIBLE, needs_remedy
from sinkscope.audits.damage import Damage, damage
from sinkscope.audits.formats import W8A8_STATIC, W8A8_TENSOR
from sinkscope.audits.prefix import LOADER, SinkPrefix
from sinkscope.audits.recipe import write_scheme
from sinkscope.audits.schemas import LOSSES
from sinkscope.audits.schemes import linear_scheme
from sinkscope.audits.static_scales import STATIC_BITS
from sinkscope.audits.texts import held_out_in_words
from sinkscope.errors import InputError
from sinkscope.models.checkpoint_checks import first_line
from sinkscope.models.loaded import LoadedModel
from sinkscope.models.loading import class_of, quiet
from sinkscope.results.result import Result
from sinkscope.results.run_folder import RunFolder
from sinkscope.results.tables import rows_where
from sinkscope.tracing.receipt import Receipt, beginnings_in_words, described
from sinkscope.tracing.single_reader import evaluation_mode

MEASURED = (W8A8_STATIC, W8A8_TENSOR)
BASELINE = "baseline"
"""The model as it was, in the tables."""
SIXTEEN_BITS = "16 bits"
"""In the place of a scheme: nothing is rounded."""
PREFIX_FILE, SCALES_FILE = "prefix.safetensors", "static_scales.json"
WORTH_IT = 0.5
"""A remedy helps if it recovers at least this share of the damage, and the interval of that share is above 0."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of a damage that is recovered, with its 95 % interval over texts."""

    share: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.share:.0%} ({self.low:.0%} to {self.high:.0%})"

    @property
    def is_worth_it(self) -> bool:
        return self.share >= WORTH_IT and self.low > 0


@dataclass(frozen=True, kw_only=True)
class ModelLosses:
    """The losses [N, T - 1] of one model, in 16 bits and under each scheme."""

    name: str
    is_control: bool
    losses: dict[str, np.ndarray]
    acts_on: tuple[str, ...] = MEASURED
    """The schemes against which what was done can help."""

    def mean(self, scheme: str) -> float:
        """The mean loss under a scheme, in nats a token."""
        return float(self.losses[scheme].mean())


@dataclass(frozen=True, kw_only=True, repr=False)
class RemedyResult(Result):
    """The remedied model, and what was measured of it and of the baseline."""

    kind = "remedy"
    schemas = (LOSSES,)
    loaded: LoadedModel
    """The remedied model under the baseline's name, with its tokenizer."""
    receipt: Receipt
    prefix: SinkPrefix | None
    neurons: tuple[Any, ...]
    """Neurons that were taken out of its weights."""
    modules_in_16_bits: tuple[str, ...]
    ranges: Mapping[str, float] | None
    """By module, how far static 8-bit scales reach, where others than the usual ones are better."""
    measurements: tuple[ModelLosses, ...]
    """Of the baseline, then of each remedy and its control, and last of all remedies together."""
    num_tokens: tuple[int, int]
    """Held-out texts, and tokens of each."""
    source: str | None = None
    """Where the texts are from."""
    not_needed: tuple[str, ...] = ()
    """For each remedy with nothing to act on in this model, a sentence that says so."""

    @property
    def baseline(self) -> ModelLosses:
        return self.measurements[0]

    @property
    def scales(self) -> dict[str, float]:
        """What one step of a static 8-bit input is worth, by module that is rounded; empty without `scales`."""
        # As compressed-tensors has them; a module may read zeros alone.
        levels, least = (2**STATIC_BITS - 1) / 2, float(np.finfo(np.float32).tiny)
        ranges = self.ranges or {}
        return {name: max(least, ranges[name] / levels) for name in ranges if name not in self.modules_in_16_bits}

    def damage(self, scheme: str) -> Damage:
        """What the scheme costs the baseline."""
        return damage(self.baseline.losses[scheme], self.baseline.losses[SIXTEEN_BITS])

    def shares(self, measurement: ModelLosses) -> dict[str, Share]:
        """By scheme with a damage, the share that is recovered, what the remedy itself costs included."""
        if measurement is self.baseline:
            return {}
        costly = [scheme for scheme in measurement.acts_on if needs_remedy(self.damage(scheme))]
        return {scheme: self._share(measurement, scheme) for scheme in costly}

    def _share(self, measurement: ModelLosses, scheme: str) -> Share:
        # The damage of doing without the remedy is what the remedy recovers.
        recovered = damage(self.baseline.losses[scheme], measurement.losses[scheme])
        whole = self.damage(scheme).change
        return Share(share=recovered.change / whole, low=recovered.low / whole, high=recovered.high / whole)

    def change_in_16_bits(self, measurement: ModelLosses) -> float:
        """The relative change of the loss in 16 bits."""
        return measurement.mean(SIXTEEN_BITS) / self.baseline.mean(SIXTEEN_BITS) - 1

    def verdict(self, measurement: ModelLosses) -> str:
        """Whether a remedy helps, in a sentence; of a control, what it does."""
        name, shares = measurement.name, self.shares(measurement)
        change = f"the loss in 16 bits changes by {self.change_in_16_bits(measurement):+.2%}"
        parts = [f"{share} of the damage of {scheme}" for scheme, share in shares.items()]
        recovers = "recovers " + " and ".join(parts)
        if measurement.is_control:
            return f"{name}, a control: {recovers}; {change}" if shares else f"{name}, a control: {change}"
        if not shares:
            return f"{name}: no damage to recover; {change}"
        helps = all(share.is_worth_it for share in shares.values())
        return f"{name}: {'helps' if helps else 'does not help'}, {recovers}; {change}"

    @property
    def schemes_without_damage(self) -> list[str]:
        """For each scheme that costs next to nothing, a sentence that says so."""
        sentences = []
        for scheme in MEASURED:
            cost = self.damage(scheme)
            if not needs_remedy(cost):
                why = "which may be chance" if cost.low <= 0 else f"less than {NEGLIGIBLE:g}"
                change = f"{cost.change:+.4f} nats a token ({cost.low:+.4f} to {cost.high:+.4f})"
                sentences.append(f"{scheme}: no damage to recover, it costs {change}, {why}")
        return sentences

    @property
    def verdicts(self) -> list[str]:
        """What has nothing to do, and whether each remedy helps, a sentence each."""
        judged = [self.verdict(measurement) for measurement in self.measurements[1:]]
        return [*self.not_needed, *self.schemes_without_damage, *judged]

    @property
    def story(self) -> str:
        verdicts = " ".join(f"{verdict[0].upper()}{verdict[1:]}." for verdict in self.verdicts)
        return f"{self.loaded.name}. {verdicts}" + beginnings_in_words(self.receipt, lacks_sink=bool(self.not_needed))

    @cached_property
    def tables(self) -> dict[str, dict[str, list]]:
        """Columns by table: losses."""
        rows = []
        for measurement in self.measurements:
            shares = self.shares(measurement)
            for scheme in (SIXTEEN_BITS, *MEASURED):
                change = damage(measurement.losses[scheme], self.baseline.losses[SIXTEEN_BITS])
                row = {"model": measurement.name, "control": measurement.is_control, "scheme": scheme}
                row |= {"loss": measurement.mean(scheme)}
                row |= {"change": change.change, "low": change.low, "high": change.high}
                row |= {"won_back": None, "won_low": None, "won_high": None}
                if share := shares.get(scheme):
                    row |= {"won_back": share.share, "won_low": share.low, "won_high": share.high}
                rows.append(row)
        return {LOSSES.name: LOSSES.from_rows(rows)}

    @cached_property
    def summary(self) -> dict[str, Any]:
        return {
            "kind": "remedy",
            "story": self.story,
            "model": self.loaded.name,
            "num_texts": self.num_tokens[0],
            "length": self.num_tokens[1],
            "source": self.source,
            "prefix": None if self.prefix is None else list(self.prefix.ids),
            "units": [str(neuron) for neuron in self.neurons],
            "exempted": list(self.modules_in_16_bits),
            "static_scales": SCALES_FILE if self.scales else None,
            "verdicts": self.verdicts,
            "losses": rows_where(self.tables[LOSSES.name]),
            **described(self.receipt),
        }

    def write(self, folder: RunFolder) -> None:
        """Writes a model that transformers loads, its card, the summary and the table into an open folder."""
        write_model(self.loaded, folder)
        if self.prefix is not None:
            self.prefix.save(folder.path / PREFIX_FILE)
        if self.modules_in_16_bits:
            for scheme in map(linear_scheme, MEASURED):
                write_scheme(folder, self.loaded.model, scheme, self.modules_in_16_bits)
        if self.scales:
            folder.write_json(SCALES_FILE, {"bits": STATIC_BITS, "symmetric": True, "scales": self.scales})
        folder.write_text("README.md", card(self))
        super().write(folder)

    def write_for_page(self, folder: RunFolder) -> None:
        """Writes the summary and the table alone, without the model."""
        super().write(folder)


def card(result: RemedyResult) -> str:
    """The card in Markdown."""
    texts = held_out_in_words(*result.num_tokens, result.source)
    lines = [f"# {result.loaded.name}, remedied", "", "Written by `sinkscope remedy`. What was done:", ""]
    done = {measurement.name for measurement in result.measurements if not measurement.is_control}
    if "unplug" in done:
        lines.append(f"- Super neurons unplugged (layer:neuron): {', '.join(map(str, result.neurons))}.")
    if "rotate" in done:
        lines.append("- The residual stream rotated by a random orthogonal matrix, norm gains folded into the weights.")
    if result.prefix is not None:
        before, after = result.prefix.fired
        lines.append(
            f"- A prefix of tokens {list(result.prefix.ids)}{_words(result)} for the cache, in `{PREFIX_FILE}`. Super "
            f"neurons fire at {before:.2f} tokens of a text without it, and at {after:.2f} with it."
        )
    if result.modules_in_16_bits:
        listed = ", ".join(f"`{name}`" for name in result.modules_in_16_bits)
        lines.append(
            f"- Modules to leave in 16 bits, listed for llm-compressor, compressed-tensors and torchao: {listed}."
        )
    if result.scales:
        after = ", for texts after the prefix" if result.prefix is not None else ""
        lines.append(
            f"- Static scales of the inputs of linear layers, in `{SCALES_FILE}`{after}: x / scale is rounded."
        )
    if type(result.loaded.model).__module__.startswith("sinkscope."):
        lines += ["", "Its kind of attention is sinkscope's own: `import sinkscope.pretrain.decoder` before"]
        lines += ["`from_pretrained`, or load it with `sinkscope.load`."]
    lines += ["", f"Loss in nats a token on {texts}. 8-bit integers, activations"]
    lines += ["with one scale per tensor. Recovered: the share of what they cost the baseline.", ""]
    heads = ["model", SIXTEEN_BITS]
    for scheme in MEASURED:
        heads += [scheme, "recovered"]
    lines += [_row(heads), "| --- |" + " ---: |" * (len(heads) - 1)]
    for measurement in result.measurements:
        shares = result.shares(measurement)
        cells = [measurement.name + " (control)" * measurement.is_control, f"{measurement.mean(SIXTEEN_BITS):.4f}"]
        for scheme in MEASURED:
            cells += [f"{measurement.mean(scheme):.4f}", str(shares.get(scheme, ""))]
        lines.append(_row(cells))
    lines += ["", *(f"- {verdict}." for verdict in result.verdicts)]
    if result.prefix is not None:
        lines += ["", "A text that follows the prefix has no BOS of its own: leave it out of `ids`, and do not pad"]
        lines += ["them. Fill a cache for each batch, and give it as `past_key_values`:", "", "```python"]
        lines += [*LOADER.splitlines(), "logits = model(ids, past_key_values=cache).logits", "```", ""]
        lines += [
            "`generate` counts the tokens in the cache among its ids: put them before the text, and expect them in"
        ]
        lines += ["what it returns. Each pass adds to the cache, so fill a new one first.", "", "```python"]
        lines += [*result.prefix.generation.splitlines(), "```"]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _words(result: RemedyResult) -> str:
    if result.loaded.tokenizer is None or result.prefix is None:
        return ""
    return f" ({result.loaded.tokenizer.decode(list(result.prefix.ids))!r})"


def write_model(loaded: LoadedModel, folder: RunFolder) -> None:
    """Writes the model, and its tokenizer if it has one, into an open run folder."""
    model: Any = loaded.model
    with quiet():
        model.save_pretrained(folder.path)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(folder.path)
    _check_reloaded(model, folder)


@torch.no_grad()
def _check_reloaded(model: Any, folder: RunFolder) -> None:
    """Refuses a model that transformers does not load again as the same function."""

    ids = torch.arange(4)[None]
    try:
        with quiet():
            again: Any = class_of(model.config).from_pretrained(folder.path, dtype=model.dtype, local_files_only=True)
        with evaluation_mode(model):
            logits = model(ids.to(model.device)).logits.cpu()
        difference = float((again.eval()(ids).logits - logits).abs().max())
    except (OSError, ValueError, RuntimeError) as error:
        raise _not_reloadable(first_line(error).removesuffix(".")) from error
    if difference > 1e-3 * float(logits.abs().max()):
        raise _not_reloadable(f"its logits differ by {difference:.1e} when it is loaded again")


def _not_reloadable(why: str) -> InputError:
    return InputError(
        f"Transformers alone cannot save and load this model: {why}. Choose a model of a family that transformers has, "
        "without parts of sinkscope's own."
    )
