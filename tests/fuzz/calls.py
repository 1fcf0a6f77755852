"""Every method of every service, with valid messages to mutate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf import message_factory
from google.protobuf.message import Message

from kvrelay.block import Namer, Namespace
from kvrelay.rpc.server.authorization import ADMINS
from kvrelay.v1 import decode_pb2, prefill_pb2, router_pb2, store_pb2, types_pb2, worker_pb2
from tests.secured import ADMIN, ALICE, SERVICE

KINDS = {
    "router": (router_pb2, "RouterService"),
    "prefill": (prefill_pb2, "PrefillService"),
    "decode": (decode_pb2, "DecodeService"),
    "worker": (worker_pb2, "WorkerService"),
    "store": (store_pb2, "StoreService"),
}
SERVED = {
    "router": ("router",),
    "prefill": ("prefill", "worker"),
    "decode": ("decode", "worker"),
    "store": ("store",),
}
LEFT_ALONE = frozenset({"/kvrelay.v1.WorkerService/Drain", "/kvrelay.v1.WorkerService/SetRole"})
"""Called as a service, which is refused: as an admin they would drain the workers."""

PROMPT = tuple(range(7, 47))


@dataclass(frozen=True, slots=True)
class Method:
    """One method, who calls it, and a message it would take. ``requests``: it takes a stream."""

    path: str
    token: str
    seed: Message
    requests: bool


def methods(role: str) -> Iterator[Method]:
    """Those that a process of this role serves."""
    for kind in SERVED[role]:
        module, name = KINDS[kind]
        for method in module.DESCRIPTOR.services_by_name[name].methods:
            path = f"/kvrelay.v1.{name}/{method.name}"
            made = message_factory.GetMessageClass(method.input_type)
            for seed in seeds(path) or (made(),):
                yield Method(path, token_for(path), seed, method.client_streaming)


def token_for(path: str) -> str:
    """A token that is allowed to call the method, so that its handler is tested."""
    if path == "/kvrelay.v1.RouterService/Generate":
        return ALICE
    return ADMIN if path in ADMINS - LEFT_ALONE else SERVICE


def seeds(path: str) -> tuple[Message, ...]:
    """Valid messages with fields set."""
    name = path.split("/")[-1]
    if name == "Generate":
        return generates()
    if name == "Prefill":
        return (prefill_pb2.PrefillRequest(leg=leg()),)
    if name == "Decode":
        return (
            decode_pb2.DecodeRequest(leg=leg()),
            decode_pb2.DecodeRequest(
                leg=leg(number=1),
                handoff=types_pb2.Handoff(
                    saved_tokens=40, last_block_name=bytes(32), signature=bytes(32)
                ),
            ),
        )
    return store_seeds(name)


def leg(number: int = 0) -> types_pb2.Leg:
    return types_pb2.Leg(
        request_id="fuzz",
        prompt_token_ids=PROMPT,
        max_tokens=3,
        leg_index=number,
        sampling=types_pb2.Sampling(
            temperature=0.5,
            seed=1,
            stop_token_ids=[3],
            logit_bias={9: 1.5},
            bad_word_ids=[types_pb2.TokenSequence(ids=[5, 6])],
        ),
    )


def generates() -> tuple[Message, ...]:
    sampling = types_pb2.Sampling(temperature=0.0, stop=["zz"], logprobs=2)
    chat = router_pb2.Chat(messages=[router_pb2.ChatMessage(role="user", content="hello")])
    arguments = router_pb2.Chat(messages=chat.messages, template_kwargs='{"thinking": [true]}')
    ids = router_pb2.TokenIds(ids=PROMPT)
    words = types_pb2.Sampling(
        logit_bias={3: -2.5, 7: 100.0},
        bad_words=["zz", "a b"],
        bad_word_ids=[types_pb2.TokenSequence(ids=[5, 6])],
    )
    return (
        router_pb2.GenerateRequest(token_ids=ids, max_tokens=3, sampling=words),
        router_pb2.GenerateRequest(chat=arguments, max_tokens=2, n=3),
        router_pb2.GenerateRequest(
            token_ids=ids,
            max_tokens=3,
            sampling=types_pb2.Sampling(seed=1),
            n=2,
            samples=[
                router_pb2.SampleOutput(token_ids=[5]),
                router_pb2.SampleOutput(token_ids=[6, 7, 8], ended=True),
            ],
        ),
        router_pb2.GenerateRequest(prompt="Once", max_tokens=3, sampling=sampling),
        router_pb2.GenerateRequest(token_ids=ids, max_tokens=3, output_token_ids=[5]),
        router_pb2.GenerateRequest(chat=chat, max_tokens=2),
    )


def store_seeds(name: str) -> tuple[Message, ...]:
    namer = Namer(Namespace("fuzz", "r", "float32", "layout", 4))
    names = namer.chain(PROMPT, 4)
    claims = [store_pb2.Claim(name=one, length=4096) for one in names]
    head = store_pb2.PutHead(claims=claims[:2])
    made: dict[str, tuple[Message, ...]] = {
        "Lookup": (
            store_pb2.LookupRequest(
                names=names, tails=[store_pb2.Tail(after=10, name=names[0])], lease_ms=50
            ),
        ),
        "Get": (store_pb2.GetRequest(names=names),),
        "Locate": (store_pb2.LocateRequest(names=names, lease_ms=50),),
        "Reserve": (store_pb2.ReserveRequest(claims=claims, wait_ms=20),),
        "Put": (store_pb2.PutRequest(head=head), store_pb2.PutRequest(data=bytes(8192))),
        "PutSmall": (store_pb2.PutSmallRequest(head=head, data=bytes(8192)),),
        "Release": (store_pb2.ReleaseRequest(boot=bytes(16), leases=[1, 2, 3]),),
        "Recheck": (store_pb2.RecheckRequest(name=names[0]),),
        "Inspect": (store_pb2.InspectRequest(name=names[0]),),
        "List": (store_pb2.ListRequest(limit=5),),
    }
    return made.get(name, ())
