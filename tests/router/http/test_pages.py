"""Token ids of texts and back, the metrics page, and fields of vLLM."""

from __future__ import annotations

import re

import pytest

from kvrelay.rpc.protocol import RETENTIONS
from router.http.ask import read_ask
from router.queue.prompts import MANY_TOKENS
from tests.router.fakes import answer, decode_worker, text_of, tokenizer
from tests.router.http.rig import SEED, door, expected
from tests.router.rig import PROMPT

TURN = {"role": "user", "content": "x"}


async def test_tokens_of_a_text_and_back() -> None:
    ids = tokenizer().encode("Hello, wörld")
    async with door() as (_, client):
        made = (await client.post("/tokenize", json={"prompt": "Hello, wörld"})).json()
        assert made == {
            "count": len(ids),
            "max_model_len": 400,
            "tokens": ids,
            "token_strs": None,
        }
        asked = {"prompt": "Hello", "return_token_strs": True, "model": "tiny"}
        strings = (await client.post("/tokenize", json=asked)).json()["token_strs"]
        assert len(strings) == len(tokenizer().encode("Hello"))
        asked["prompt"] = "Hello" * 5000
        made = (await client.post("/tokenize", json=asked)).json()
        assert MANY_TOKENS < made["count"] == len(made["token_strs"])
        assert None not in made["token_strs"]
        back = (await client.post("/detokenize", json={"tokens": ids})).json()
        assert back == {"prompt": "Hello, wörld"}
        empty = (await client.post("/tokenize", json={"prompt": ""})).json()
        assert (empty["count"], empty["tokens"]) == (0, [])  # as /detokenize of none, and as vLLM
        long = (await client.post("/detokenize", json={"tokens": ids * 1000})).json()
        assert long == {"prompt": "Hello, wörld" * 1000}


@pytest.mark.parametrize(
    ("page", "body", "status", "field"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": [1]}, 400, "prompt"),
        ("tokenize", {"messages": []}, 400, "messages"),
        ("tokenize", {"prompt": "x", "messages": [TURN]}, 400, "messages"),
        ("tokenize", {"prompt": "x", "add_special_tokens": False}, 400, "add_special_tokens"),
        ("tokenize", {"prompt": "x", "model": "other"}, 404, None),
        ("detokenize", {}, 400, "tokens"),
        ("detokenize", {"tokens": "x"}, 400, "tokens"),
        ("detokenize", {"tokens": [1, -1]}, 400, "tokens[1]"),
        ("detokenize", {"tokens": [99_999]}, 400, "tokens[0]"),
        ("detokenize", {"tokens": [1], "model": "other"}, 404, None),
    ],
)
async def test_what_cannot_be_converted(
    page: str, body: dict[str, object], status: int, field: str | None
) -> None:
    async with door() as (_, client):
        made = await client.post(f"/{page}", json=body)
        assert made.status_code == status
        assert made.json()["error"]["param"] == field


async def test_metrics_are_those_of_the_metrics_port() -> None:
    async with door() as (_, client):
        await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3})
        page = await client.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain")
        assert re.search(r"^kvrelay:router_generation_tokens_total{[^}]*} 3.0$", page.text, re.M)
        assert re.search(
            r'^kvrelay:router_requests_total{ended="finished",.*} 1.0$', page.text, re.M
        )
        assert re.search(r"^kvrelay:time_to_first_token_seconds_count{.*} 1.0$", page.text, re.M)


async def test_head_of_a_page_has_its_headers_and_no_body() -> None:
    async with door() as (_, client):
        for page in ("/metrics", "/health", "/ready", "/v1/models"):
            whole, head = await client.get(page), await client.head(page)
            assert head.status_code == whole.status_code == 200, page
            assert head.content == b""
            assert head.headers["content-type"] == whole.headers["content-type"]


async def test_echo_and_one_prompt_in_a_list() -> None:
    body = {"prompt": ["Hello"], "echo": True, "max_tokens": 3, "seed": SEED}
    async with door() as (_, client):
        made = (await client.post("/v1/completions", json=body)).json()
        text = text_of(answer(tokenizer().encode("Hello"), 3, SEED))
        assert made["choices"][0]["text"] == f"Hello{text}"
        ids = {**body, "prompt": PROMPT}
        made = (await client.post("/v1/completions", json=ids)).json()
        assert made["choices"][0]["text"] == text_of(PROMPT) + expected(3)


async def test_fields_reach_the_workers() -> None:
    worker = decode_worker()
    sampling: dict[str, object] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "stop": ["x"],
    }
    body = {**sampling, "prompt": PROMPT, "max_tokens": 3, "seed": 9, "top_k": -1}
    biased = {"logit_bias": {"5": 1.5}, "bad_words": ["no"], "priority": -3}
    async with door([worker]) as (_, client):
        made = await client.post("/v1/completions", json={**body, **biased})
        assert made.status_code == 200, made.text
    sent = worker.legs[0].sampling
    for name, value in sampling.items():
        given = getattr(sent, name)
        assert (list(given) if isinstance(value, list) else given) == value, name
    assert sent.top_k == 0
    assert sent.HasField("top_k")
    assert dict(sent.logit_bias) == {5: 1.5}
    assert sent.bad_word_ids


@pytest.mark.parametrize(("name", "value"), RETENTIONS.items())
def test_retention(name: str, value: int) -> None:
    body: dict[str, object] = {"prompt": "x", "retention": name}
    (message,) = read_ask(body, chat=False, request_id="r", strict=True).messages
    assert message.retention == value


async def test_a_cache_salt_keeps_blocks_apart() -> None:
    worker = decode_worker()
    async with door([worker]) as (_, client):
        for salt in (None, "a", "b", "a"):
            body = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": salt}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
    salts = [leg.tenant_salt for leg in worker.legs]
    assert salts[0] == b""
    assert salts[1] == salts[3]
    assert len(set(salts)) == 3
    digests = [leg.namespace_digest for leg in worker.legs]
    assert len(set(digests)) == 3
