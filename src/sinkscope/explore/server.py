"""The page of `sinkscope explore` as a web application for this machine alone.

Every address begins with a random token, and the names of other machines and pages are refused, so that neither another
user of the machine nor a page open in the same browser can make the model read anything. One thread runs the models;
requests that would have to wait long are refused with a reason.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from sinkscope.errors import InputError
from sinkscope.explore.readings import QUANTITIES
from sinkscope.explore.sources import Asked, Source
from sinkscope.memory import is_out_of_memory

MOST_BYTES = 1 << 18
"""Of a request."""
MOST_WAITING = 8
"""Requests that are computed or wait for it."""
ASSETS = {
    "": ("sinkscope.explore", "index.html", "text/html"),
    "page.js": ("sinkscope.explore", "page.js", "text/javascript"),
    "maps.js": ("sinkscope.explore", "maps.js", "text/javascript"),
    "page.css": ("sinkscope.explore", "page.css", "text/css"),
    "report.css": ("sinkscope.report", "page.css", "text/css"),
}
"""By address: package, file and type. The look is that of the reports."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
BUSY = InputError(
    expected=f"at most {MOST_WAITING} requests at a time",
    found="more",
    next_step="Wait a moment; the page asks again by itself",
)
NO_MEMORY = InputError(
    expected="memory for this prompt", found="the device full", next_step="Give a shorter prompt, or a smaller model"
)


def application(sources: Sequence[Source], *, prompts: Sequence[str], token: str, port: int) -> Starlette:
    """The page, for requests to this machine that know the token."""
    hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
    worker = ThreadPoolExecutor(1)
    waiting = 0

    async def guard(request: Request, answer: RequestResponseEndpoint) -> Response:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        # A browser says where a POST comes from; other pages may not even learn that there is something here.
        own = f"http://{host}" if origin is not None or request.method == "POST" else None
        known = secrets.compare_digest(request.url.path.split("/")[1].encode(), token.encode())
        if host not in hosts or origin != own or not known:
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
        named = [{"name": source.name, "is_live": source.is_live} for source in sources]
        return JSONResponse({"sources": named, "prompts": list(prompts), "quantities": QUANTITIES})

    async def view(request: Request) -> Response:
        nonlocal waiting
        try:
            asked = Asked.of(await _json_of(request), len(sources))
            if waiting >= MOST_WAITING:
                return _told(BUSY, 503)
            waiting += 1
            try:
                look = asyncio.get_running_loop().run_in_executor(worker, sources[asked.source].view, asked)
                return JSONResponse(await look)
            finally:
                waiting -= 1
        except InputError as error:
            return _told(error, 400)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return _told(NO_MEMORY, 400)

    routes = [
        Route("/{token}/view", view, methods=["POST"]),
        Route("/{token}/start", start),
        Route("/{token}/", asset),
        Route("/{token}/{asset}", asset),
    ]
    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)])


async def _json_of(request: Request) -> Any:
    """The value that a request holds; refuses what is too long or no JSON."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise InputError(expected=f"at most {MOST_BYTES:,} bytes", found="more", next_step="Give a shorter prompt")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(expected="JSON", found=str(error)[:80], next_step="Reload the page") from error


def _told(error: InputError, status: int) -> Response:
    told = {"expected": error.expected, "found": error.found, "next": error.next_step}
    return JSONResponse(told, status)


def listening(port: int) -> socket.socket:
    """A socket on the loopback alone, on this port or, for 0, on a free one; a port in use is refused."""
    try:
        found = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise InputError(
            expected=f"a free port, at 127.0.0.1:{port}",
            found=os.strerror(error.errno or 0),
            next_step="Give another `port`, or leave it out",
        ) from error
    return found


def serve(
    sources: Sequence[Source], *, prompts: Sequence[str], at: socket.socket, opened: Callable[[str], None]
) -> None:
    """Answers until the process is interrupted; `opened` is called with the address."""
    token, port = secrets.token_urlsafe(24), at.getsockname()[1]
    app = application(sources, prompts=prompts, token=token, port=port)
    config = uvicorn.Config(
        app, log_level="error", access_log=False, server_header=False, ws="none", timeout_graceful_shutdown=1
    )
    opened(f"http://127.0.0.1:{port}/{token}/")
    uvicorn.Server(config).run(sockets=[at])
