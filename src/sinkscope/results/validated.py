"""Files that a stranger may have made: read within bounds, and checked against a declared shape before they are used.

A document (JSON, YAML, a line of JSON) is refused where it is longer, deeper or wordier than any that sinkscope writes.
YAML is read without aliases and tags, and a date in it is text. What a kind of document must hold is a shape, as data:

    {"model": NAME, "tokens": {"length": Int(1), "bos": bool}, "sinks": [{"position": Int(0, "length")}]}

A mapping may hold more than its shape names. A bound given by a name is one of the `sizes` that the caller knows by
then. Everything else is an UnusableFileError that names the file and what is wrong in it.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from annotated_types import MaxLen

from sinkscope.errors import InputError

if TYPE_CHECKING:
    from pydantic import ValidationError

T = TypeVar("T")

MOST_JSON = 1 << 24
MOST_YAML = 1 << 18
"""Bytes of a document. YAML is parsed by Python code, a thousand times slower than JSON."""
MOST_LINES_OF_JSON = 1 << 28
MOST_DEPTH = 32
MOST_CHARACTERS = 1 << 16
LARGEST_INT = 2**63 - 1
LARGEST_FLOAT = 1e100
"""Far above any value that is measured, and its square is still finite."""
TOO_DEEP = f"it is nested more than {MOST_DEPTH} deep"
SHOWN = 200
"""Characters of a wrong value that a message quotes."""


class UnusableFileError(InputError):
    """A file that sinkscope cannot use."""

    reason = ""
    """What is wrong in the file, without its path: for a caller that knows better what to do."""


class WrongValueError(ValueError):
    """A value of another type than its declaration has, or out of its range."""

    def __init__(self, where: str, wrong: str) -> None:
        super().__init__(f"{where or 'it'} {wrong}")
        self.where = where
        """The value's place, such as training.steps; empty for the whole."""
        self.wrong = wrong
        """What follows the place in a sentence."""


MUST_BE = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object with names",
    "model_type": "an object with names",
    "dataclass_type": "an object with names",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "string_too_long": "text of at most {max_length} characters",
    "literal_error": "{expected}",
}
"""What a value must be, by pydantic's name of the error."""


@dataclass(frozen=True)
class Int:
    """A whole number from `least` to `most`; a `most` given by name is the first number too large."""

    least: int = 0
    most: int | str = 2**53

    def ends(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """The smallest and the largest number."""
        return self.least, self.most if isinstance(self.most, int) else sizes[self.most] - 1


@dataclass(frozen=True)
class Real:
    """A number from `least` to `most`."""

    least: float = -LARGEST_FLOAT
    most: float = LARGEST_FLOAT


@dataclass(frozen=True)
class Text:
    """A string of at most so many characters."""

    most: int = MOST_CHARACTERS


@dataclass(frozen=True)
class Maybe:
    """A shape that may be null or missing."""

    shape: Any


@dataclass(frozen=True)
class Each:
    """A mapping of any names, whose values have one shape."""

    shape: Any


@dataclass(frozen=True)
class AnyOf:
    """One of several shapes."""

    shapes: tuple[Any, ...]
    words: str = "a number, a text, true or false"


Name = Annotated[str, MaxLen(4096)]
NAME = Text(4096)
"""The name of a model, a path or a variant."""
SCALAR = Maybe(AnyOf((bool, Int(-LARGEST_INT, LARGEST_INT), Real(), Text())))
ANYTHING = object()


def read_json(path: Path, shape: Any = ANYTHING) -> Any:
    """The value in a JSON file."""
    return parse_json(read_text(path, MOST_JSON), path, shape)


def read_yaml(path: Path, shape: Any = ANYTHING) -> Any:
    """The value in a YAML file; None where it is empty."""
    import yaml

    text = read_text(path, MOST_YAML)
    depth = 0
    try:
        # First as a stream: an alias makes much of little, and deep nesting takes the parser quadratic time.
        for event in yaml.parse(text, _loader()):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) is not None:
                raise ValueError(f"line {event.start_mark.line + 1} has an alias or a tag; write its value out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_DEPTH:
                raise ValueError(TOO_DEEP)
        value = yaml.load(text, _loader())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise refused(path, _reason(error)) from error
    return checked(value, shape, path)


def read_json_lines(path: Path, shape: Any = ANYTHING) -> list[Any]:
    """The values in a file of JSON, one a line; a last line that a killed process left unfinished is dropped."""
    lines = read_text(path, MOST_LINES_OF_JSON).split("\n")[:-1]
    return [parse_json(line, path, shape, where=f"line {number}") for number, line in enumerate(lines, start=1)]


def parse_json(text: str, path: Path, shape: Any = ANYTHING, *, where: str = "") -> Any:
    """The value that is written in a text of the file `path`."""
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise refused(path, f"{where}: {_reason(error)}" if where else _reason(error)) from error
    return checked(value, shape, path, where=where)


def read_text(path: Path, most: int) -> str:
    """The text of a file of at most `most` bytes; a pipe or a device is refused."""
    content = _first_bytes(path, most + 1)
    if len(content) > most:
        raise refused(path, f"it has more than {most:,} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refused(path, _reason(error)) from error


def check_safetensors(path: Path) -> None:
    """Returns if the header of a safetensors file is as short as ours are: it is parsed before anything else."""
    length, size = int.from_bytes(_first_bytes(path, 8), "little"), path.stat().st_size
    if not 2 <= length <= min(MOST_JSON, size - 8):
        raise refused(path, f"its {size:,} bytes do not begin with a safetensors header")


def checked(value: Any, shape: Any, path: Path, sizes: Mapping[str, int] | None = None, where: str = "") -> Any:
    """The value itself, if it is within bounds and has the shape."""
    try:
        _check_bounds(value, where)
        if isinstance(shape, type) and is_dataclass(shape):
            strictly(shape, value)
        else:
            _check_shape(value, shape, where, sizes or {})
    except (ValueError, InputError) as error:
        raise refused(path, str(error)) from error
    return value


def strictly(kind: type[T], value: Any) -> T:
    """The dataclass `kind` with these values, which must have its types and be in its ranges."""
    from pydantic import TypeAdapter, ValidationError  # here: the command line starts without it

    # As JSON, where a list may be a tuple, and true is no number.
    text = json.dumps(value, default=repr)
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise first_error(error) from None


def first_error(error: ValidationError) -> WrongValueError:
    """The first error of pydantic in plain words."""
    first = error.errors(include_url=False)[0]
    *outer, name = first["loc"] or ("",)
    if first["type"] == "missing":
        return WrongValueError(_place(outer), f"has no key {name!r}")
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return WrongValueError(_place(outer), f"has an unknown key {reprlib.repr(name)}")
    limits = {key: f"{x:g}" if isinstance(x, float) else x for key, x in first.get("ctx", {}).items()}
    allowed = MUST_BE.get(first["type"], "of another kind").format_map(limits)
    return WrongValueError(_place(first["loc"]), f"must be {allowed}, not {_described(first['input'])}")


def refused(
    path: Path, reason: str, advice: str = "Run the command that wrote it again, or leave it out."
) -> UnusableFileError:
    """The error for a file that sinkscope cannot use; of a reason, which may be another library's, the first line."""
    first_line = shortened(next(iter(reason.strip().splitlines()), "nothing is known").rstrip("."))
    error = UnusableFileError(f"Cannot use {shortened(str(path))}: {first_line}. {advice}")
    error.reason = first_line
    return error


def shortened(text: str, most: int = SHOWN) -> str:
    """The text as far as a message quotes it."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def _first_bytes(path: Path, most: int) -> bytes:
    try:
        if not path.is_file():
            raise refused(path, "it is not a plain file" if path.exists() else "there is no such file")
        with path.open("rb") as file:
            return file.read(most)
    except (OSError, ValueError) as error:  # a name may be too long, or hold a NUL
        raise refused(path, _reason(error)) from error


def _check_bounds(value: Any, where: str) -> None:
    """Refuses a document that is deeper, longer or larger than allowed, without recursion, which depth would break."""
    left = [(value, 0)]
    while left:
        value, depth = left.pop()
        if isinstance(value, dict):
            if wrong := [key for key in value if not isinstance(key, str)]:
                raise _wrong(f"a name in {where or 'it'}", "text", wrong[0])
            left += ((key, depth) for key in value)
            value = list(value.values())
        if isinstance(value, list):
            if depth >= MOST_DEPTH:
                raise ValueError(TOO_DEEP)
            left += ((item, depth + 1) for item in value)
        elif isinstance(value, str):
            if len(value) > MOST_CHARACTERS:
                raise ValueError(f"{where or 'it'} has a text of more than {MOST_CHARACTERS:,} characters")
            value.encode()  # a lone surrogate can be written in JSON, and in no file of ours
        elif isinstance(value, int) and abs(value) > LARGEST_INT:
            raise ValueError(f"{where or 'it'} holds a number of more than 64 bits")
        elif isinstance(value, float) and not abs(value) <= LARGEST_FLOAT:
            raise ValueError(f"{where or 'it'} holds {value}, not a number of at most {LARGEST_FLOAT:g}")


def _check_shape(value: Any, shape: Any, where: str, sizes: Mapping[str, int]) -> None:
    if shape is ANYTHING:
        return
    if isinstance(shape, Maybe):
        if value is not None:
            _check_shape(value, shape.shape, where, sizes)
    elif isinstance(shape, Int):
        least, most = shape.ends(sizes)
        if type(value) is not int or not least <= value <= most:
            raise _wrong(where, f"a whole number from {least} to {most}", value)
    elif isinstance(shape, Real):
        if type(value) not in (int, float) or not shape.least <= value <= shape.most:
            raise _wrong(where, f"a number from {shape.least:g} to {shape.most:g}", value)
    elif isinstance(shape, Text):
        if not isinstance(value, str) or len(value) > shape.most:
            raise _wrong(where, f"text of at most {shape.most:,} characters", value)
    elif isinstance(shape, AnyOf):
        if not any(_fits(value, one, sizes) for one in shape.shapes):
            raise _wrong(where, shape.words, value)
    elif shape is bool:
        if not isinstance(value, bool):
            raise _wrong(where, "true or false", value)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise _wrong(where, "a list", value)
        for index, item in enumerate(value):
            _check_shape(item, shape[0], f"{where}[{index}]", sizes)
    else:
        if not isinstance(value, dict):
            raise _wrong(where, "an object with names", value)
        for name, field_shape in _fields(value, shape):
            _check_shape(value.get(name), field_shape, f"{where}.{name}" if where else shortened(name), sizes)


def _fields(value: Mapping[str, Any], shape: Any) -> Iterator[tuple[str, Any]]:
    yield from ((name, shape.shape) for name in value) if isinstance(shape, Each) else shape.items()


def _fits(value: Any, shape: Any, sizes: Mapping[str, int]) -> bool:
    try:
        _check_shape(value, shape, "", sizes)
    except ValueError:
        return False
    return True


def _wrong(where: str, expected: str, value: Any) -> ValueError:
    return ValueError(f"{shortened(where, 80) if where else 'it'} is {_described(value)}, not {expected}")


def _place(names: Iterable[str | int]) -> str:
    """Where a value stands, such as shards[0].file."""
    place = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)
    return shortened(place.removeprefix("."), 80)


def _described(value: Any) -> str:
    # Never the repr of what may be a whole document.
    return shortened(f"a {type(value).__name__} of {len(value)}" if isinstance(value, dict | list) else repr(value), 40)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return TOO_DEEP
    if (mark := getattr(error, "problem_mark", None)) is not None:  # of YAML
        return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', None)}"
    return str(error) or type(error).__name__


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")


def _loader() -> type:
    """A safe loader that refuses a key given twice, and reads a date as text: no later code expects other types than
    those of JSON."""
    import yaml

    safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C where PyYAML was built with it

    class PlainLoader(safe):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if twice := [name for name, count in names.items() if count > 1]:
                raise ValueError(f"{shortened(twice[0])} stands twice, from line {node.start_mark.line + 1} on")
            return super().construct_mapping(node, deep)

    PlainLoader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)
    return PlainLoader
