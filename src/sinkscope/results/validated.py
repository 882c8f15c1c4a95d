"""Files that a stranger may have made: read within bounds, and checked against a declaration before they are used.

A document (JSON, YAML, a line of JSON) is refused where it is longer, deeper or wordier than any that sinkscope writes.
YAML is read without aliases and tags, and a date in it is text. What a kind of document must hold is declared as a
pydantic model or a dataclass, and pydantic checks it. A document may hold more than its declaration names, unless that
forbids it. Bounds that depend on the document's own sizes are in the declaration too: see `below`.

Everything else is an UnusableFileError that names the file and what is wrong in it.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from annotated_types import Interval, MaxLen

from sinkscope.errors import InputError

if TYPE_CHECKING:
    from pydantic import ValidationError

T = TypeVar("T")

MOST_JSON = 1 << 24
MOST_YAML = 1 << 18
"""Bytes of a document. YAML is parsed by Python code, a thousand times slower than JSON."""
MOST_LINES_OF_JSON = 1 << 28
MOST_VALUES = 1 << 20
"""Of a document: pydantic keeps an error for every wrong one."""
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
    "too_long": "a list of at most {max_length} items",
    "json_invalid": "text in UTF-8",
    "literal_error": "{expected}",
    "value_error": "{error}",
}
"""What a value must be, by pydantic's name of the error."""


Name = Annotated[str, MaxLen(4096)]
"""The name of a model, a path or a variant."""
Whole = Annotated[int, Interval(ge=0, le=2**53)]
Count = Annotated[int, Interval(ge=1, le=2**53)]


def read_json(path: Path, kind: Any = Any) -> Any:
    """The value in a JSON file."""
    return parse_json(read_text(path, MOST_JSON), path, kind)


def read_yaml(path: Path, kind: Any = Any) -> Any:
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
    return checked(value, kind, path)


def read_json_lines(path: Path, kind: Any = Any) -> list[Any]:
    """The values in a file of JSON, one a line; a last line that a killed process left unfinished is dropped."""
    lines = read_text(path, MOST_LINES_OF_JSON).split("\n")[:-1]
    return [parse_json(line, path, kind, where=f"line {number}") for number, line in enumerate(lines, start=1)]


def parse_json(text: str, path: Path, kind: Any = Any, *, where: str = "") -> Any:
    """The value that is written in a text of the file `path`."""
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise refused(path, f"{where}: {_reason(error)}" if where else _reason(error)) from error
    return checked(value, kind, path, where=where)


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


def checked(value: Any, kind: Any, path: Path, sizes: Mapping[str, int] | None = None, where: str = "") -> Any:
    """The value itself, if it is within bounds and as declared; `sizes` are those that `below` names."""
    try:
        _check_bounds(value)
        strictly(kind, value, sizes)
    except (ValueError, InputError) as error:
        raise refused(path, f"{where}: {error}" if where else str(error)) from error
    return value


def strictly(kind: type[T], value: Any, sizes: Mapping[str, int] | None = None) -> T:
    """The value as pydantic makes it of a declaration; nothing of another type or out of its range is taken."""
    from pydantic import ValidationError  # here: the command line starts without it

    # As JSON, where a list may be a tuple, and true is no number.
    text = json.dumps(value, default=repr)
    try:
        return _adapter(kind).validate_json(text, strict=True, context=sizes)
    except ValidationError as error:
        raise first_error(error) from None


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def first_error(error: ValidationError) -> WrongValueError:
    """The first error of pydantic in plain words."""
    first = error.errors(include_url=False)[0]
    *outer, name = first["loc"] or ("",)
    if first["type"] == "missing" and isinstance(name, int):
        return WrongValueError(_place(outer), f"has fewer than {name + 1} items")
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


def _check_bounds(value: Any) -> None:
    """Refuses a document that is deeper, longer or larger than allowed, without recursion, which depth would break."""
    left, num_values = [(value, 0)], 0
    while left:
        value, depth = left.pop()
        num_values += 1
        if isinstance(value, dict):
            if wrong := [key for key in value if not isinstance(key, str)]:
                raise ValueError(f"a name in it is {_described(wrong[0])}, not text")
            left += ((key, depth) for key in value)
            value = list(value.values())
        if isinstance(value, list):
            if depth >= MOST_DEPTH:
                raise ValueError(TOO_DEEP)
            left += ((item, depth + 1) for item in value)
        elif isinstance(value, str):
            if len(value) > MOST_CHARACTERS:
                raise ValueError(f"it has a text of more than {MOST_CHARACTERS:,} characters")
            value.encode()  # a lone surrogate can be written in JSON, and in no file of ours
        elif isinstance(value, int) and abs(value) > LARGEST_INT:
            raise ValueError("it holds a number of more than 64 bits")
        elif isinstance(value, float) and not abs(value) <= LARGEST_FLOAT:
            raise ValueError(f"it holds {value}, not a number of at most {LARGEST_FLOAT:g}")
    if num_values > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES:,} values")


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
