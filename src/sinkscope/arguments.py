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
"""Enough to leave out groups of them in turn, from which the error of a rank correlation follows."""
STUDY_LENGTH = 32
"""The shortest at which position 10, where the paper intervenes, and two others have enough later queries."""
STUDY_SEQUENCES = 16
"""With fewer, a bootstrap cannot reach the level of Holm's first step, and all claims would be undecided."""

AUDIT_LENGTH = 4 * LATER_QUERIES
"""The shortest with room for a window of a quarter."""
AUDIT_SEQUENCES = 2
"""The fewest with an interval."""
CALIBRATION = 16
"""Texts of an audit that sinks, ranges and the prediction come from; the held-out ones follow. With 8, the prediction
for a window differed by a factor of three between one set of texts and another."""


def check_batch(
    tokens: str = "random", *, length: int, num_sequences: int, seed: int = 0
) -> tuple[Literal["random", "text", "repeat"], str]:
    """The kind of tokens, and the file or the id after its colon; refuses what no model could use."""
    kind, colon, argument = tokens.partition(":") if isinstance(tokens, str) else ("", "", "")
    if not ((kind == "random" and not colon) or (kind in ("text", "repeat") and argument)):
        raise InputError(f"`tokens` cannot be {reprlib.repr(tokens)}. Use random, text:FILE or repeat:ID.")
    if kind == "repeat" and not (argument.isdecimal() and len(argument) <= 10 and int(argument) <= LARGEST_TOKEN_ID):
        raise InputError(
            f"`tokens='repeat:{argument[:40]}'` does not name a token id. Use, for example, `tokens='repeat:42'`."
        )
    if kind == "text" and argument != STANDARD_INPUT and not (path := user_path(argument)).is_file():
        wrong = f"{path} is a folder" if path.is_dir() else f"There is no file {path}"
        raise InputError(f"{wrong}. Give the path of a text file.")
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
            f"`length={length}` is too much: at most {most} token ids fit into a quarter of this machine's memory. "
            "Lower `length`."
        )
    if length * num_sequences > most:
        raise InputError(
            f"`length={length}` and `num_sequences={num_sequences}` are too much: at most {most} token ids fit into a "
            f"quarter of this machine's memory. Give at most `num_sequences={most // length}`."
        )


def check_count(name: str, value: int, least: int, most: int | None = None, *, why: str = "") -> None:
    """Refuses a number outside what makes sense for the parameter called `name`; `why` is a sentence."""
    check_whole(name, value)
    if value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"`{name}` must be {limits}, not {value}. {why}".rstrip())


def check_whole(name: str, value: Any) -> None:
    """Refuses what is no whole number."""
    if not _is_whole(value):
        raise InputError(f"`{name}` must be a whole number, not {reprlib.repr(value)}.")


def _is_whole(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Refuses a word that is none of the choices of the parameter called `name`."""
    if value not in choices:
        raise InputError(f"`{name}` cannot be {reprlib.repr(value)}. Choose one of {', '.join(choices)}.")


def check_seed(seed: int, count: int = 1) -> None:
    """Refuses seeds that torch's generator cannot tell apart: it keeps 32 bits of one. `count` of them are used."""
    check_whole("seed", seed)
    if not 0 <= seed <= 2**32 - count:
        raise InputError(f"`seed` must be from 0 to {2**32 - count}, not {seed}.")


def check_study(length: int, num_sequences: int) -> None:
    """Refuses a study that could decide nothing."""
    check_count("length", length, STUDY_LENGTH, why=f"Interventions need {LATER_QUERIES} later queries.")
    check_count("num_sequences", num_sequences, STUDY_SEQUENCES, why="Fewer decide nothing among so many claims.")


def check_fingerprint(models: Sequence[Any], *, method: str, unrelated: Sequence[Any], fresh: int) -> None:
    """Refuses fewer than two models, an unknown method, and unrelated models where the method uses none."""
    number = len(models) if isinstance(models, list | tuple) else 1  # a name has letters, which are no models
    if number < 2:
        raise InputError(f"A fingerprint needs a list of at least two models, not {number}. Name a base and a suspect.")
    check_choice("method", method, get_args(Method))
    if method == "seedprint" and unrelated:
        raise InputError(
            "`method='seedprint'` takes no `unrelated` models, because its null is a formula. "
            "Leave them out, or use the default method."
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


def check_audit(*, length: int | None, num_sequences: int, seed: int, budget: float = 0) -> None:
    """Refuses texts without room for a window of a quarter, and too few for an interval; a length of None is chosen
    when the model is known."""
    if not 0 <= budget <= 16:
        raise InputError(f"`budget` must be from 0 to 16 bits a weight, not {budget}.")
    length = AUDIT_LENGTH if length is None else length
    check_sizes(length=length, num_sequences=num_sequences, least_length=AUDIT_LENGTH, least_sequences=AUDIT_SEQUENCES)
    check_seed(seed)


def check_remedies(**remedies: bool) -> None:
    """Refuses a call that chooses no remedy."""
    if not any(remedies.values()):
        raise InputError(f"Give at least one remedy: {', '.join(f'`{name}=True`' for name in remedies)}.")


def check_keys(keys: Sequence[int] | None, length: int) -> None:
    """Refuses chosen key positions that are none, or outside the sequence."""
    if keys is None:
        return
    chosen = list(keys) if isinstance(keys, Iterable) else None
    if chosen is None or not all(_is_whole(key) for key in chosen):
        raise InputError(f"`keys` must be a list of whole numbers such as `keys=[0, 10]`, not {reprlib.repr(keys)}.")
    wrong = [key for key in chosen if not 0 <= key < length]
    if wrong or not chosen:
        listed = ", ".join(map(str, wrong[:3])) or "an empty list"
        raise InputError(
            f"`keys` must be positions from 0 to {length - 1}, not {listed}. Give `keys=[0, 10]`, for example, or a "
            "greater `length`."
        )


def check_context(length: int, context: int | None) -> None:
    """Refuses sequences that are longer than the model's context; None if the model states none."""
    if context is not None and length > context:
        raise InputError(
            f"`length={length}` exceeds the model's context of {context} tokens. Give `length={context}` or less."
        )


def neuron_of_text(text: str) -> tuple[int, int | None, int]:
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
    # Not len(): it raises OverflowError for a range such as 0-99999999999999999999.
    if not all(ranges) or sum(numbers.stop - numbers.start for numbers in ranges) > MOST_NUMBERS:
        raise ValueError("an empty range, or too many numbers")
    return [number for numbers in ranges for number in numbers]
