"""The API: four paths, answers whole or as server-sent events, both made of the same pieces of news."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.serve.generation import Ask, Scored
from engine.serve.guard import shutting_down, too_large
from engine.serve.requests import ChatRequest, Common, Refused, TextRequest, decoded, error_body, parse, several, whole
from engine.serve.text import CLOSE, OPEN, Answer, Offsets, TokenBytes
from engine.serve.worker import Closing, Done, Failed, Job, Piece, QueueFull, Worker
from engine.tokenizer import TokenizerError

LARGE_BODY = 64 << 10
LARGE_SCORES = 512
"""Bytes of a body and scores of an answer from which work on them leaves the event loop."""


@dataclass(frozen=True)
class Limits:
    """What one request may cost: bytes of body, messages, seconds for the body to arrive, seconds of
    silence after which a stream gets a comment line, seconds without progress after which an answer is given up."""

    body: int = 4 << 20
    messages: int = 2048
    upload_s: float = 30.0
    comment_s: float = 10.0
    stall_s: float = 600.0


class News:
    """What the worker says, read on the event loop; the worker wakes the loop once for all that has gathered."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._gathered: deque[Piece | Done | Failed | None] = deque()
        self._some = asyncio.Event()
        self._woken = False

    def put(self, news: Piece | Done | Failed | None) -> None:
        """Called by the worker."""
        self._gathered.append(news)
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._some.set)
            except RuntimeError:  # the server has shut down meanwhile
                return

    async def get(self, most_s: float) -> list[Piece | Done | Failed | None]:
        """All that has gathered, as soon as there is any; nothing if `most_s` have passed in silence."""
        while not self._gathered:
            try:
                await asyncio.wait_for(self._some.wait(), most_s)
            except TimeoutError:
                return []
            self._some.clear()
            # Before gathering: news put from here on wakes the loop again.
            self._woken = False
        return [self._gathered.popleft() for _ in range(len(self._gathered))]


@dataclass
class Call:
    """One request under way: how its answer is written down."""

    service: Service
    request: Common
    job: Job
    news: News
    chat: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    offsets: Offsets = field(default_factory=Offsets)

    def head(self, streamed: bool) -> dict[str, Any]:
        """The fields that every answer and event begins with."""
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self.chat else "text_completion"
        return {
            "id": ("chatcmpl-" if self.chat else "cmpl-") + self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.name,
            "system_fingerprint": self.service.worker.fingerprint,
        }

    def logprobs(self, tokens: list[Scored]) -> dict[str, Any] | None:
        """Scores of `tokens` in the shape of the endpoint; None if they were not asked for."""
        if self.job.ask.top is None:
            return None
        return self._chat_logprobs(tokens) if self.chat else self._text_logprobs(tokens)

    def _chat_logprobs(self, tokens: list[Scored]) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            data = self.service.token_bytes(token)
            return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

        content = [
            entry(t.id, t.logprob or 0.0) | {"top_logprobs": [entry(i, value) for i, value in t.top]} for t in tokens
        ]
        return {"content": content, "refusal": None}

    def _text_logprobs(self, tokens: list[Scored]) -> dict[str, Any]:
        def text(token: int) -> str:
            data = self.service.token_bytes(token)
            try:
                return data.decode()
            except UnicodeDecodeError:
                # These are keys as well: part of a character must not be the same as any other part.
                return "bytes:" + "".join(f"\\x{b:02x}" for b in data)

        hidden = self.service.token_bytes.hidden
        return {
            "tokens": [text(t.id) for t in tokens],
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [{text(i): value for i, value in t.top} for t in tokens],
            "text_offset": [
                self.offsets.add(b"" if t.id in hidden else self.service.token_bytes(t.id)) for t in tokens
            ],
        }


def usage(done: Done) -> dict[str, Any]:
    """Counts of an answer; predictions are the tokens that the engine drafted for itself."""
    return {
        "prompt_tokens": done.prompt,
        "completion_tokens": done.completion,
        "total_tokens": done.prompt + done.completion,
        "prompt_tokens_details": {"cached_tokens": done.cached, "reuse": done.reuse},
        "completion_tokens_details": {
            "reasoning_tokens": done.reasoning,
            "accepted_prediction_tokens": done.accepted,
            "rejected_prediction_tokens": done.rejected,
        },
    }


class Service:
    """The endpoints, over one worker whose model is loaded."""

    def __init__(self, worker: Worker, limits: Limits = Limits()):
        self.worker, self.limits, self.name = worker, limits, worker.source.name
        self.tokenizer = worker.tokenizer
        self.token_bytes = TokenBytes(worker.tokenizer)
        self.started = int(time.time())

    def app(self) -> Starlette:
        """The application, to be put behind a `Guard`."""
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.text, methods=["POST"]),
        ]
        handlers = {HTTPException: _not_there, Refused: _refused, ClientDisconnect: _nobody, Exception: _failed}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return app

    # -- endpoints -----------------------------------------------------------------------------

    async def health(self, _: Request) -> Response:
        """Whether the worker lives, and its queue."""
        state = self.worker.state()
        alive = state.pop("alive")
        status = 200 if alive else 503
        return JSONResponse({"status": "ok" if alive else "failed", "model": self.name, **state}, status)

    async def models(self, _: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def model(self, request: Request) -> Response:
        """The one model by name."""
        self._named(request.path_params["name"])
        return JSONResponse(self._entry())

    async def chat(self, request: Request) -> Response:
        """/v1/chat/completions."""
        asked: ChatRequest = await self._asked(ChatRequest, request)
        self._named(asked.model)
        prompt, thinking = await asyncio.to_thread(self._render, asked)
        answer = Answer(self.tokenizer, asked.stops, split=True, thinking=thinking)
        return await self._answer(request, asked, self._ask(asked, prompt, "messages"), answer)

    async def text(self, request: Request) -> Response:
        """/v1/completions."""
        asked: TextRequest = await self._asked(TextRequest, request)
        self._named(asked.model)
        given = asked.one
        prompt = await asyncio.to_thread(self._encode, given, "prompt") if isinstance(given, str) else given
        self._room(len(prompt), "prompt")
        bad = next((i for i in prompt if not 0 <= i < self.worker.vocabulary), None)
        if bad is not None:
            raise Refused(f"prompt: token id {bad} is not in 0…{self.worker.vocabulary - 1}", param="prompt")
        return await self._answer(
            request, asked, self._ask(asked, prompt, "prompt"), Answer(self.tokenizer, asked.stops)
        )

    # -- from request to job ---------------------------------------------------------------------

    def _entry(self) -> dict[str, Any]:
        entry = {"id": self.name, "object": "model", "created": self.started, "owned_by": "lilybench"}
        return entry | {"context_length": self.worker.context}

    def _named(self, model: str | None) -> None:
        if model not in (None, self.name):
            raise Refused(
                f"the model {model[:200]!r} is not served here; there is {self.name!r}",
                404,
                param="model",
                code="model_not_found",
            )

    async def _asked(self, kind: type[Common], request: Request) -> Any:
        data = await self._body(request)
        return self._read(kind, data) if len(data) < LARGE_BODY else await asyncio.to_thread(self._read, kind, data)

    def _read(self, kind: type[Common], data: bytes) -> Any:
        body = decoded(data)
        if isinstance(body, dict):
            self._count(body.get("messages"), body.get("prompt"))
        return parse(kind, body)

    def _count(self, messages: Any, prompt: Any) -> None:
        """Refuse lists that are too long, before each entry is looked at."""
        if isinstance(messages, list) and len(messages) > self.limits.messages:
            raise Refused(f"{len(messages)} messages; the limit is {self.limits.messages}", param="messages")
        if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
            raise several(len(prompt))

    async def _body(self, request: Request) -> bytes:
        data = bytearray()
        try:
            async with asyncio.timeout(self.limits.upload_s):
                async for part in request.stream():
                    data += part
                    if len(data) > self.limits.body:
                        raise too_large(self.limits.body)
        except TimeoutError:
            raise Refused(f"the body did not arrive within {self.limits.upload_s:g} s", 408) from None
        return bytes(data)

    def _encode(self, text: str, param: str) -> list[int]:
        whole(text, param)
        # As a batch of one: only batches leave the interpreter to other threads, and a long text takes seconds.
        encoded = self.tokenizer.core.encode_batch_fast([text], add_special_tokens=False)[0]
        self._room(len(encoded), param)
        return encoded.ids

    def _room(self, count: int, param: str) -> int:
        """Tokens that fit behind a prompt of `count`."""
        room = self.worker.context - count
        if room < 1:
            raise Refused(
                f"the prompt has {count} tokens; the context of {self.worker.context} tokens has room for "
                f"{self.worker.context - 1} and an answer",
                param=param,
                code="context_length_exceeded",
            )
        return room

    def _render(self, asked: ChatRequest) -> tuple[list[int], bool]:
        """Ids of a conversation, and whether they end inside a reasoning part."""
        messages = [m.plain() for m in asked.messages]
        try:
            text = self.tokenizer.render_chat(messages, thinking=asked.thinking)
            before = self.tokenizer.render_chat(messages, add_generation_prompt=False, thinking=asked.thinking)
        except TokenizerError as error:
            raise Refused(f"messages: {error}", param="messages") from None
        # Only what the template adds for the answer counts: a message may speak of think tags as well.
        opening = text[len(before) :] if text.startswith(before) else ""
        return self._encode(text, "messages"), opening.rfind(OPEN) > opening.rfind(CLOSE)

    def _ask(self, asked: ChatRequest | TextRequest, prompt: list[int], param: str) -> Ask:
        if not prompt:
            raise Refused(f"{param}: is empty; there is nothing to go on from", param=param)
        room = self._room(len(prompt), param)
        limit = min(asked.limit or room, room)
        sampling = asked.sampling(self.worker.defaults)
        return Ask(prompt, limit, sampling, asked.draw_seed(), asked.top, asked.prompt_cache_key)

    # -- from news to answer ---------------------------------------------------------------------

    async def _answer(self, request: Request, asked: ChatRequest | TextRequest, ask: Ask, answer: Answer) -> Response:
        news = News()
        call = Call(self, asked, Job(ask, answer, news.put), news, isinstance(asked, ChatRequest))
        try:
            self.worker.submit(call.job)
        except QueueFull as error:
            raise Refused(str(error), 429, code="queue_full") from None
        except Closing:
            raise shutting_down() from None
        if asked.stream:
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            return _Stream(self._events(call), headers, lambda: self.worker.cancel(call.job))
        return await self._whole(request, call)

    async def _news(self, call: Call) -> AsyncIterator[Piece | Done | Failed | None]:
        """News until the end; None when there was only silence. The job is cancelled if this ends early."""
        limits = self.limits
        heard = spoke = time.monotonic()
        finished = False
        try:
            while not finished:
                gathered = await call.news.get(limits.comment_s)
                now = time.monotonic()
                if gathered or not self.worker.is_running(call.job):
                    heard = now
                elif now - heard > limits.stall_s:
                    yield Failed(f"no progress for {limits.stall_s:g} s; the request was given up")
                    return
                for news in gathered:
                    finished = finished or isinstance(news, Done | Failed)
                    if news is not None:
                        spoke = now
                        yield news
                if now - spoke >= limits.comment_s:
                    spoke = now
                    yield None
        finally:
            if not finished:
                self.worker.cancel(call.job)

    async def _whole(self, request: Request, call: Call) -> Response:
        collecting = asyncio.ensure_future(self._collect(call))
        leaving = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if collecting.done():
                return collecting.result()
            raise ClientDisconnect()
        finally:
            for task in (collecting, leaving):
                task.cancel()
            await asyncio.gather(collecting, leaving, return_exceptions=True)

    async def _collect(self, call: Call) -> Response:
        texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        tokens: list[Scored] = []
        async for news in self._news(call):
            if isinstance(news, Piece):
                for part, text in news.texts:
                    texts[part].append(text)
                tokens += news.tokens
            elif isinstance(news, Failed):
                raise Refused(news.message, 500)
            elif isinstance(news, Done):
                if news.finish == "cancelled":
                    raise shutting_down()
                if call.job.ask.top is not None and len(tokens) >= LARGE_SCORES:
                    return await asyncio.to_thread(self._written, call, texts, tokens, news)
                return self._written(call, texts, tokens, news)
        raise AssertionError("news ended without an end")

    def _written(self, call: Call, texts: dict[str, list[str]], tokens: list[Scored], done: Done) -> Response:
        reasoning, content = ("".join(texts[part]) for part in ("reasoning", "content"))
        choice: dict[str, Any] = {"index": 0, "logprobs": call.logprobs(tokens), "finish_reason": done.finish}
        if call.chat:
            choice["message"] = {"role": "assistant", "content": content, "refusal": None}
            if reasoning:
                choice["message"]["reasoning_content"] = reasoning
        else:
            choice["text"] = content
        return JSONResponse(call.head(False) | {"choices": [choice], "usage": usage(done)})

    async def _events(self, call: Call) -> AsyncIterator[bytes]:
        """Server-sent events of an answer; `data: [DONE]` ends every one that did not fail."""
        if call.chat:
            yield self._event(call, [_choice({"delta": {"role": "assistant", "content": ""}})])
        # Scores wait for the text they belong to, so that an event without text is rare.
        waiting: list[Scored] = []
        async for news in self._news(call):
            if news is None:
                yield b": still at work\n\n"
            elif isinstance(news, Piece):
                waiting += news.tokens
                for part, text in news.texts:
                    scores, waiting = call.logprobs(waiting), []
                    yield self._event(call, [_choice(_delta(call.chat, part, text), scores)])
            elif isinstance(news, Failed):
                yield _data(error_body(news.message, 500))
                return
            else:
                if news.finish == "cancelled":
                    yield _data(shutting_down().body())
                    return
                scores = call.logprobs(waiting) if waiting else None
                end = _choice({"delta": {}} if call.chat else {"text": ""}, scores, news.finish)
                yield self._event(call, [end])
                if call.request.usage_event:
                    yield self._event(call, [], usage(news))
                yield b"data: [DONE]\n\n"

    def _event(self, call: Call, choices: list[dict[str, Any]], counts: dict[str, Any] | None = None) -> bytes:
        event = call.head(True) | {"choices": choices}
        if call.request.usage_event:
            event["usage"] = counts
        return _data(event)


def _choice(content: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, **content, "logprobs": logprobs, "finish_reason": finish}


def _delta(chat: bool, part: str, text: str) -> dict[str, Any]:
    if not chat:
        return {"text": text}
    return {"delta": {"reasoning_content" if part == "reasoning" else "content": text}}


def _data(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _gone(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Stream(StreamingResponse):
    """Server-sent events whose job is cancelled when they end, in whatever way."""

    def __init__(self, events: AsyncIterator[bytes], headers: dict[str, str], cancel: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._cancel = cancel

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._cancel()


def _error(body: dict[str, Any], status: int, headers: Any = None) -> Response:
    # ASCII: what a client sent and is told back may be no valid text.
    return Response(json.dumps(body), status, headers, "application/json")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _error(error.body(), error.status, {"retry-after": "1"} if error.status == 429 else None)


async def _not_there(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = "/v1/chat/completions, /v1/completions, /v1/models, /health"
    message = f"{request.method} {request.url.path[:200]}: {error.detail}; there are {known}"
    return _error(error_body(message, error.status_code), error.status_code, error.headers)


async def _nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


async def _failed(_: Request, __: Exception) -> Response:
    return _error(error_body("the server failed on this request; its log says where", 500), 500)
