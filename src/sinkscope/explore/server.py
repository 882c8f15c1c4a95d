"""The page of `sinkscope explore` as a web application, for this machine alone unless it is told otherwise.

Every address begins with a random token, and the names of other machines and pages are refused, so that neither another
user of the machine nor a page open in the same browser can make the model read anything. The main thread runs the
models, so that a signal ends a long reading too; requests that would have to wait long are refused with a reason.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import logging
import queue
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from sinkscope.errors import InputError
from sinkscope.explore.sources import Source, TabState
from sinkscope.explore.text_result import QUANTITIES
from sinkscope.memory import is_out_of_memory
from sinkscope.pages import html

THIS_MACHINE = "127.0.0.1"
EVERY_ADDRESS = "0.0.0.0"
"""Where a container listens, so that its host can pass the port on."""
MOST_BYTES = 1 << 18
"""The longest request body."""
MOST_WAITING = 8
"""How many requests may be running or waiting at once; a further one is refused."""
ASSETS = {
    "": ("sinkscope.explore", "index.html", "text/html"),
    "page.js": ("sinkscope.explore", "page.js", "text/javascript"),
    "maps.js": ("sinkscope.explore", "maps.js", "text/javascript"),
    "page.css": ("sinkscope.explore", "page.css", "text/css"),
    "report.css": ("sinkscope.pages", "page.css", "text/css"),
}
"""Address -> package, file and type. The live page looks like the reports, so it shares their style sheet."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
BUSY = InputError(f"{MOST_WAITING} requests are waiting already. Wait a moment; the page asks again by itself.")
NO_MEMORY = InputError("The device has no memory left for this prompt. Give a shorter prompt, or a smaller model.")
ENDED = InputError("This page was ended in its terminal. Start `sinkscope explore` again.")


WAKES_S = 0.5
"""How long Ctrl-C may go unnoticed, in seconds."""


class CallingThread(Executor):
    """Runs what is submitted in the thread that calls `run`."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """A future of the call's result."""
        future: Future[Any] = Future()
        self._calls.put((future, lambda: function(*args, **kwargs)))
        return future

    def stop(self) -> None:
        """Lets `run` return once the waiting calls are done."""
        self._calls.put(None)

    def run(self) -> None:
        """Runs calls until `stop`. A signal that ends the process also ends the call that is running."""
        while True:
            try:
                # With a timeout, because a signal that another thread receives would not wake this one.
                next_call = self._calls.get(timeout=WAKES_S)
            except queue.Empty:
                continue
            if next_call is None:
                return
            future, call = next_call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
            except BaseException:
                future.set_exception(ENDED)
                raise


def application(
    sources: Sequence[Source],
    *,
    prompts: Sequence[str],
    token: str,
    port: int,
    host: str = THIS_MACHINE,
    worker: Executor | None = None,
) -> Starlette:
    """The web application. It answers requests that name this machine, or `host`, and know the token. `worker` runs the
    models, one call at a time."""
    hosts = {f"{name}:{port}" for name in (THIS_MACHINE, "localhost", host)}
    worker = worker or ThreadPoolExecutor(1)
    waiting = 0

    async def guard(request: Request, answer: RequestResponseEndpoint) -> Response:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        # A browser says which page a POST comes from. Any other page gets the same 403 as a wrong token, so that it
        # cannot even learn that something is running here.
        expected = f"http://{host}" if origin is not None or request.method == "POST" else None
        has_token = secrets.compare_digest(request.url.path.split("/")[1].encode(), token.encode())
        if host not in hosts or origin != expected or not has_token:
            response: Response = PlainTextResponse("not for this page", 403)
        else:
            response = await answer(request)
        response.headers.update(HEADERS)
        return response

    async def asset(request: Request) -> Response:
        name = request.path_params.get("asset", "")
        if name not in ASSETS:
            return PlainTextResponse("not found", 404)
        package, file, kind = ASSETS[name]
        content = (importlib.resources.files(package) / "assets" / file).read_text(encoding="utf-8")
        return Response(content, media_type=kind)

    async def start(request: Request) -> Response:
        offered = [{"name": source.name, "is_live": source.is_live} for source in sources]
        return JSONResponse({"sources": offered, "prompts": list(prompts), "quantities": QUANTITIES})

    async def view(request: Request) -> Response:
        nonlocal waiting
        try:
            state = TabState.of(await _json_of(request), len(sources))
            if waiting >= MOST_WAITING:
                return _refusal(BUSY, 503)
            waiting += 1
            try:
                look = asyncio.get_running_loop().run_in_executor(worker, sources[state.source].view, state)
                return JSONResponse(await look)
            finally:
                waiting -= 1
        except InputError as error:
            return _refusal(error, 400)
        except ClientDisconnect:
            return PlainTextResponse("cut off", 400)  # which nobody reads
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return _refusal(NO_MEMORY, 400)

    routes = [
        Route("/{token}/view", view, methods=["POST"]),
        Route("/{token}/start", start),
        Route("/{token}/", asset),
        Route("/{token}/{asset}", asset),
    ]
    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)])


async def _json_of(request: Request) -> Any:
    """The parsed body of a request. Refuses one that is too long or no JSON."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise InputError(f"The request has more than {MOST_BYTES:,} bytes. Give a shorter prompt.")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"The request is not JSON: {str(error)[:80]}. Reload the page.") from error


def _refusal(error: InputError, status: int) -> Response:
    return JSONResponse({"message": str(error)}, status)


def listening(host: str, port: int) -> socket.socket:
    """A socket at an address of this machine, on the port or, for 0, on a free one. A port in use is refused."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"Cannot listen at {host}:{port}: {reason}. Give another `host` or `port`, or leave them out."
        ) from error


def serve(
    sources: Sequence[Source],
    *,
    prompts: Sequence[str],
    at: socket.socket,
    opened: Callable[[str], None],
    host: str = THIS_MACHINE,
) -> None:
    """Serves the page until the process is interrupted. Models run in this thread, the server in another. `opened` is
    called with the address once the server runs."""
    token, port = secrets.token_urlsafe(24), at.getsockname()[1]
    worker = CallingThread()
    app = application(sources, prompts=prompts, token=token, port=port, host=host, worker=worker)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            server_header=False,
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
    )

    def answer() -> None:
        try:
            server.run(sockets=[at])
        finally:
            worker.stop()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        named = THIS_MACHINE if host == EVERY_ADDRESS else host
        opened(f"http://{named}:{port}/{token}/")
        worker.run()
    finally:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # requests that this end cuts off are no errors
        server.should_exit = True
        thread.join(timeout=5)


@contextmanager
def private_redirect(address: str) -> Iterator[Path]:
    """A file that redirects a browser to the address. Only its owner can read it, and it is deleted when the block
    ends.

    The address holds the token, and the command line of a browser is visible to every user of the machine.
    """
    with tempfile.TemporaryDirectory(prefix="sinkscope-") as folder:
        path = Path(folder) / "explore.html"
        path.touch(mode=0o600)
        path.write_text(html.render("explore/redirect.html", address=address), encoding="utf-8")
        yield path
