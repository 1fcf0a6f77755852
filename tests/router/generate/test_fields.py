"""Fields of a request that a worker gets in another form than the client sent them."""

from __future__ import annotations

from kvrelay.errors import Mismatch, Rejected
from kvrelay.text.bad_words import bad_word_ids
from kvrelay.v1 import router_pb2
from tests.router.fakes import answer, decode_worker, ids, prefill_worker, running, tokenizer
from tests.router.rig import PROMPT, failing, request


async def test_a_worker_gets_bad_words_as_token_ids_in_every_leg() -> None:
    prefill, decode = prefill_worker(), decode_worker()
    asked = request(6, logit_bias={9: -3.0}, bad_words=["fox", "dog"])
    asked.sampling.bad_word_ids.add(ids=[7, 8])
    async with running([prefill, decode]) as router:
        whole = await router.generate(asked)
        assert ids(whole) == answer(PROMPT, 6, 5)
        asked.output_token_ids.extend(ids(whole)[:3])
        assert ids(await router.generate(asked)) == ids(whole)[3:]
    legs = [*prefill.legs, *decode.legs]
    assert len(legs) == 3
    for leg in legs:
        assert not leg.sampling.bad_words
        sent = [list(sequence.ids) for sequence in leg.sampling.bad_word_ids]
        assert sent == [[7, 8], *bad_word_ids(tokenizer(), ["fox", "dog"])]
        assert dict(leg.sampling.logit_bias) == {9: -3.0}


async def test_no_more_tokens_are_cached_than_the_prompt_has() -> None:
    asked = request(6)
    asked.cached_prompt_tokens = len(PROMPT) + 1
    async with running([decode_worker()]) as router:
        error = await failing(router.generate(asked))
    assert isinstance(error, Rejected)
    assert str(error).startswith("cached_prompt_tokens: must be at most the prompt's ")


async def test_template_arguments_are_part_of_the_prompt() -> None:
    asked = router_pb2.GenerateRequest(max_tokens=4)
    asked.chat.messages.add(role="user", content="Hi")
    asked.chat.template_kwargs = '{"name": "Ada"}'
    async with running([decode_worker()]) as router:
        first, *_ = await router.generate(asked)
        asked.sampling.seed = first.seed
        asked.prompt_hash = first.prompt_hash
        asked.output_token_ids.append(first.tokens[0].id)
        assert len(ids(await router.generate(asked))) == 3
        asked.chat.template_kwargs = '{"name": "Bob"}'
        error = await failing(router.generate(asked))
        assert isinstance(error, Mismatch)
        assert error.field == "prompt_hash"
