"""A remedied model as a folder that loads in plain transformers: weights, tokenizer, prefix, and a card that says what
was done and what it costs."""

from __future__ import annotations

from typing import Any

import torch

from sinkscope.errors import InputError
from sinkscope.models.loading import quiet
from sinkscope.remedies.prefix import LOADER
from sinkscope.remedies.remedy import MEASURED, PLAIN, Remedied
from sinkscope.results.run_folder import RunFolder

PREFIX_FILE = "prefix.safetensors"


def write_remedied(result: Remedied, folder: RunFolder) -> None:
    """Writes the model, its tokenizer if it has one, the prefix, the card and summary.json into an open run folder."""
    model: Any = result.loaded.model
    with quiet():
        model.save_pretrained(folder.path)
        if result.loaded.tokenizer is not None:
            result.loaded.tokenizer.save_pretrained(folder.path)
    _check_plain(model, folder)
    if result.prefix is not None:
        result.prefix.save(folder.path / PREFIX_FILE)
    folder.write_text("README.md", card(result))
    folder.write_json("summary.json", result.summary)


@torch.no_grad()
def _check_plain(model: Any, folder: RunFolder) -> None:
    """What was written must be the same function in plain transformers."""
    from transformers import AutoModelForCausalLM

    ids = torch.arange(4)[None]
    try:
        with quiet():
            again: Any = AutoModelForCausalLM.from_pretrained(folder.path, dtype=model.dtype, local_files_only=True)
        apart = float((again.eval()(ids).logits - model(ids.to(model.device)).logits.cpu()).abs().max())
    except (OSError, ValueError, RuntimeError) as error:
        raise _not_plain(str(error).splitlines()[0]) from error
    if apart > 1e-3 * float(model(ids.to(model.device)).logits.abs().max()):
        raise _not_plain(f"logits that differ by {apart:.1e} when it is loaded again")


def _not_plain(found: str) -> InputError:
    return InputError(
        expected="a model that plain transformers can save and load",
        found=found,
        next_step="Choose a model of a family that transformers has, without parts of sinkscope's own",
    )


def card(result: Remedied) -> str:
    """The card in Markdown."""
    num_texts, length = result.num_tokens
    lines = [f"# {result.loaded.name}, remedied", "", "Written by `sinkscope remedy`. What was done:", ""]
    done = {reading.name for reading in result.readings if not reading.is_control}
    if "unplug" in done:
        lines.append(f"- Super neurons unplugged (layer:neuron): {', '.join(map(str, result.units))}.")
    if "rotate" in done:
        lines.append("- The residual stream turned by a random orthogonal matrix, norm gains folded in.")
    if result.prefix is not None:
        before, after = result.prefix.fired
        lines.append(
            f"- A prefix of tokens {list(result.prefix.ids)}{_words(result)} for the cache, in `{PREFIX_FILE}`. Super "
            f"neurons fire at {before:.2f} tokens of a text without it, at {after:.2f} after it."
        )
    lines += ["", f"Loss in nats a token on {num_texts} held-out texts of {length} tokens. 8 bits are emulated,"]
    lines += ["with one scale for each tensor. Won back: of what they cost the original.", ""]
    lines += ["| model | " + " | ".join((PLAIN, *MEASURED)) + " | won back |", "| --- |" + " ---: |" * 4]
    for reading in result.readings:
        shares = [f"{share:.0%}" for share in result.shares(reading).values()]
        numbers = " | ".join(f"{reading.mean(scheme):.4f}" for scheme in (PLAIN, *MEASURED))
        control = " (control)" * reading.is_control
        lines.append(f"| {reading.name}{control} | {numbers} | {', '.join(shares)} |")
    lines += ["", *(f"- {verdict}." for verdict in result.verdicts)]
    if result.prefix is not None:
        lines += ["", "Fill the cache of a batch `ids`, and give it as `past_key_values`:", "", "```python"]
        lines += [*LOADER.splitlines(), "logits = model(ids, past_key_values=cache).logits", "```"]
    return "\n".join(lines) + "\n"


def _words(result: Remedied) -> str:
    if result.loaded.tokenizer is None or result.prefix is None:
        return ""
    return f" ({result.loaded.tokenizer.decode(list(result.prefix.ids))!r})"
