"""Pages of other origins: those that are listed may use the API from a browser."""

from __future__ import annotations

import pytest

from kvrelay.errors import Rejected
from router.config import RouterConfig
from tests.router.http.rig import SEED, door, expected
from tests.router.rig import PROMPT

PAGE = "/v1/completions"
BODY: dict[str, object] = {"prompt": PROMPT, "max_tokens": 3, "seed": SEED}
OURS, OTHER = "https://app.example", "https://evil.example"
ASKED = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,last-event-id,x-stainless-os",
}


async def test_listed_origins_and_no_others() -> None:
    async with door(cors_origin=(OURS, "http://localhost:3000")) as (_, client):
        for origin in (OURS, "http://localhost:3000"):
            asked = await client.options(PAGE, headers={"origin": origin, **ASKED})
            assert asked.status_code == 200
            assert asked.headers["access-control-allow-origin"] == origin
            assert "POST" in asked.headers["access-control-allow-methods"]
            allowed = asked.headers["access-control-allow-headers"]
            assert "last-event-id" in allowed
            assert "x-stainless-os" in allowed
            assert "access-control-allow-credentials" not in asked.headers
            made = await client.post(PAGE, json=BODY, headers={"origin": origin})
            assert made.json()["choices"][0]["text"] == expected(3)
            assert made.headers["access-control-allow-origin"] == origin
            assert "x-request-id" in made.headers["access-control-expose-headers"]
        refused = await client.options(PAGE, headers={"origin": OTHER, **ASKED})
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers
        made = await client.post(PAGE, json=BODY, headers={"origin": OTHER})
        assert "access-control-allow-origin" not in made.headers
        wrong = await client.post(PAGE, json={**BODY, "n": 0}, headers={"origin": OURS})
        assert wrong.status_code == 400
        assert wrong.headers["access-control-allow-origin"] == OURS
        stream = await client.post(PAGE, json={**BODY, "stream": True}, headers={"origin": OURS})
        assert stream.headers["access-control-allow-origin"] == OURS
        assert stream.text.endswith("data: [DONE]\n\n")


async def test_any_origin_and_none() -> None:
    async with door(cors_origin=("*",)) as (_, client):
        made = await client.post(PAGE, json=BODY, headers={"origin": OTHER})
        assert made.headers["access-control-allow-origin"] == "*"
    async with door() as (_, client):
        made = await client.post(PAGE, json=BODY, headers={"origin": OURS})
        assert "access-control-allow-origin" not in made.headers
        asked = await client.options(PAGE, headers={"origin": OURS, **ASKED})
        assert asked.status_code == 405


@pytest.mark.parametrize(
    "origin", ["example.com", "https://a/", "https://a/b", "", "null", "http://"]
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(Rejected) as caught:
        RouterConfig(model="x", announce=True, cors_origin=(origin,))
    assert caught.value.field == "cors_origin"
