"""sinkscope explore: the command that serves the live page, and its options."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope.arguments import check_count
from sinkscope.cli_options import Bos, ModelOptions
from sinkscope.errors import InputError, check_installed

if TYPE_CHECKING:
    from sinkscope.explore.sources import Source

FIRST_PROMPT = "The cat sat on the mat, and the dog lay on the rug, until it was dark and both of them went home."


@dataclass(frozen=True, kw_only=True)
class ExploreOptions:
    """What the page begins with, and where it is."""

    beside: Annotated[
        str | None, typer.Option(help="A second model or finished trace, shown beside the first.", show_default=False)
    ] = None
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="The prompt to begin with. Given twice, both are shown side by side.", show_default=False),
    ] = None
    bos: Bos = None
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 in a container. Who can reach it still needs the token.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port on this machine; 0 takes a free one.")] = 0
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser, or only print its address.")
    ] = True

    def __post_init__(self) -> None:
        check_count("port", self.port, 0, 65535)
        if len(self.prompt or ()) > 2:
            raise InputError(
                f"The page shows one `prompt`, or two side by side, and {len(self.prompt or ())} were given. "
                "Give the others on the page."
            )


def explore_command(options: ExploreOptions, source: ModelOptions) -> None:
    """Open a live page: type a prompt, see its sinks, and intervene by clicking.

    MODEL may also be the folder of a finished trace, however long. Only this machine can open the page unless --host
    says otherwise, and it needs no network. Ctrl-C ends it.

    Example: sinkscope explore gpt2 --prompt "The cat sat on the mat."
    """
    check_installed("The page", "explore", "starlette", "uvicorn")
    import webbrowser

    from sinkscope.explore.server import listening, private_redirect, serve
    from sinkscope.pages.text import say

    def opened(address: str) -> None:
        say(f"Page: {address}\nCtrl-C ends it.")
        if options.browser:
            webbrowser.open(until_the_end.enter_context(private_redirect(address)).as_uri())

    with ExitStack() as until_the_end, listening(options.host, options.port) as at:
        sources = [_opened(source, options.bos)]
        if options.beside is not None:
            sources.append(_opened(replace(source, model=options.beside), options.bos))
        if options.prompt and not any(opened_source.is_live for opened_source in sources):
            raise InputError(
                "A finished trace has its own text and cannot read `prompt`. Leave `prompt` out, or name a model."
            )
        try:
            serve(sources, prompts=options.prompt or [FIRST_PROMPT], at=at, opened=opened, host=options.host)
        except KeyboardInterrupt:
            say("Ended.")


def _opened(source: ModelOptions, bos: bool | None) -> Source:
    """The finished trace, where `model` is its folder; else the model, loaded."""
    from sinkscope.explore.sources import FinishedTrace, LiveModel
    from sinkscope.results.run_folder import is_training_run
    from sinkscope.user_paths import user_path

    folder = None if source.model is None else user_path(source.model)
    if folder is not None and (folder / "summary.json").is_file() and not is_training_run(folder):
        return FinishedTrace(folder)
    loaded = source.load()
    if loaded.tokenizer is None:
        raise InputError(
            f"{loaded.name} has no tokenizer, so it cannot read a prompt. "
            "Save its tokenizer beside it, or write a trace and open that: sinkscope explore RUN."
        )
    # The call of `load` that does the same, with the options that are not at their defaults.
    arguments = [repr(source.model or loaded.name)]
    for field in fields(source):
        value = getattr(source, field.name)
        if field.name != "model" and value != field.default:
            arguments.append(f"{field.name}={value!r}")
    return LiveModel(loaded, f"sinkscope.load({', '.join(arguments)})", bos=bos)
