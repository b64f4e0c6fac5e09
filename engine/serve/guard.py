"""Who may ask, and how much: Host and Origin, the API key, the size of a body; no exception gets past it."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from engine.serve.requests import Refused

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger("engine.serve")
LOCAL_NAMES = frozenset({"localhost"})


def is_loopback(host: str) -> bool:
    """Whether an address or name stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in LOCAL_NAMES


class Guard:
    """ASGI middleware around the API.

    A page on a foreign site can make a browser send requests to this machine, also under a name that was pointed
    here after the page was loaded. So only known names and addresses count as Host, and a request that carries
    the Origin of any page is refused: no page belongs to this server.

    Args:
        app: what is guarded. names: further host names that lead here. wide: whether other machines may ask, so
            that any address counts as Host. key: the API key, or None. most_body: bytes.
    """

    def __init__(self, app: App, names: frozenset[str], wide: bool, key: str | None, most_body: int):
        self.app, self.names, self.wide, self.most_body = app, names, wide, most_body
        self.key = key.encode() if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then pass on."""
        if scope["type"] != "http":
            return
        started = False

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            self._check(scope)
            await self.app(scope, receive, watched)
        except Refused as error:
            await respond(watched, error.status, error.body())
        except asyncio.CancelledError:
            # Nothing but the end of the server cancels a request, and that is no failure of the request.
            if not started:
                await respond(watched, 503, shutting_down().body())
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            log.error("%s %s: %r at %s:%s", scope["method"], scope["path"], error, where.filename, where.lineno)
            if not started:
                failed = Refused("the server failed on this request; its log says where", 500)
                await respond(watched, 500, failed.body())

    def _check(self, scope: Scope) -> None:
        headers = list(scope["headers"])
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or not self._known(hosts[0].decode("latin-1")):
            given = hosts[0].decode("latin-1")[:100] if hosts else ""
            raise Refused(
                f"Host {given!r} is not this server; name it with --allow-host if it is", 403, code="host_not_allowed"
            )
        if any(name == b"origin" for name, _ in headers):
            raise Refused("requests made by web pages (with an Origin) are refused", 403, code="origin_not_allowed")
        if self.key is not None and scope["path"] != "/health":
            given = dict(headers).get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key, self.key):
                raise Refused("the API key is missing or wrong", 401, code="invalid_api_key")
        if scope["method"] == "POST":
            self._check_length(dict(headers))

    def _known(self, host: str) -> bool:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") and ":" in host else host
        name = name.strip("[]").lower()
        if name in self.names or is_loopback(name):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.wide

    def _check_length(self, headers: dict[bytes, bytes]) -> None:
        if b"content-length" not in headers and b"transfer-encoding" not in headers:
            raise Refused("the request has no body: send Content-Length and a JSON object", 411)
        # Not all digits cannot get here: the protocol refuses it.
        if int(headers.get(b"content-length", b"0")) > self.most_body:
            raise too_large(self.most_body)


def shutting_down() -> Refused:
    """The refusal of whatever is under way when the server is told to stop."""
    return Refused("the server is shutting down", 503)


def too_large(most: int) -> Refused:
    """The refusal of a body over the limit."""
    return Refused(f"the body is larger than {most} bytes, the limit of this server", 413, code="body_too_large")


async def respond(send: Send, status: int, body: dict[str, Any]) -> None:
    """Send a JSON answer."""
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status == 429:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
