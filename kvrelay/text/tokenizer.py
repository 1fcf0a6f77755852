"""Text to token ids and back, exactly as ``transformers`` does it for the same folder.

Only local files are read. ``AutoTokenizer`` imports torch (1.3 s more), so the class that it would
choose for most folders is used directly if the folder names it.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvrelay.errors import Rejected, Unservable
from kvrelay.model_folder import missing_folder
from kvrelay.structured import FIELD
from kvrelay.text.bound import bytes_per_token
from kvrelay.text.reasoning import MARKS as REASONING_MARKS
from kvrelay.text.template import RESERVED_ARGUMENTS, template_arguments
from kvrelay.text.tools import MARKS as TOOL_MARKS

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase

MAX_PROMPT_BYTES = 4 << 20
FILES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*", "tekken.json")
"""Files of vocabularies. Without one ``transformers`` makes an empty tokenizer for some models."""
INSTEAD = {
    "sampling.stop": "send stop_token_ids",
    "sampling.bad_words": "send bad_word_ids",
    FIELD: "leave it out",
}
WRONG_VALUES = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
PLAIN_FIELDS = 2  # of a message: role and content
MARKS = (*TOOL_MARKS, *REASONING_MARKS)
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


class TextTooLong(Rejected):
    """A text exceeds the size limit of this server, or the positions of the model."""


class Tokenizer:
    """The tokenizer of one model folder. Safe to use from several threads at once."""

    def __init__(self, folder: str | Path, max_prompt_bytes: int = MAX_PROMPT_BYTES) -> None:
        """Raises ``Unservable`` if the folder has no usable tokenizer."""
        self._pretrained = _load(Path(folder))
        backend = getattr(self._pretrained, "backend_tokenizer", None)
        if backend is None:
            raise Unservable(f"{folder}: only tokenizers with a tokenizer.json are supported")
        self.backend: Backend = _with_marks(backend)
        self.backend.no_truncation()  # as `tokenizer(text)` does; set once, before threads share it
        self.backend.no_padding()
        self.max_prompt_bytes = max_prompt_bytes
        self.vocab_size: int = self.backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(
            token
            for token, added in self.backend.get_added_tokens_decoder().items()
            if added.special
        )

    @cached_property
    def bytes_per_token(self) -> int | None:
        """The most bytes of text that become one token; ``None`` if there is no such number."""
        return bytes_per_token(self.backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of ``tokenizer(text)``; a rendered chat has its special tokens already.

        The batch call lets other threads run, and the fast one does not compute offsets: it takes
        half the time and two thirds of the memory, about 150 bytes for a byte of text.
        """
        encoded = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoded[0].ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens."""
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [list(one.ids) for one in encoded]

    @cached_property
    def reserved_arguments(self) -> frozenset[str]:
        """The names that no argument of the chat template may have."""
        known = inspect.signature(self._pretrained.apply_chat_template).parameters
        return RESERVED_ARGUMENTS | known.keys() | self._pretrained.special_tokens_map.keys()

    @cached_property
    def tool_template(self) -> str:
        """The chat template of conversations with tools; empty if there is none."""
        if not self._pretrained.chat_template:
            return ""
        return self._pretrained.get_chat_template(tools=[])

    @cached_property
    def chat_template(self) -> str:
        """The chat template of conversations without tools; empty if there is none."""
        if not self._pretrained.chat_template:
            return ""
        return self._pretrained.get_chat_template()

    @cached_property
    def added_ids(self) -> Mapping[str, int]:
        """The tokens that are matched as a whole before a text is split."""
        added = self.backend.get_added_tokens_decoder()
        return {one.content: token for token, one in added.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        arguments: str = "",
        tools: Sequence[Mapping[str, object]] = (),
    ) -> str:
        """The text of ``apply_chat_template(messages, tools=tools, add_generation_prompt=True)``.

        ``arguments`` are further ones of the template, as a JSON object. Raises ``Rejected`` for
        the field ``chat``.
        """
        from jinja2 import TemplateError

        if not messages:
            raise Rejected("chat.messages", "is empty: give at least one message")
        if not self._pretrained.chat_template:
            raise Rejected("chat", "this model has no chat template: send `prompt` instead")
        for index, message in enumerate(messages):
            self.check_size(str(message["content"]), f"chat.messages[{index}].content")
        given = template_arguments(arguments, self.reserved_arguments) if arguments else {}
        # With values of types that it does not expect, a template fails in many ways.
        other = given or tools or any(len(message) > PLAIN_FIELDS for message in messages)
        expected = (TemplateError, *WRONG_VALUES) if other else TemplateError
        try:
            text = self._pretrained.apply_chat_template(
                [dict(message) for message in messages],  # type: ignore[arg-type]  # as it takes
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **given,  # type: ignore[arg-type]  # none of these names
            )
        except expected as error:
            raise Rejected("chat", f"the chat template refuses it: {error}") from error
        return cast(str, text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The whole text of ``tokens`` at once, without special tokens."""
        return self.backend.decode(list(tokens), skip_special_tokens=True)

    def check_size(self, text: str, field: str, positions: int | None = None) -> int:
        """The bytes of ``text``. Raises ``TextTooLong`` for ``field`` if it cannot fit.

        It exceeds this server's limit, or would certainly have more tokens than ``positions``.
        """
        size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        if size > self.max_prompt_bytes:
            limit = self.max_prompt_bytes
            raise TextTooLong(field, f"{size} bytes, more than the limit of {limit}")
        most = self.bytes_per_token
        if positions is not None and most is not None and size > positions * most:
            raise TextTooLong(
                field,
                f"{size} bytes, and the {positions} positions of the largest worker hold"
                f" {positions * most} bytes of text at most: shorten it",
            )
        return size


class NoTokenizer(Tokenizer):
    """For a model whose folder has no tokenizer: token ids go in and out, texts are refused."""

    def __init__(self) -> None:
        self.max_prompt_bytes = 0
        self.vocab_size = 0
        self.special_ids = frozenset()

    @property
    def tool_template(self) -> str:
        return ""

    @property
    def chat_template(self) -> str:
        return ""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        arguments: str = "",
        tools: Sequence[Mapping[str, object]] = (),
    ) -> str:
        raise self.refusal("chat")

    def check_size(self, text: str, field: str, positions: int | None = None) -> int:
        raise self.refusal(field)

    def refusal(self, field: str) -> Rejected:
        """The error for a field that needs text."""
        instead = INSTEAD.get(field, "send token ids, over HTTP as the prompt")
        return Rejected(field, f"needs a tokenizer, and this model has none: {instead}")


def load_tokenizer(folder: str | Path, max_prompt_bytes: int = MAX_PROMPT_BYTES) -> Tokenizer:
    """The tokenizer of a model folder, a ``NoTokenizer`` for a folder without files of one.

    Raises ``Unservable`` if there is no such folder, or if its tokenizer cannot be used.
    """
    path = Path(folder)
    if path.is_dir() and not has_tokenizer(path):
        return NoTokenizer()
    return Tokenizer(path, max_prompt_bytes)


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has a file of a vocabulary."""
    return any(True for pattern in FILES for _ in folder.glob(pattern))


def eos_token_ids(folder: str | Path) -> tuple[int, ...]:
    """End-of-sequence ids of generation_config.json, or else of config.json."""
    for name in ("generation_config.json", "config.json"):
        value = _json(Path(folder) / name).get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(item) for item in value)
    return ()


def _load(folder: Path) -> PreTrainedTokenizerBase:
    if (reason := missing_folder(folder)) is not None:
        raise Unservable(f"{folder}: {reason}")
    config = _json(folder / "tokenizer_config.json")
    plain = config.get("tokenizer_class") in _PLAIN_CLASSES and "auto_map" not in config
    logging.getLogger("transformers").addFilter(_is_useful)
    try:
        if plain and (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            loaded = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        else:
            from transformers import AutoTokenizer

            loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise Unservable(f"{folder}: no tokenizer could be loaded: {error}") from error
    return cast("PreTrainedTokenizerBase", loaded)


def _with_marks(backend: Backend) -> Backend:
    """The tokenizer, in which the marks of tool calls and reasoning are part of the text.

    Some models list them among the special tokens, which have no text.
    """
    added = backend.get_added_tokens_decoder().values()
    if not any(one.special and one.content in MARKS for one in added):
        return backend
    state = json.loads(backend.to_str())
    for one in state["added_tokens"]:
        one["special"] = one["special"] and one["content"] not in MARKS
    return type(backend).from_str(json.dumps(state))


def _is_useful(record: logging.LogRecord) -> bool:
    """A router needs no torch: drops what ``transformers`` logs without it when imported."""
    return not record.getMessage().startswith("PyTorch was not found")


def _json(path: Path) -> dict[str, object]:
    try:
        return cast("dict[str, object]", json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise Unservable(f"{path}: not JSON: {error}") from error
