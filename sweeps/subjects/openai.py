"""A `/v1` endpoint given by URL as a subject, different in kind: only a client's clock sees it.

What a client sees of prefill is the time from the question to the first token of the answer, and of decoding the gaps
between the tokens of a stream. So its rates include the way there and back, the queue, and in prefill the first token.
Like llama-bench it is measured apart from the other arms and stands in no contrast: whether its weights and its output
are theirs cannot be known. What it can be held to is checked: every prompt is a fresh one, a prompt that it says it had
cached is refused, and so is an answer that ends early, since this API cannot ask for an end to be ignored. The
API knows no restore point either: a decode window sends its whole prompt again, and only the gaps after it are timed.

Prompts go as ids where the endpoint takes them and shows that it has the same tokenizer, else as text, whose tokens the
server counts.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import secrets
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sweeps import environment
from sweeps.clock import Clock, SystemClock, WindowVoid, timed
from sweeps.points import Arm, Job, Point, sample_row
from sweeps.prompts import Encoder, Prompts
from sweeps.rows import SampleRow, Status
from sweeps.subjects.base import SubjectError

FLAG = "client_clock"
"""Flag of every row: timed by a client, from outside."""

REPETITIONS = ((8192, 5), (32_768, 2))
"""(largest frontier, most windows of a point); above the last, one."""

WARM_UP = 8192
"""Largest frontier at which a request that is not timed goes before the windows."""

LEAST_TOKENS = 32
"""Least gaps of a decode window: over HTTP a handful is noise."""

TOLERANCE = 0.1
"""Share by which the server's count of a prompt sent as text may miss the frontier."""

MOST_BUNDLED = 4
"""Tokens an event of a stream may hold on average; with more, too little is known of when each came."""

ERRORS_BEFORE_STOP = 2
BUDGET_SHARE = 1 / 3
"""Share of a session's budget that the endpoint may use; the other arms need the rest."""

QUALITY = "not checked: only text is seen through this API"
CHECK_SECONDS = 60.0


class EndpointError(SubjectError):
    """An endpoint that cannot be used or broke off; one line with the reason."""


class Refused(EndpointError):
    """An answer that is an error: `status` is HTTP's, `code` the API's or empty."""

    def __init__(self, message: str, status: int, code: str):
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def too_long(self) -> bool:
        """Whether the prompt was refused for its length."""
        return self.status in (400, 413, 422) and ("context" in self.code or "context" in str(self).lower())


class TooLate(EndpointError):
    """No end within the time allowed."""


@dataclass(frozen=True)
class Address:
    """Where an endpoint is. `base` is the path before ``/completions``; the key itself is in no row and no file."""

    scheme: str
    host: str
    port: int | None
    base: str
    key: str | None = field(default=None, repr=False)

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Address:
        """From an arm's options ``url`` and ``key_env``; asks nobody.

        Raises:
            EndpointError: no URL, one of another kind, or a key that is not in the environment.
        """
        url = options.get("url")
        if not url:
            raise EndpointError("subject=openai needs url=http://HOST:PORT/v1")
        try:
            parts = urllib.parse.urlsplit(str(url))
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise EndpointError(f"url={url}: {error}; write http://HOST:PORT/v1") from None
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise EndpointError(f"url={url} is no endpoint: write http://HOST:PORT/v1")
        if "@" in parts.netloc:
            raise EndpointError("url= holds a password, which would end up in rows: use subject.key_env=VARIABLE")
        name = options.get("key_env")
        key = environment.secret(str(name)) if name else None
        if name and not key:
            raise EndpointError(f"subject.key_env={name}: there is no such environment variable with a key in it")
        return cls(parts.scheme, host, port, parts.path.rstrip("/") or "/v1", key)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}{f':{self.port}' if self.port else ''}{self.base}"


@dataclass
class Streamed:
    """One streamed answer: clock readings at the start, at every event with text, and at its end, in ns."""

    start_ns: int
    stamps: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    finish_ns: int = 0
    usage: dict[str, Any] | None = None
    fingerprint: str | None = None

    @property
    def first_ns(self) -> int:
        """When the first token was there; one without text shows only at the end."""
        return self.stamps[0] if self.stamps else self.finish_ns

    def count(self, name: str) -> int | None:
        """A count of `usage`, or None if the server did not say."""
        value = (self.usage or {}).get(name)
        return value if isinstance(value, int) else None

    @property
    def cached(self) -> int | None:
        """Prompt tokens that the server says it had, or None if it says nothing."""
        details = (self.usage or {}).get("prompt_tokens_details")
        value = details.get("cached_tokens") if isinstance(details, dict) else None
        return value if isinstance(value, int) else None


class Endpoint:
    """A client of one endpoint. Every request has a connection of its own, made before its time starts.

    Args:
        model: its name there; None takes the only one listed.
    """

    def __init__(self, address: Address, clock: Clock, model: str | None = None):
        self.address, self._clock, self.model = address, clock, model

    def find_model(self) -> None:
        """Settle which model is asked.

        Raises:
            EndpointError: none was named and the server lists none or several, or lists others than the one named.
        """
        try:
            listed = self._get("/models")
        except EndpointError as error:
            if self.model and getattr(error, "status", None) not in (401, 403):
                return  # A server may have no list, or a broken one; the first question will tell.
            raise
        entries = listed.get("data") if isinstance(listed, dict) else None
        names = [str(e["id"]) for e in entries or () if isinstance(e, dict) and "id" in e]
        if self.model is None and len(names) == 1:
            self.model = names[0]
        elif self.model not in names:
            known = ", ".join(names[:8]) or "none"
            asked = f"has no model {self.model!r}" if self.model else "does not say which of its models to take"
            raise EndpointError(f"{self.address} {asked}; set subject.model to one of: {known}")

    def stream(self, prompt: str | list[int], tokens: int, seconds: float) -> Streamed:
        """Ask for `tokens` greedy tokens and read the stream.

        Raises:
            TooLate: not done within `seconds`. EndpointError: anything else that went wrong.
        """
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        data = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
        try:
            return timed(self._clock, lambda: self._stream(data, seconds)).value
        except WindowVoid as error:
            raise EndpointError(f"{self.address}: {error}") from None

    # -- HTTP ----------------------------------------------------------------------------------------

    def _stream(self, data: bytes, seconds: float) -> Streamed:
        with self._connected(seconds) as connection:
            made = Streamed(self._clock.now_ns())
            end = made.start_ns + seconds * 1e9
            sock = connection.sock
            connection.request("POST", f"{self.address.base}/completions", data, self._headers())
            answer = connection.getresponse()
            self._accept(answer)
            if "text/event-stream" not in (answer.getheader("content-type") or ""):
                raise EndpointError(f"{self.address}: its answer is no stream of events; is it such a server?")
            while line := answer.readline():
                now = self._clock.now_ns()
                if now > end:
                    raise TooLate(f"{self.address}: no end within {seconds:g} s")
                sock.settimeout(max((end - now) / 1e9, 0.001))
                if not line.startswith(b"data:"):
                    continue
                if line[5:].strip() == b"[DONE]":
                    break
                self._take(made, line[5:], now)
        if made.finish is None:
            raise EndpointError(f"{self.address}: the stream broke off after {len(made.stamps)} events")
        return made

    def _take(self, made: Streamed, data: bytes, now: int) -> None:
        event = self._json(data)
        if event.get("error"):
            raise EndpointError(f"{self.address}: the stream broke off: {_said(event)[0]}")
        made.usage = event["usage"] if isinstance(event.get("usage"), dict) else made.usage
        made.fingerprint = event.get("system_fingerprint") or made.fingerprint
        for choice in event.get("choices") or ():
            if text := choice.get("text"):
                made.stamps.append(now)
                made.text += str(text)
            if choice.get("finish_reason"):
                made.finish, made.finish_ns = str(choice["finish_reason"]), now

    def _get(self, path: str) -> dict[str, Any]:
        with self._connected(CHECK_SECONDS) as connection:
            connection.request("GET", self.address.base + path, headers=self._headers())
            answer = connection.getresponse()
            self._accept(answer)
            return self._json(answer.read())

    @contextlib.contextmanager
    def _connected(self, seconds: float) -> Iterator[http.client.HTTPConnection]:
        kind = http.client.HTTPSConnection if self.address.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.address.host, self.address.port, timeout=seconds)
        try:
            connection.connect()
            yield connection
        except TimeoutError:
            raise TooLate(f"{self.address}: no end within {seconds:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise EndpointError(f"{self.address}: {why}; is the server running there?") from None
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.address.key}"} if self.address.key else {}
        return {"Content-Type": "application/json", "Accept": "*/*", **key}

    def _accept(self, answer: http.client.HTTPResponse) -> None:
        if answer.status == 200:
            return
        try:
            message, code = _said(json.loads(answer.read(65536)))
        except ValueError:
            message, code = answer.reason, ""
        fix = ""
        if answer.status in (401, 403):
            fix = "; name the variable that holds the key with subject.key_env"
        elif answer.status == 404:
            fix = "; is this the path that ends in /v1, and does it know the model?"
        raise Refused(f"{self.address} answers {answer.status}: {message}{fix}", answer.status, code)

    def _json(self, data: bytes) -> dict[str, Any]:
        try:
            made = json.loads(data)
        except ValueError:
            made = None
        if not isinstance(made, dict):
            raise EndpointError(f"{self.address}: its answer is no JSON object; is it an OpenAI-compatible server?")
        return made


def _said(body: Any) -> tuple[str, str]:
    """Message and code of an error as servers write it, in one short line."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return " ".join(str(error).split())[:200], ""
    message = error.get("message") or error.get("detail") or "no message"
    return " ".join(str(message).split())[:200], str(error.get("code") or error.get("type") or "")


# -- before anything is timed ------------------------------------------------------------------------


def check(arm: Arm) -> None:
    """Ask the endpoint of `arm` for two tokens, so that one that is not there is known before anything is timed.

    Raises:
        EndpointError: it cannot be reached, wants a key, has no such model, or does not stream completions.
    """
    endpoint = Endpoint(Address.read(arm.options), SystemClock(), arm.options.get("model"))
    endpoint.find_model()
    endpoint.stream("Once upon a time", 2, CHECK_SECONDS)


@dataclass
class Source:
    """Fresh prompts as the endpoint takes them: by ids or as text, `scale` of its tokens to one of ours."""

    prompts: Prompts
    encoder: Encoder
    form: Literal["ids", "text"]
    scale: float = 1.0
    trial: int = 0

    def take(self, frontier: int) -> str | list[int]:
        """A prompt of about `frontier` tokens that nobody has sent before, in this run or an earlier one."""
        self.trial += 1
        size = max(1, round(frontier / self.scale))
        mark = self.encoder.encode(" ".join(secrets.token_hex(2) for _ in range(8)) + "\n")
        ids = (list(mark) + self.prompts.take(size, self.trial))[:size]
        return ids if self.form == "ids" else self.encoder.decode(ids)  # type: ignore[attr-defined]


def source(endpoint: Endpoint, prompts: Prompts, encoder: Encoder, seconds: float) -> Source:
    """How this endpoint takes prompts.

    Ids are sent only if it answers them as it answers the text they stand for, and counts both alike; without a
    tokenizer of our own there is no text to compare, and ids are all there is.

    Raises:
        EndpointError: it does not count text, or takes no ids where there is no text.
    """
    ids = prompts.take(256, 0)
    by_ids = None
    with contextlib.suppress(Refused):
        by_ids = endpoint.stream(ids, 8, seconds)
    if not hasattr(encoder, "decode"):
        if by_ids is None:
            raise EndpointError(f"{endpoint.address} takes no ids, and this model has no tokenizer to make text with")
        return Source(prompts, encoder, "ids")
    text = encoder.decode(ids)  # type: ignore[attr-defined]
    by_text = endpoint.stream(text, 8, seconds)
    counted = by_text.count("prompt_tokens")
    ours = len(encoder.encode(text))
    if by_ids is not None and by_ids.text == by_text.text and counted in (None, ours):
        return Source(prompts, encoder, "ids")
    if not counted:
        raise EndpointError(f"{endpoint.address} counts no tokens (usage), so the length of a text is unknown")
    return Source(prompts, encoder, "text", counted / ours)


# -- windows -----------------------------------------------------------------------------------------


def measure(
    arm: Arm,
    job: Job,
    session: int,
    points: Sequence[Point],
    prompts: Prompts,
    encoder: Encoder,
    clock: Clock,
    budget_seconds: float = float("inf"),
) -> Iterator[SampleRow]:
    """Time the endpoint over `points`, a row a window.

    What goes wrong becomes a row with its reason. Points that begin after `budget_seconds` are left out.
    """
    start = clock.now_ns()
    seconds = job.cap_seconds if job.cap_seconds > 0 else 3600.0
    try:
        endpoint = Endpoint(Address.read(arm.options), clock, arm.options.get("model"))
        endpoint.find_model()
        given = source(endpoint, prompts, encoder, seconds)
    except EndpointError as error:
        yield from (_row(arm, job, session, point, _status(error), reason=str(error)) for point in points)
        return
    late: dict[str, str] = {}
    for point in points:
        if (clock.now_ns() - start) / 1e9 > budget_seconds:
            late[point.phase] = f"the endpoint's part of the budget, {budget_seconds:.0f} s, was over (budget=)"
        if point.phase in late:
            yield _row(arm, job, session, point, "skipped", reason=late[point.phase])
            continue
        for row in _point(endpoint, given, arm, job, session, point, seconds):
            if row.status == "timeout":
                late[point.phase] = f"over the cap at {point.frontier} tokens"
            yield row


def _point(
    endpoint: Endpoint, given: Source, arm: Arm, job: Job, session: int, point: Point, seconds: float
) -> Iterator[SampleRow]:
    most = next((n for largest, n in REPETITIONS if point.frontier <= largest), 1)
    tokens = 1 if point.phase == "prefill" else 1 + max(point.decode_tokens, LEAST_TOKENS)
    errors = 0
    first = -1 if point.frontier <= WARM_UP else 0
    for slot in range(first, min(point.blocks, most)):
        try:
            answer = endpoint.stream(given.take(point.frontier), tokens, seconds)
            if slot < 0:
                continue
            work, elapsed, extra = window(answer, point, tokens, given.form)
        except EndpointError as error:
            yield _row(arm, job, session, point, _status(error), slot=max(slot, 0), reason=str(error))
            errors += 1
            if _status(error) != "error" or errors == ERRORS_BEFORE_STOP:
                return
            continue
        row = _row(arm, job, session, point, "ok", slot=slot, work_tokens=work, elapsed_ns=elapsed)
        row.executed = [{"op": point.phase, "variant": "endpoint", "tile": None, "calls": 1}]
        row.extra = {"endpoint": str(endpoint.address), "served_model": endpoint.model, "quality": QUALITY, **extra}
        yield row


def window(answer: Streamed, point: Point, tokens: int, form: str) -> tuple[int, int, dict[str, Any]]:
    """Tokens and time of one answer to a request for `tokens` tokens, and what the server said about it.

    Raises:
        EndpointError: what was seen is no measurement of this point.
    """
    cached, counted = answer.cached, answer.count("prompt_tokens")
    if cached:
        raise EndpointError(
            f"{cached} prompt tokens came out of the server's cache, although the prompt is new; switch reuse off there"
        )
    if form == "ids" and counted not in (None, point.frontier):
        raise EndpointError(f"the server counts {counted} tokens in a prompt of {point.frontier} ids")
    prompt = counted or point.frontier
    if form == "text" and (counted is None or abs(prompt - point.frontier) > TOLERANCE * point.frontier):
        raise EndpointError(f"the server counts {counted} tokens in a prompt made for {point.frontier}")
    extra = {
        "prompt_as": form,
        "prompt_tokens": counted,
        "cached_tokens": cached,
        "completion_tokens": answer.count("completion_tokens"),
        "events": len(answer.stamps),
        "system_fingerprint": answer.fingerprint,
    }
    if point.phase == "prefill":
        return prompt, answer.first_ns - answer.start_ns, extra
    work, elapsed = _gaps(answer, tokens)
    return work, elapsed, extra


def _gaps(answer: Streamed, tokens: int) -> tuple[int, int]:
    """Tokens after those of the first event, and the time from that event to the last.

    Where events hold several tokens, the first is taken to hold as many as the others.
    """
    events = len(answer.stamps)
    made = answer.count("completion_tokens")
    made = events if made is None else made
    if made < tokens:
        ended = "ended by itself" if answer.finish == "stop" else f"ended ({answer.finish})"
        raise EndpointError(f"the answer {ended} after {made} of {tokens} tokens; this API cannot ask for more")
    if events < 2 or events * MOST_BUNDLED < made:
        raise EndpointError(f"{made} tokens came in {events} events: the gaps between tokens cannot be seen")
    elapsed = answer.stamps[-1] - answer.stamps[0]
    if elapsed <= 0:
        raise EndpointError("all tokens came at once: the gaps between tokens cannot be seen")
    return max(1, made - math.ceil(made / events)), elapsed


def _status(error: EndpointError) -> Status:
    if isinstance(error, TooLate):
        return "timeout"
    return "skipped" if isinstance(error, Refused) and error.too_long else "error"


def _row(arm: Arm, job: Job, session: int, point: Point, status: Status, **fields: Any) -> SampleRow:
    return sample_row(job, session, point, arm, status, flags=[FLAG], **fields)
