"""Checks of common arguments, before torch is imported and before anything is allocated.

Both the command line and the library's functions call them.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

from sinkscope.errors import InputError
from sinkscope.measures.sink_score import LATER_QUERIES
from sinkscope.memory import memory_bytes
from sinkscope.user_paths import user_path

Method = Literal["alignment", "seedprint"]
"""Methods of a fingerprint."""
# Names that are checked before torch is imported. A test holds them equal to the tables that need it, in
# `attention.variants` and `initial_bias.controls`.
VARIANTS = (
    *("softmax", "head_norm", "scale", "first_norm", "equal_variance", "gate", "head_gate", "head_norm_gate"),
    *("sigmoid", "softmax_one", "learned_sink", "qk_norm", "value_norm"),
)
CONTROLS = (
    *("tanh_activation", "odd_feed_forward", "no_feed_forward", "no_attention", "redrawn_embeddings"),
    "calibrated_variance",
)
TRACKERS = {"trackio": "trackio", "wandb": "wandb", "tensorboard": "torch.utils.tensorboard"}
"""The module of each experiment tracker."""
TOKEN_FORMS = "random, text:FILE or repeat:ID"
SEPARATOR = "<|endoftext|>"
"""Between the documents of a text file."""
STANDARD_INPUT = "-"
"""In the place of a file's name."""
LARGEST_TOKEN_ID = 2**31 - 1
MOST_MODELS = 1000
"""Most models that one call draws from seeds."""
MOST_NUMBERS = 2**20
"""Numbers in a list such as 0-9: more than any model has layers, heads or keys worth choosing."""
FINGERPRINT_SEQUENCES = 64
"""With fewer, a correlation in a dimension has an error above 0.125."""
BIAS_SEQUENCES = 16
"""Enough to leave out groups of them in turn, which gives the error of a rank correlation."""
STUDY_LENGTH = 32
"""The shortest at which position 10, where the paper intervenes, and two others have enough later queries."""
STUDY_SEQUENCES = 16
"""With fewer, a bootstrap cannot reach the level of Holm's first step, and all claims would be undecided."""

AUDIT_LENGTH = 4 * LATER_QUERIES
"""The shortest with room for a window of a quarter."""
AUDIT_SEQUENCES = 2
"""The fewest with an interval."""
CALIBRATION = 16
"""Texts of an audit, before the held-out ones, that sinks, ranges and the prediction come from. With 8 the prediction
for a window differed by a factor of three from one eight to the next."""


def check_batch(
    tokens: str = "random", *, length: int, num_sequences: int, seed: int = 0
) -> tuple[Literal["random", "text", "repeat"], str]:
    """The kind of tokens, and the file or the id after its colon; refuses what no model could use."""
    if not isinstance(tokens, str):
        raise InputError(
            expected=f"tokens as {TOKEN_FORMS}",
            found=reprlib.repr(tokens),
            next_step="Give a text file as `tokens='text:FILE'`",
        )
    kind, _, argument = tokens.partition(":")
    if kind not in ("random", "text", "repeat") or bool(argument) == (kind == "random") or tokens.endswith(":"):
        raise InputError(
            expected=f"tokens as {TOKEN_FORMS}", found=repr(tokens), next_step="Choose one as `tokens`, such as random"
        )
    if kind == "repeat" and not (argument.isdecimal() and len(argument) <= 10 and int(argument) <= LARGEST_TOKEN_ID):
        raise InputError(
            expected="repeat:ID with a token id",
            found=f"'repeat:{argument[:40]}'",
            next_step="Give `tokens='repeat:42'`",
        )
    if kind == "text" and argument != STANDARD_INPUT and not (path := user_path(argument)).is_file():
        found = f"a folder, {path.name}" if path.is_dir() else f"no {path.name!r}"
        raise InputError(expected="a text file", found=found, next_step="Name one that is there")
    check_sizes(length=length, num_sequences=num_sequences)
    check_seed(seed)
    return kind, argument  # type: ignore[return-value]


def check_sizes(*, length: int, num_sequences: int, least_length: int = 2, least_sequences: int = 1) -> None:
    """Refuses sequences that are too short, too few, or more tokens than a quarter of the memory can hold as ids."""
    check_count("length", length, least_length)
    check_count("num_sequences", num_sequences, least_sequences)
    most = memory_bytes() // 4 // 8
    if length > most:
        raise InputError(
            expected=f"at most {most} tokens, whose ids fill a quarter of this machine's memory",
            found=f"`length={length}`",
            next_step="Lower `length`",
        )
    if length * num_sequences > most:
        raise InputError(
            expected=f"at most {most} tokens in all, whose ids fill a quarter of this machine's memory",
            found=f"`length={length}` and `num_sequences={num_sequences}`",
            next_step=f"Give at most `num_sequences={most // length}`",
        )


def check_count(name: str, value: int, least: int, most: int | None = None, *, why: str = "") -> None:
    """Refuses a number outside what makes sense for the parameter called `name`."""
    check_whole(name, value)
    if value < least or (most is not None and value > most):
        raise InputError(
            expected=f"`{name}` of at least {least}{'' if most is None else f' and at most {most}'}{why}",
            found=f"`{name}={value}`",
            next_step=f"{'Raise' if value < least else 'Lower'} `{name}`",
        )


def check_whole(name: str, value: Any) -> None:
    """Refuses what is no whole number."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputError(
            expected=f"`{name}` as a whole number",
            found=reprlib.repr(value),
            next_step=f"Give `{name}` without a fraction",
        )


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Refuses a word that is none of the choices of the parameter called `name`."""
    if value not in choices:
        raise InputError(
            expected=f"`{name}` as one of {', '.join(choices)}",
            found=reprlib.repr(value),
            next_step="Choose one of them",
        )


def check_seed(seed: int, count: int = 1) -> None:
    """Refuses seeds that torch's generator cannot tell apart: it keeps 32 bits of one. `count` of them are used."""
    check_whole("seed", seed)
    if not 0 <= seed <= 2**32 - count:
        raise InputError(
            expected=f"a seed from 0 to {2**32 - count}", found=f"`seed={seed}`", next_step="Choose another `seed`"
        )


def check_study(length: int, num_sequences: int) -> None:
    """Refuses a study that could decide nothing."""
    check_count("length", length, STUDY_LENGTH, why=f", so that interventions have {LATER_QUERIES} later queries")
    check_count("num_sequences", num_sequences, STUDY_SEQUENCES, why=": fewer decide nothing among so many claims")


def check_fingerprint(models: Sequence[Any], *, method: str, unrelated: Sequence[Any], fresh: int) -> None:
    """Refuses fewer than two models, an unknown method, and unrelated models where the method uses none."""
    number = len(models) if isinstance(models, list | tuple) else 1  # a name has letters, which are no models
    if number < 2:
        raise InputError(
            expected="at least two models, in a list", found=str(number), next_step="Name a base model and a suspect"
        )
    check_choice("method", method, get_args(Method))
    if method == "seedprint" and unrelated:
        raise InputError(
            expected="no `unrelated` models beside `method='seedprint'`, whose null is a formula",
            found=str(len(unrelated)),
            next_step="Leave them out, or take the default method",
        )
    check_count("fresh", fresh, 0, MOST_MODELS)


def check_inputs(
    *,
    vocabulary: int | None = None,
    length: int = 1,
    num_sequences: int = FINGERPRINT_SEQUENCES,
    seed: int = 0,
) -> None:
    """Refuses sequences that no fingerprint can be made with; defaults always pass."""
    check_sizes(length=length, num_sequences=num_sequences, least_length=1, least_sequences=FINGERPRINT_SEQUENCES)
    check_seed(seed)
    if vocabulary is not None:
        check_count("vocabulary", vocabulary, 2, LARGEST_TOKEN_ID + 1)


def check_bias(*, seeds: int, length: int, num_sequences: int, seed: int) -> None:
    """Refuses too few sequences or models for an interval, and too many."""
    check_count("seeds", seeds, 1, MOST_MODELS)
    check_sizes(length=length, num_sequences=num_sequences, least_sequences=BIAS_SEQUENCES)
    check_seed(seed, count=2 * seeds)  # of each model's sequences, and of its calibration


def check_audit(*, length: int | None, num_sequences: int, seed: int) -> None:
    """Refuses texts without room for a window of a quarter, and too few for an interval; a length of None is chosen
    when the model is known."""
    length = AUDIT_LENGTH if length is None else length
    check_sizes(length=length, num_sequences=num_sequences, least_length=AUDIT_LENGTH, least_sequences=AUDIT_SEQUENCES)
    check_seed(seed)


def check_remedies(**asked: bool) -> None:
    """Refuses no remedy at all."""
    if not any(asked.values()):
        raise InputError(
            expected=f"a remedy: {', '.join(f'`{name}=True`' for name in asked)}",
            found="none",
            next_step="Give one of them, or several",
        )


def check_keys(keys: Sequence[int] | None, length: int) -> None:
    """Refuses chosen key positions that are none, or outside the sequence."""
    if keys is not None and (isinstance(keys, str) or not isinstance(keys, Iterable)):
        raise InputError(
            expected="`keys` as a list of positions", found=reprlib.repr(keys), next_step="Give `keys=[0, 10]`"
        )
    keys = None if keys is None else list(keys)
    for key in keys or ():
        check_whole("keys", key)
    wrong = [key for key in keys or () if not 0 <= key < length]
    if wrong or keys == []:
        raise InputError(
            expected=f"key positions from 0 to {length - 1}",
            found=", ".join(map(str, wrong[:3])) or "none",
            next_step="Give `keys=[0, 10]` or a greater `length`",
        )


def unit_of_text(text: str) -> tuple[int, int | None, int]:
    """(layer, expert, neuron) of 5:148, or 5:2:148 with an expert; ValueError where it is neither."""
    layer, *expert, neuron = (int(part) for part in text.split(":"))
    if len(expert) > 1:
        raise ValueError("more than a layer, an expert and a neuron")
    return layer, expert[0] if expert else None, neuron


def whole_numbers(text: str) -> list[int]:
    """The numbers of a list such as 0,3 or 0-2,7; ValueError where it is none, too long, or a range in it is empty."""
    ranges = []
    for item in text.split(","):
        first, dash, last = item.partition("-")
        ranges.append(range(int(first), int(last) + 1) if dash and first else range(int(item), int(item) + 1))
    if not all(ranges) or sum(each.stop - each.start for each in ranges) > MOST_NUMBERS:
        raise ValueError("an empty range, or too many numbers")
    return [number for numbers in ranges for number in numbers]
