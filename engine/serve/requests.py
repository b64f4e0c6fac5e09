"""What a client may ask: shapes, types and limits of the two endpoints, each refused by name.

Fields that would change the answer and are not supported are refused; fields that are not known are ignored.
"""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.generate import Sampling

MOST_STOPS = 4
Unit = Annotated[float, Field(gt=0, le=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=1)]
First = Field(fail_fast=True)
"""Of a list, the first complaint is enough: a million would take seconds to gather."""


NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty", "length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("echo", "ignore_eos", "include_stop_str_in_output", "use_beam_search"), (False,)),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids", "bad_words", "tools", "functions"), ([],)),
    **dict.fromkeys(("suffix", "chat_template"), ("",)),
    # An empty schema is one as well: it asks for JSON.
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), (False,)),
    "logit_bias": ({},),
    # An answer without tools is what "auto" allows; to be made to call one is another matter.
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    # A switch of the chat template, to be given with the template's other variables.
    "enable_thinking": (),
}
"""Fields that are not supported, and which values of theirs change nothing; null never does."""


class Refused(ValueError):
    """A request that cannot be served: status, the parameter at fault, a code for programs."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The error as clients of this API expect it."""
        return error_body(str(self), self.status, self.param, self.code)


def unsupported(name: str) -> Refused:
    """The refusal of a field that would change the answer."""
    return Refused(f"{name}: not supported; leave it out", param=name, code="unsupported_parameter")


def whole(text: str, param: str) -> None:
    """Refuse half of a surrogate pair, which JSON can write and no text holds.

    Raises:
        Refused: names `param`.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Refused(f"{param}: holds half of a surrogate pair, which is no text", param=param) from None


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """``{"error": {message, type, param, code}}``, the type chosen by status."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class TextPart(_Model):
    """One part of a message; text only."""

    type: Literal["text"]
    text: str


class Message(_Model):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], First] | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None

    def plain(self) -> dict[str, Any]:
        """The message as a chat template reads it: text parts joined, no null."""
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content or ())
        made = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return made | ({"reasoning_content": self.reasoning_content} if self.reasoning_content else {})


class StreamOptions(_Model):
    """include_usage: end the stream with an event of counts."""

    include_usage: bool | None = None


class TemplateOptions(_Model):
    """Variables of the chat template; enable_thinking: let the model reason first."""

    enable_thinking: bool | None = None


class ResponseFormat(_Model):
    """Plain text is all there is."""

    type: Literal["text"]


class Common(_Model):
    """What both endpoints take. None stands for the default throughout."""

    model: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[str], First] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    n: Literal[1] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    length_penalty: float | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[Any] | None = None
    allowed_token_ids: list[Any] | None = None
    bad_words: list[Any] | None = None
    best_of: Literal[1] | None = None
    use_beam_search: bool | None = None
    echo: bool | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    tool_choice: Any = None
    modalities: Any = None
    chat_template: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    enable_thinking: bool | None = None
    default_limit: ClassVar[int | None] = None
    """Most tokens where the request says nothing; None for the rest of the context."""

    @property
    def stops(self) -> list[str]:
        """Stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def limit(self) -> int | None:
        """Most tokens to generate; the newer name counts where both are given."""
        return self.max_completion_tokens or self.max_tokens or self.default_limit

    @property
    def usage_event(self) -> bool:
        """Whether a stream ends with counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Refuse what types cannot say.

        Raises:
            Refused: stop strings that are empty, no text or too many, what `NEUTRAL` does not allow, stream options
                without a stream.
        """
        if len(self.stops) > MOST_STOPS:
            raise Refused(f"stop has {len(self.stops)} strings; at most {MOST_STOPS} are allowed", param="stop")
        if not all(self.stops):
            raise Refused("stop holds an empty string, which every text contains; leave it out", param="stop")
        for stop in self.stops:
            whole(stop, "stop")
        for name, neutral in NEUTRAL.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise unsupported(name)
        if self.stream_options is not None and not self.stream:
            raise Refused("stream_options is allowed only with stream=true", param="stream_options")

    def sampling(self, defaults: dict[str, Any]) -> Sampling:
        """How to draw; what is left out comes from the checkpoint's generation_config.json, else temperature 1."""
        drawn = defaults.get("do_sample", True)
        temperature = self.temperature if self.temperature is not None else defaults.get("temperature", 1.0)
        top_k = self.top_k if self.top_k is not None else defaults.get("top_k", 0)
        top_p = self.top_p if self.top_p is not None else defaults.get("top_p", 1.0)
        if self.temperature is None and not drawn:
            temperature = 0.0
        return Sampling(float(temperature), int(top_k), float(top_p))

    def draw_seed(self) -> int:
        """The seed given, as an unsigned 64-bit number; without one, any."""
        return secrets.randbits(64) if self.seed is None else self.seed % 2**64


class ChatRequest(Common):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1), First]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    @property
    def thinking(self) -> bool | None:
        """Whether the template is to open a reasoning part; None leaves it to the template."""
        if self.chat_template_kwargs and self.chat_template_kwargs.enable_thinking is not None:
            return self.chat_template_kwargs.enable_thinking
        return None if self.reasoning_effort is None else self.reasoning_effort != "none"

    @property
    def top(self) -> int | None:
        """Alternatives to score, None for no scores."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        if self.enable_thinking is not None:
            raise Refused("enable_thinking: belongs in chat_template_kwargs", param="enable_thinking")
        super().check()
        for at, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":
                where = f"messages[{at}].content"
                raise Refused(f"{where} is null; a {message.role} message needs text", param=where)
            for name in ("tool_calls", "function_call"):
                if getattr(message, name):
                    raise unsupported(f"messages[{at}].{name}")
            whole(message.reasoning_content or "", f"messages[{at}].reasoning_content")
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused("top_logprobs needs logprobs=true", param="top_logprobs")


class TextRequest(Common):
    """Body of /v1/completions: one prompt, as text or as ids."""

    prompt: (
        str
        | Annotated[list[int], First]
        | Annotated[list[str], First]
        | Annotated[list[Annotated[list[int], First]], First]
    )
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    default_limit: ClassVar[int | None] = 16

    @property
    def top(self) -> int | None:
        """Alternatives to score, None for no scores."""
        return self.logprobs

    @property
    def one(self) -> str | list[int]:
        """The prompt, out of a list of one.

        Raises:
            Refused: several prompts, or none.
        """
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return given  # type: ignore[return-value]
        if len(given) != 1:
            raise several(len(given))
        return given[0]  # type: ignore[return-value]


def several(count: int) -> Refused:
    """The refusal of `count` prompts in one request."""
    return Refused(f"prompt holds {count} prompts; send one a request", param="prompt")


def decoded(data: bytes) -> Any:
    """The JSON value in a body.

    Raises:
        Refused: it is no UTF-8, no JSON, or nested too deeply.
    """
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise Refused(f"the body is no UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise Refused("the body is nested too deeply") from None
    except ValueError as error:
        raise Refused(f"the body is no JSON: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def parse(kind: type[Common], body: Any) -> Any:
    """A checked request of `kind` from decoded JSON.

    Raises:
        Refused: the first field at fault, by name.
    """
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    try:
        made = kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(error, body) from None
    made.check()
    return made


def _refusal(error: ValidationError, body: dict[str, Any]) -> Refused:
    """One line for the deepest complaint: of the branches of a union, the one that got furthest fits best."""
    first = max(
        error.errors(include_url=False, include_context=False, include_input=False), key=lambda e: len(e["loc"])
    )
    param = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in _path(first["loc"], body)).lstrip(".")
    code = "missing_required_parameter" if first["type"] == "missing" else None
    return Refused(f"{param or 'body'}: {first['msg']}", param=param or None, code=code)


def _path(loc: tuple[int | str, ...], body: Any) -> list[int | str]:
    """`loc` without the names of union branches, which no client has written."""
    path: list[int | str] = []
    here = body
    for at, step in enumerate(loc):
        if isinstance(step, int) and isinstance(here, list):
            here = here[step]
        elif isinstance(here, dict) and (step in here or (at == len(loc) - 1 and "[" not in str(step))):
            here = here.get(step)
        else:
            continue
        path.append(step)
    return path
