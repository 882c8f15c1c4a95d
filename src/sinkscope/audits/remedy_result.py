"""What `remedy` gives back: a remedied model with its card, its losses beside the original's, and what helps.

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
from sinkscope.audits.prefix import LOADER, SinkPrefix
from sinkscope.audits.recipe import write_ignored
from sinkscope.audits.schemas import LOSSES
from sinkscope.audits.static_scales import STATIC
from sinkscope.audits.texts import held_out_in_words
from sinkscope.errors import InputError
from sinkscope.models.checkpoint_checks import first_line
from sinkscope.models.loading import LoadedModel, quiet
from sinkscope.results.result import Result
from sinkscope.results.run_folder import RunFolder
from sinkscope.results.tables import rows_where
from sinkscope.tracing.receipt import Receipt, beginnings_in_words, described
from sinkscope.tracing.single_reader import evaluation_mode

MEASURED = (STATIC.name, "activations-8-dynamic")
PLAIN = "16 bits"
PREFIX_FILE, SCALES_FILE = "prefix.safetensors", "static_scales.json"
WORTH_IT = 0.5
"""A remedy helps if it wins back at least this share of the damage, and the interval of what it wins is above 0."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Of a damage, with its 95 % interval over texts."""

    share: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.share:.0%} ({self.low:.0%} to {self.high:.0%})"

    @property
    def is_worth_it(self) -> bool:
        return self.share >= WORTH_IT and self.low > 0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The losses [N, T - 1] of one treated model, in 16 bits and under each scheme."""

    name: str
    is_control: bool
    losses: dict[str, np.ndarray]
    acts_on: tuple[str, ...] = MEASURED
    """The schemes that what was done can help against."""

    def mean(self, scheme: str) -> float:
        return float(self.losses[scheme].mean())


@dataclass(frozen=True, kw_only=True, repr=False)
class RemedyResult(Result):
    """The remedied model, and what was measured of it and of the original."""

    kind = "remedy"
    schemas = (LOSSES,)
    loaded: LoadedModel
    """The remedied model under the original's name, with its tokenizer."""
    receipt: Receipt
    prefix: SinkPrefix | None
    neurons: tuple[Any, ...]
    exempted: tuple[str, ...]
    """Modules to leave in 16 bits."""
    ranges: Mapping[str, float] | None
    """Of static scales that are better than the usual ones, by module; the ranges that 8 bits reach."""
    readings: tuple[Measured, ...]
    """Of the original first, then of each remedy and its control, last of all remedies together."""
    num_tokens: tuple[int, int]
    """Held-out texts, and tokens of each."""
    source: str | None = None
    """Where the texts are from."""
    needless: tuple[str, ...] = ()
    """What was asked for and left out: the model has nothing that it could act on."""

    @property
    def original(self) -> Measured:
        return self.readings[0]

    @property
    def scales(self) -> dict[str, float]:
        """What one step of a static 8-bit input is worth, by module that is rounded; empty without `scales`."""
        levels, least = 2 ** (STATIC.bits - 1) - 1, float(np.finfo(np.float32).tiny)  # a module may read zeros alone
        ranges = self.ranges or {}
        return {name: max(least, ranges[name] / levels) for name in ranges if name not in self.exempted}

    def harm(self, scheme: str) -> Damage:
        """What the scheme costs the original."""
        return damage(self.original.losses[scheme], self.original.losses[PLAIN])

    def shares(self, reading: Measured) -> dict[str, Share]:
        """By scheme that is seen to do harm, the share that is won back, what the remedy itself costs included."""
        harmful = [scheme for scheme in reading.acts_on if needs_remedy(self.harm(scheme))]
        return {} if reading is self.original else {scheme: self._share(reading, scheme) for scheme in harmful}

    def _share(self, reading: Measured, scheme: str) -> Share:
        won, harm = damage(self.original.losses[scheme], reading.losses[scheme]), self.harm(scheme).change
        return Share(share=won.change / harm, low=won.low / harm, high=won.high / harm)

    def cost(self, reading: Measured) -> float:
        """The relative change of the loss in 16 bits."""
        return reading.mean(PLAIN) / self.original.mean(PLAIN) - 1

    def verdict(self, reading: Measured) -> str:
        """Whether a remedy helps, in a sentence; of a control, what it does."""
        shares = self.shares(reading)
        cost = f"the loss in 16 bits changes by {self.cost(reading):+.2%}"
        won = "wins back " + ", ".join(f"{share} of {scheme}" for scheme, share in shares.items())
        if reading.is_control:
            return f"{reading.name}, a control: {f'{won}; {cost}' if shares else cost}"
        if not shares:
            return f"{reading.name}: nothing to win back; {cost}"
        helps = all(share.is_worth_it for share in shares.values())
        return f"{reading.name}: {'helps' if helps else 'does not help'}, {won}; {cost}"

    @property
    def harmless(self) -> list[str]:
        """Of each scheme that is not seen to do harm, that nothing can be won back."""
        harms = {scheme: self.harm(scheme) for scheme in MEASURED}
        return [
            f"{scheme}: nothing to win back, it costs {harm.change:+.4f} nats a token ({harm.low:+.4f} to "
            f"{harm.high:+.4f}), {'which may be none' if harm.low <= 0 else f'less than {NEGLIGIBLE:g}'}"
            for scheme, harm in harms.items()
            if not needs_remedy(harm)
        ]

    @property
    def verdicts(self) -> list[str]:
        return [*self.needless, *self.harmless, *(self.verdict(reading) for reading in self.readings[1:])]

    @property
    def story(self) -> str:
        verdicts = " ".join(f"{verdict[0].upper()}{verdict[1:]}." for verdict in self.verdicts)
        return f"{self.loaded.name}. {verdicts}" + beginnings_in_words(self.receipt, lacks_sink=bool(self.needless))

    @cached_property
    def tables(self) -> dict[str, dict[str, list]]:
        """Columns by table: losses."""
        rows = []
        for reading in self.readings:
            for scheme in (PLAIN, *MEASURED):
                change = damage(reading.losses[scheme], self.original.losses[PLAIN])
                row = {"model": reading.name, "control": reading.is_control, "scheme": scheme}
                row |= {"loss": reading.mean(scheme), "change": change.change, "low": change.low, "high": change.high}
                won = self.shares(reading).get(scheme)
                ends = (None, None, None) if won is None else (won.share, won.low, won.high)
                rows.append(row | dict(zip(("won_back", "won_low", "won_high"), ends, strict=True)))
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
            "exempted": list(self.exempted),
            "static_scales": SCALES_FILE if self.scales else None,
            "verdicts": self.verdicts,
            "losses": rows_where(self.tables[LOSSES.name]),
            **described(self.receipt),
        }

    def write(self, folder: RunFolder) -> None:
        """Writes a model that transformers loads, its card, the summary and the table into an open folder."""
        write_plain(self.loaded, folder)
        if self.prefix is not None:
            self.prefix.save(folder.path / PREFIX_FILE)
        if self.exempted:
            write_ignored(folder, self.loaded.model, static=self.exempted, dynamic=self.exempted)
        if self.scales:
            folder.write_json(SCALES_FILE, {"bits": STATIC.bits, "symmetric": True, "scales": self.scales})
        folder.write_text("README.md", card(self))
        super().write(folder)

    def write_for_page(self, folder: RunFolder) -> None:
        """Leaves the model out."""
        super().write(folder)


def card(result: RemedyResult) -> str:
    """The card in Markdown."""
    texts = held_out_in_words(*result.num_tokens, result.source)
    lines = [f"# {result.loaded.name}, remedied", "", "Written by `sinkscope remedy`. What was done:", ""]
    done = {reading.name for reading in result.readings if not reading.is_control}
    if "unplug" in done:
        lines.append(f"- Super neurons unplugged (layer:neuron): {', '.join(map(str, result.neurons))}.")
    if "rotate" in done:
        lines.append("- The residual stream turned by a random orthogonal matrix, norm gains folded in.")
    if result.prefix is not None:
        before, after = result.prefix.fired
        lines.append(
            f"- A prefix of tokens {list(result.prefix.ids)}{_words(result)} for the cache, in `{PREFIX_FILE}`. Super "
            f"neurons fire at {before:.2f} tokens of a text without it, at {after:.2f} after it."
        )
    if result.exempted:
        listed = ", ".join(f"`{name}`" for name in result.exempted)
        lines.append(f"- Modules to leave in 16 bits, in `torchao.json` and `llm-compressor.yaml`: {listed}.")
    if result.scales:
        after = ", for texts after the prefix" if result.prefix is not None else ""
        lines.append(
            f"- Static scales of the inputs of linear layers, in `{SCALES_FILE}`{after}: x / scale is rounded."
        )
    if type(result.loaded.model).__module__.startswith("sinkscope."):
        lines += ["", "Its kind of attention is sinkscope's own: `import sinkscope.pretrain.decoder` before"]
        lines += ["`from_pretrained`, or load it with `sinkscope.load`."]
    lines += ["", f"Loss in nats a token on {texts}. 8 bits are emulated,"]
    lines += ["with one scale for each tensor. Won back: of what they cost the original.", ""]
    heads = ["model", PLAIN, *(each for scheme in MEASURED for each in (scheme, "won back"))]
    lines += [_row(heads), "| --- |" + " ---: |" * (len(heads) - 1)]
    for reading in result.readings:
        shares = result.shares(reading)
        cells = [reading.name + " (control)" * reading.is_control, f"{reading.mean(PLAIN):.4f}"]
        for scheme in MEASURED:
            cells += [f"{reading.mean(scheme):.4f}", str(shares.get(scheme, ""))]
        lines.append(_row(cells))
    lines += ["", *(f"- {verdict}." for verdict in result.verdicts)]
    if result.prefix is not None:
        lines += ["", "A text that follows the prefix has no BOS of its own: leave it out of `ids`, which have no"]
        lines += ["padding. Fill a cache for each batch, and give it as `past_key_values`:", "", "```python"]
        lines += [*LOADER.splitlines(), "logits = model(ids, past_key_values=cache).logits", "```", ""]
        lines += ["`generate` counts the tokens in the cache among its ids, so they come before the text, and again in"]
        lines += ["what it returns. A pass adds to a cache: fill it anew before.", "", "```python"]
        lines += [*result.prefix.generation.splitlines(), "```"]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _words(result: RemedyResult) -> str:
    if result.loaded.tokenizer is None or result.prefix is None:
        return ""
    return f" ({result.loaded.tokenizer.decode(list(result.prefix.ids))!r})"


def write_plain(loaded: LoadedModel, folder: RunFolder) -> None:
    """Writes the model, and its tokenizer if it has one, into an open run folder."""
    model: Any = loaded.model
    with quiet():
        model.save_pretrained(folder.path)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(folder.path)
    _check_plain(model, folder)


@torch.no_grad()
def _check_plain(model: Any, folder: RunFolder) -> None:
    """What was written must be the same function when transformers loads it."""
    from transformers import AutoModelForCausalLM

    ids = torch.arange(4)[None]
    try:
        with quiet():
            again: Any = AutoModelForCausalLM.from_pretrained(folder.path, dtype=model.dtype, local_files_only=True)
        with evaluation_mode(model):
            logits = model(ids.to(model.device)).logits.cpu()
        apart = float((again.eval()(ids).logits - logits).abs().max())
    except (OSError, ValueError, RuntimeError) as error:
        raise _not_plain(first_line(error).removesuffix(".")) from error
    if apart > 1e-3 * float(logits.abs().max()):
        raise _not_plain(f"its logits differ by {apart:.1e} when it is loaded again")


def _not_plain(why: str) -> InputError:
    return InputError(
        f"Plain transformers cannot save and load this model: {why}. Choose a model of a family that transformers has, "
        "without parts of sinkscope's own."
    )
