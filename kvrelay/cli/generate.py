"""``kvrelay generate``: one prompt to a running cluster, the answer streamed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.cli.router_options import AnswerOptions, AnswerWriter, router_client
from kvrelay.cli.screen import paint, print_err, print_out
from kvrelay.cli.usage import usage_json, usage_lines
from kvrelay.client.chunk import Chunk, completion_of
from kvrelay.client.client import Client, Stream
from kvrelay.config.reader import load, option
from kvrelay.errors import Rejected
from kvrelay.sampling import MAX_SAMPLES

LARGEST_PROMPT = 8 << 20
DESCRIPTION = """\
Sends one prompt to a running cluster and prints the answer as it streams. The prompt is the
argument, or standard input, or token ids."""
EPILOG = """\
examples:
  kvrelay generate "Once upon a time" --max-tokens 64
  kvrelay generate --chat "Who are you?" --temperature 0.8 --seed 7 --usage
  kvrelay generate --token-ids 1,2,3 --json
  kvrelay generate "Once upon a time" --n 3 --temperature 0.8
  kvrelay generate "Once upon a time" --explain
  cat prompt.txt | kvrelay generate --endpoints up.json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig(AnswerOptions):
    """The prompt, the router, the parameters, and how to show the answer."""

    prompt: str | None = option(
        None, "the text; '-' or nothing reads standard input", metavar="PROMPT", positional=True
    )
    token_ids: tuple[int, ...] = option((), "the prompt as ids: 1,2,3", low=0, metavar="IDS")
    chat: bool = option(False, "the prompt is a user's message, for the model's chat template")
    system: str | None = option(None, "a system message before it; needs --chat")
    top_k: int | None = option(None, "sample from the K likeliest tokens; 0 is off", metavar="K")
    n: int = option(1, "answers to the prompt, one after another", low=1, high=MAX_SAMPLES)
    stop: tuple[str, ...] = option((), "text that ends the answer")
    ignore_eos: bool = option(False, "continue after the end-of-sequence token")
    priority: int = option(0, "place in the router's queue: higher goes first", low=-8, high=8)
    usage: bool = option(False, "print what was computed where, to standard error")
    explain: bool = option(False, "print also why KV blocks were not found; implies --usage")
    json: bool = option(False, "print text, token ids, finish reason and usage as JSON at the end")

    def __post_init__(self) -> None:
        AnswerOptions.__post_init__(self)
        if self.token_ids and (self.prompt is not None or self.chat):
            raise Rejected("token_ids", "cannot be given together with a text or --chat")
        if self.system is not None and not self.chat:
            raise Rejected("system", "needs --chat")


def main(argv: Sequence[str]) -> int:
    config = load(GenerateConfig, argv, "kvrelay generate", DESCRIPTION, epilog=EPILOG)
    chunks: list[Chunk] = []
    writer = AnswerWriter()
    with router_client(config.address()) as client, _stream(client, config) as stream:
        for chunk in stream:
            chunks.append(chunk)
            if not config.json and config.n == 1:
                writer.write(chunk)
    last = chunks[-1].usage if chunks else None
    if config.json:
        print_out(json.dumps(_as_json(chunks, config.n), ensure_ascii=False, indent=2))
    elif config.n > 1:
        _print_answers(chunks)
    elif config.token_ids and not any(chunk.text for chunk in chunks):
        ids = (str(token) for chunk in chunks for token in chunk.token_ids)
        print_out(",".join(ids))  # the model has no tokenizer
    else:
        print_out()
    if chunks and chunks[-1].finish_reason == "length" and sys.stderr.isatty():
        print_err(paint(f"(cut at {config.max_tokens} tokens: --max-tokens)", "dim", sys.stderr))
    if (config.usage or config.explain) and last is not None:
        print_err(usage_lines(last))
    return 0


def _stream(client: Client, config: GenerateConfig) -> Stream:
    """The stream of the answer; only options that were given are sent."""
    return client.generate(
        prompt=None if config.chat or config.token_ids else _text(config),
        token_ids=config.token_ids or None,
        messages=_messages(config) if config.chat else None,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=config.seed,
        n=config.n if config.n > 1 else None,
        stop=config.stop,
        ignore_eos=config.ignore_eos or None,
        explain=config.explain or None,
        priority=config.priority or None,
        timeout=config.timeout,
    )


def _messages(config: GenerateConfig) -> list[tuple[str, str]]:
    system = [] if config.system is None else [("system", config.system)]
    return [*system, ("user", _text(config))]


def _text(config: GenerateConfig) -> str:
    if config.prompt not in (None, "-"):
        return str(config.prompt)
    if config.prompt is None and sys.stdin.isatty():
        raise Rejected("prompt", "give a text, '-' for standard input, or --token-ids")
    raw = sys.stdin.buffer.read(LARGEST_PROMPT + 1)
    if len(raw) > LARGEST_PROMPT:
        raise Rejected("prompt", f"standard input holds over {LARGEST_PROMPT >> 20} MiB")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Rejected("prompt", f"standard input is not UTF-8: {error}") from None


def _print_answers(chunks: Sequence[Chunk]) -> None:
    """Each answer below its number and seed; token ids where the model has no text."""
    for one in completion_of(chunks).choices:
        print_out(paint(f"--- answer {one.index}, seed {one.seed}: {one.finish_reason}", "dim"))
        print_out(one.text or ",".join(map(str, one.token_ids)))


def _as_json(chunks: Sequence[Chunk], answers: int) -> dict[str, object]:
    last = chunks[-1] if chunks else None
    if answers > 1:
        whole = completion_of(chunks)
        choices = [
            {
                "index": one.index,
                "text": one.text,
                "token_ids": one.token_ids,
                "finish_reason": one.finish_reason,
                "seed": one.seed,
            }
            for one in whole.choices
        ]
        return {"choices": choices, "usage": usage_json(whole.usage)}
    return {
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token for chunk in chunks for token in chunk.token_ids],
        "finish_reason": last.finish_reason if last else None,
        "usage": usage_json(last.usage) if last and last.usage else None,
    }
