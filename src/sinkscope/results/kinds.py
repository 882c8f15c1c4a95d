"""The kinds of results. Each product declares its own in its `schemas.py`, as KINDS: how a folder of it is told from
others, what its files must hold, and which module draws its page."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationInfo

from sinkscope.errors import InputError
from sinkscope.results.run_folder import is_training_run
from sinkscope.results.tables import Schema
from sinkscope.results.validated import Name, Whole


def below(size: str) -> AfterValidator:
    """A number below one of the sizes of the same summary: num_layers, length, count or longest."""

    def check(number: int, info: ValidationInfo) -> int:
        sizes: Any = info.context
        if number >= sizes[size]:
            raise ValueError(f"below {sizes[size]}")
        return number

    return AfterValidator(check)


def _scalar(value: Any) -> Any:
    if isinstance(value, list | dict):
        raise ValueError("a number, a text, true or false")
    return value


Scalar = Annotated[Any, AfterValidator(_scalar)]
Layer = Annotated[Whole, below("num_layers")]
Position = Annotated[Whole, below("length")]
Size = Annotated[int, Field(ge=1, le=2**31)]


class SizesOfTokens(BaseModel):
    length: Size
    count: Size
    whole: list[Size] | None = None
    """The length of each text."""


class Sizes(BaseModel):
    """What a summary, or an entry of it, says of the size of its tables."""

    num_layers: Annotated[int, Field(ge=1, le=10_000)]
    tokens: SizesOfTokens


class KindOfTokens(BaseModel):
    kind: Name
    bos: bool


class OfAModel(BaseModel):
    """What the summary of one model's run says, beside its sizes and results."""

    model: Name | None = None
    family: Name
    tokens: KindOfTokens
    story: str | None = None
    verdict: str | None = None
    counts: str | None = None
    command: str | None = None


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of result."""

    name: str
    called: str
    """What a sentence calls it, such as "a study"."""
    schemas: tuple[Schema, ...]
    told_by: str
    """The table whose file tells a folder of this kind from others."""
    headline: tuple[str, ...]
    """What a notebook shows: the most important table, and then some of its columns."""
    page: str
    """The module with `figures(run)` and `write_page(run, destination)`."""
    summary: type[BaseModel]
    """What summary.json must hold; it may hold more."""
    sized_by: str | None = ""
    """The entry of the summary that says how many layers and tokens there are; empty where the summary itself does,
    None where nothing does."""
    main_figures: tuple[str, ...] = ()
    """The figures that `.plot()` draws; by default the first one of the page."""
    is_pictured: bool = False
    """Whether these show the whole result, as a notebook and a picture in the run folder do."""
    check: Callable[[Any], None] | None = None
    """Refuses a `Run` that a page could not draw."""
    load: str = ""
    """The module whose `load(folders)` computes the result anew; empty if a folder's files are shown as they are."""


@cache
def kinds() -> dict[str, Kind]:
    """Every kind by its name."""
    folders = sys.modules["sinkscope"].__path__
    rooms = [f"sinkscope.{room.name}.schemas" for room in pkgutil.iter_modules(folders) if room.ispkg]
    declared = [import_module(module).KINDS for module in rooms if importlib.util.find_spec(module)]
    return {kind.name: kind for of_product in declared for kind in of_product}


def kind_of(folder: Path) -> Kind:
    """What a run folder holds; anything else is refused."""
    if is_training_run(folder):
        return kinds()["training"]
    if not folder.is_dir():
        raise InputError(f"There is no folder {folder}. Name the folder that .save or a sinkscope command wrote.")
    if not (folder / "summary.json").is_file():
        if (folder / "config.json").is_file():
            raise InputError(
                f"{folder} holds a model, not a saved result. Load it with sinkscope.load({str(folder)!r})."
            )
        raise InputError(
            f"{folder} has no summary.json, so it is not a saved result. "
            "Name the folder that .save or a sinkscope command wrote."
        )
    matching = [kind for kind in kinds().values() if (folder / f"{kind.told_by}.parquet").is_file()]
    # A study has the tables of a trace too.
    parts = {schema.name for kind in matching for schema in kind.schemas if schema.name != kind.told_by}
    return next((kind for kind in matching if kind.told_by not in parts), kinds()["trace"])
