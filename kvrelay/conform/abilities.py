"""What a server can do, found by asking it. Every ability it lacks has a reason."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from kvrelay.errors import KvrelayError, Unavailable
from kvrelay.load.driver import perform
from kvrelay.load.http_door import DoorOptions, HttpDoor
from kvrelay.load.request import LoadAnswer, LoadRequest, Part
from kvrelay.rpc.security.tls import HttpsClient

IDS = tuple(range(40, 52))
TEXT = "a"
FORMS = (("token ids", False, IDS), ("text", False, TEXT), ("chats", True, TEXT))
REFUSAL = re.compile(r"HTTP \d|the stream ended with an error")
MOST_ADDED = 2  # tokens, such as one for the beginning
LEAST: dict[str, object] = {"seed": None, "stream_options": None}
"""Fields of every request of the load generator that a server may refuse."""


@dataclass(slots=True)
class Abilities:
    """``fields``: for every request. ``overhead``: prompt tokens that the server adds itself.

    ``missing``: why the server lacks an ability; what is not there, it has.
    """

    chat: bool = False
    fields: dict[str, object] = field(default_factory=dict)
    overhead: int = 0
    engine: str = "unknown"
    missing: dict[str, str] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return name not in self.missing


ABILITIES = {
    "usage": "usage",
    "seed": "seed",
    "ids_in": "token ids in",
    "ids_out": "token ids out",
    "logprobs": "log probabilities",
    "cached": "cached tokens",
    "salt": "cache_salt",
    "samples": "n samples",
}
"""Names for readers."""


@dataclass(slots=True)
class Inquiry:
    """Asks one server; ``door`` is the one to use afterwards."""

    door: HttpDoor
    timeout: float
    found: Abilities = field(default_factory=Abilities)
    _prompt: Part = IDS

    async def run(self) -> Abilities:
        """Raises ``Unavailable`` if it answers neither completions nor chats."""
        found = self.found
        found.engine = await self._engine()
        await self._form()
        await self._try("seed", {"seed": 5, "temperature": 0.9}, keep=False)
        if found.has("seed"):
            del found.fields["seed"]
        await self._try("eos", {"ignore_eos": True})
        await self._try("ids_out", {"return_token_ids": True})
        wanted = {"logprobs": True, "top_logprobs": 1} if found.chat else {"logprobs": 1}
        await self._try("logprobs", wanted)
        await self._try("salt", {"cache_salt": "a"}, keep=False)
        if found.has("salt") and (await self._ask({"cache_salt": 7})).ended == "done":
            # One that knows the field refuses a number; others do not look at it.
            found.missing["salt"] = "the server takes any value: it does not know the field"
        await self._try("samples", {"n": 2, "temperature": 0.9}, keep=False)
        await self._try("greedy samples", {"n": 2, "temperature": 0.0}, keep=False)
        return found

    async def _form(self) -> None:
        """Completions of token ids, else of text, else chats; and what the usage counts there."""
        found, errors = self.found, []
        for form, chat, prompt in FORMS:
            found.fields = dict(LEAST)
            self._prompt = prompt
            if chat and not found.chat:
                found.chat = True
                self.door.use_chat()
            answer = await self._ask()
            if answer.ended == "done" and answer.account is None:
                await self._try("usage", {"stream_options": {"include_usage": True}})
                answer = await self._ask()
            fault = self._counts(answer) if answer.ended == "done" else answer.error
            if fault is None:
                break
            errors.append(f"{form}: {fault}")
            found.missing.setdefault("ids_in", fault)
        else:
            raise Unavailable("; ".join(errors))
        if answer.account is None or "cached" not in answer.account.sources:
            found.missing["cached"] = "usage has no prompt_tokens_details.cached_tokens"

    def _counts(self, answer: LoadAnswer) -> str | None:
        """Note the prompt tokens that were not sent; why they are too many."""
        count = 0 if answer.account is None else answer.account.prompt_tokens
        if isinstance(self._prompt, str):
            self.found.overhead = count  # of a text it is not known how many these are
        elif answer.account is not None:
            self.found.overhead = count - len(self._prompt)
            if not 0 <= self.found.overhead <= MOST_ADDED:
                return f"{len(self._prompt)} ids were counted as {count} prompt tokens"
        return None

    async def _try(self, name: str, fields: Mapping[str, object], keep: bool = True) -> None:
        """Keep fields that the server takes and acts on."""
        found = self.found
        answer = await self._ask(fields)
        if answer.ended != "done":
            found.missing[name] = _refusal(answer)
        elif name == "usage" and answer.account is None:
            found.missing[name] = "no usage in the stream"
        elif name == "ids_out" and not answer.ids:
            found.missing[name] = "answers have no token_ids"
        elif name == "logprobs" and not answer.chosen:
            found.missing[name] = "answers have no log probabilities"
        elif keep:
            found.fields |= fields

    async def _ask(self, fields: Mapping[str, object] | None = None) -> LoadAnswer:
        given = {**self.found.fields, **(fields or {})}
        request = LoadRequest(number=0, parts=(self._prompt,), max_tokens=4, seed=0, fields=given)
        return await perform(self.door, request, self.timeout)

    async def _engine(self) -> str:
        """What it says it is: vLLM and llama.cpp have a page with their version."""
        for path, names in (("/version", ("version",)), ("/props", ("build_info",))):
            with suppress(ValueError, AttributeError):
                page = json.loads(await self.door.server.page(path) or "")
                for name in names:
                    if page.get(name):
                        return f"{name} {page[name]}"
        with suppress(ValueError, LookupError, TypeError, KvrelayError):
            listed = json.loads(await self.door.server.page("/v1/models") or "")
            return f"owned by {listed['data'][0]['owned_by']}"
        return "unknown"


def _refusal(answer: LoadAnswer) -> str:
    """Why the server refused; ``Unavailable`` if it broke, which says nothing of its abilities."""
    if not REFUSAL.match(answer.error):
        raise Unavailable(answer.error or answer.ended)
    return answer.error


def door_of(url: str, model: str, token: str | None, https: HttpsClient | None = None) -> HttpDoor:
    """A door that sends nothing but what it is asked to."""
    tokens = {"": token} if token else {}
    return HttpDoor(url, DoorOptions(model=model, plain=True, tokens=tokens, https=https))
