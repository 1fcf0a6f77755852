"""The JSON of answers: chunks of a stream, whole answers, usage, log probabilities.

A chunk is put together as text around the parts that change: there is one for every token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias, cast

from kvrelay.text.detokenizer import detokenizer, token_bytes
from kvrelay.text.tokenizer import NoTokenizer, Tokenizer
from kvrelay.v1 import router_pb2, types_pb2
from router.http.ask import AnswerForm

Json: TypeAlias = dict[str, object]
DONE = "data: [DONE]\n\n"
LINE_ENDS = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Ends of lines for ``str.splitlines`` that JSON does not escape; httpx reads lines like this."""

AT_ONCE = 64  # items of a list that are dumped together
LEVELS = 4  # answer, choices, choice, log probabilities: below that only lists are long

FINISH = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


def dump(value: object) -> str:
    """Compact JSON, with ``LINE_ENDS`` escaped so that every client reads it as one line."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if not text.isascii():
        for end, escaped in LINE_ENDS.items():
            text = text.replace(end, escaped)
    return text


def dump_parts(value: object, levels: int = LEVELS) -> Iterator[str]:
    """The text of ``dump`` in parts, so that an event loop can do something else in between.

    Names are strings. An iterator is a list whose items are made when they are needed.
    """
    if isinstance(value, dict) and value and levels:
        for i, (name, item) in enumerate(value.items()):
            yield f"{',' if i else '{'}{dump(name)}:"
            yield from dump_parts(item, levels - 1)
        yield "}"
    elif isinstance(value, list | tuple) and value and levels and isinstance(value[0], dict):
        for i, item in enumerate(value):
            yield "," if i else "["
            yield from dump_parts(item, levels - 1)
        yield "]"
    elif isinstance(value, list | tuple) and len(value) > AT_ONCE:
        for i in range(0, len(value), AT_ONCE):
            yield f"{',' if i else '['}{dump(value[i : i + AT_ONCE])[1:-1]}"
        yield "]"
    elif isinstance(value, Iterator):
        mark = "["
        while some := list(islice(value, AT_ONCE)):
            yield f"{mark}{dump(some)[1:-1]}"
            mark = ","
        yield "]" if mark == "," else "[]"
    else:
        yield dump(value)


def usage_of(prompt: int, completion: int, cached: int | None) -> Json:
    """OpenAI's usage; ``cached`` is known at the end only, and not of every prompt."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every chunk of an answer has. ``fingerprint``: weights and numeric profile."""

    id: str
    created: int
    model: str
    fingerprint: str

    def fields(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(slots=True)
class AnswerChoice:
    """What one sample has so far."""

    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[types_pb2.Logprobs] = field(default_factory=list)
    calls: list[router_pb2.ToolCallDelta] = field(default_factory=list)
    finish: str | None = None

    def take(self, response: router_pb2.GenerateResponse) -> None:
        """Add a response."""
        self.text += response.text
        self.reasoning += response.reasoning
        self._take_calls(response.tool_calls)
        for token in response.tokens:
            self.token_ids.append(token.id)
            if token.HasField("logprobs"):
                self.logprobs.append(token.logprobs)
        self.finish = FINISH.get(response.finish_reason, self.finish)

    def _take_calls(self, deltas: Sequence[router_pb2.ToolCallDelta]) -> None:
        for delta in deltas:
            if not self.calls or self.calls[-1].index != delta.index:
                self.calls.append(router_pb2.ToolCallDelta(index=delta.index, id=delta.id))
            call = self.calls[-1]
            call.function.name += delta.function.name
            call.function.arguments += delta.function.arguments


class AnswerShape:
    """The JSON of one answer. Subclasses: chats and completions.

    ``kept``: tokens of each choice that the client has of it, when its first response is shown.
    """

    chunk_kind = ""
    whole_kind = ""

    def __init__(
        self,
        head: AnswerHead,
        tokenizer: Tokenizer,
        form: AnswerForm,
        prompts: Sequence[Sequence[int]],
        kept: Mapping[int, Sequence[int]],
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._token_ids = form.token_ids
        self._samples = form.samples
        self._prompts = prompts
        self._kept = kept
        self._bytes = _bytes_of(tokenizer) if form.logprobs else None
        self._begin = dump(head.fields(self.chunk_kind))[:-1] + ',"choices":['
        self._texts: dict[int, _TextLength] = {}  # of each choice
        self._beginning = set[int]()  # choices

    def chunk(self, index: int, part: AnswerChoice, usage: Json | bool | None) -> str:
        """One chunk; ``usage`` is left out if it is false."""
        return f"{self._begin}{dump(self._chunk_choice(index, part))}]{_usage(usage)}}}"

    def usage_chunk(self, usage: Json) -> str:
        """The last chunk, without choices."""
        return f"{self._begin}]{_usage(usage)}}}"

    def first(self, index: int, usage: Json | bool | None) -> str | None:
        """A chunk before the first token, if the kind of answer has one."""
        raise NotImplementedError

    def whole(self, choices: Sequence[AnswerChoice], usage: Json) -> Json:
        """The whole answer."""
        made = self._head.fields(self.whole_kind)
        made["choices"] = [self._whole_choice(i, one) for i, one in enumerate(choices)]
        made["usage"] = usage
        return made

    def _chunk_choice(self, index: int, part: AnswerChoice) -> Json:
        raise NotImplementedError

    def _whole_choice(self, index: int, choice: AnswerChoice) -> Json:
        raise NotImplementedError

    def _prompt(self, index: int) -> list[int]:
        """Token ids of the prompt of a choice."""
        return list(self._prompts[index // self._samples])

    def _raw(self, token: int) -> bytes:
        """The bytes of one token: joined, those of an answer are its text. A special token has its
        name.
        """
        if self._bytes is None:
            return f"token_id:{token}".encode()
        return self._bytes(token) or (self._tokenizer.backend.id_to_token(token) or "").encode()


class ChatShape(AnswerShape):
    """``chat.completion``."""

    chunk_kind = "chat.completion.chunk"
    whole_kind = "chat.completion"

    def first(self, index: int, usage: Json | bool | None) -> str | None:
        delta = {"role": "assistant", "content": ""}
        choice: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        ids = f',"prompt_token_ids":{dump(self._prompt(index))}' if self._token_ids else ""
        return f"{self._begin}{dump(choice)}]{ids}{_usage(usage)}}}"

    def whole(self, choices: Sequence[AnswerChoice], usage: Json) -> Json:
        made = super().whole(choices, usage)
        return {**made, "prompt_token_ids": self._prompt(0)} if self._token_ids else made

    def _chunk_choice(self, index: int, part: AnswerChoice) -> Json:
        choice: Json = {
            "index": index,
            "delta": _delta(part),
            "logprobs": _listed(self._logprobs(part)),
            "finish_reason": part.finish,
        }
        if self._token_ids:
            choice["token_ids"] = part.token_ids
        return choice

    def _whole_choice(self, index: int, choice: AnswerChoice) -> Json:
        made: Json = {
            "index": index,
            "message": _message(choice),
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish,
        }
        return {**made, "token_ids": choice.token_ids} if self._token_ids else made

    def _logprobs(self, choice: AnswerChoice) -> Json | None:
        if not choice.logprobs:
            return None
        content = (
            {
                **self._entry(one.chosen),
                "top_logprobs": [self._entry(top) for top in one.top],
            }
            for one in choice.logprobs
        )
        return {"content": content, "refusal": None}

    def _entry(self, one: types_pb2.TokenLogprob) -> Json:
        raw = self._raw(one.token_id)
        text = raw.decode("utf-8", "backslashreplace")
        return {"token": text, "logprob": one.logprob, "bytes": list(raw)}


class CompletionShape(AnswerShape):
    """``text_completion``."""

    chunk_kind = "text_completion"
    whole_kind = "text_completion"

    def first(self, index: int, usage: Json | bool | None) -> str | None:
        self._beginning.add(index)  # its prompt is sent with the first tokens
        return None

    def _chunk_choice(self, index: int, part: AnswerChoice) -> Json:
        made = self._whole_choice(index, part)
        made["logprobs"] = _listed(cast("Json | None", made["logprobs"]))
        if self._token_ids and index not in self._beginning:
            made["prompt_token_ids"] = None
        self._beginning.discard(index)
        return made

    def _whole_choice(self, index: int, choice: AnswerChoice) -> Json:
        made: Json = {
            "index": index,
            "text": choice.text,
            "logprobs": self._logprobs(index, choice),
            "finish_reason": choice.finish,
        }
        if self._token_ids:
            made["prompt_token_ids"] = self._prompt(index)
            made["token_ids"] = choice.token_ids
        return made

    def _logprobs(self, index: int, choice: AnswerChoice) -> Json | None:
        if not choice.logprobs:
            return None
        text = self._texts.get(index)
        if text is None:
            text = self._texts[index] = _TextLength(self._tokenizer)
            for token in self._kept.get(index, ()):
                text.push(token)
        offsets = (text.push(one.chosen.token_id) for one in choice.logprobs)
        return {
            "tokens": (self._name(one.chosen.token_id) for one in choice.logprobs),
            "token_logprobs": (one.chosen.logprob for one in choice.logprobs),
            "top_logprobs": (
                {self._name(top.token_id): top.logprob for top in (*one.top, one.chosen)}
                for one in choice.logprobs
            ),
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """The text of one token; of a part of a character its bytes, as OpenAI writes them."""
        raw = self._raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return f"bytes:{raw.decode('utf-8', 'backslashreplace')}"


class _TextLength:
    """Counts the characters of a text while its tokens arrive."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = detokenizer(tokenizer)
        self._characters = 0

    def push(self, token: int) -> int:
        """Where the text of ``token`` begins; in the middle of a character, where that begins."""
        begin = self._characters
        self._characters += len(self._detokenizer.push(token))
        return begin


def _listed(logprobs: Json | None) -> Json | None:
    """With lists in the place of iterators."""
    if logprobs is None:
        return None
    return {
        name: list(part) if isinstance(part, Iterator) else part for name, part in logprobs.items()
    }


def _bytes_of(tokenizer: Tokenizer) -> Callable[[int], bytes] | None:
    return None if isinstance(tokenizer, NoTokenizer) else token_bytes(tokenizer)


def _delta(part: AnswerChoice) -> Json:
    """What a chunk adds to a message; the first part of a call has its id, type and name."""
    made: Json = {}
    if part.reasoning:
        made["reasoning"] = part.reasoning
    if part.text or not (part.calls or part.finish or part.reasoning):
        made["content"] = part.text
    if part.calls:
        made["tool_calls"] = [{"index": call.index, **_call(call)} for call in part.calls]
    return made


def _message(choice: AnswerChoice) -> Json:
    content = choice.text if choice.text or not (choice.calls or choice.reasoning) else None
    made: Json = {"role": "assistant", "content": content, "refusal": None}
    if choice.reasoning:
        made["reasoning"] = choice.reasoning
    if choice.calls:
        made["tool_calls"] = [_call(call) for call in choice.calls]
    return made


def _call(call: router_pb2.ToolCallDelta) -> Json:
    function: Json = {"arguments": call.function.arguments}
    if not call.id:
        return {"function": function}
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, **function},
    }


def _usage(usage: Json | bool | None) -> str:
    if usage is None:
        return ',"usage":null'  # in every chunk but one
    return "" if usage is False else f',"usage":{dump(usage)}'
