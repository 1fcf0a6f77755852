"""What ``kvrelay`` offers to applications: names, signatures, hints, values."""

from __future__ import annotations

import inspect
import json
import pydoc
import random
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass
from typing import TYPE_CHECKING
from unittest.mock import ANY

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

import kvrelay
from kvrelay import (
    AsyncClient,
    Client,
    FleetStatus,
    KvrelayError,
    LegUsage,
    Miss,
    QueueStatus,
    Rejected,
    Sampling,
    Usage,
    WorkerInfo,
    WorkerLoad,
    WorkerNamespace,
    WorkerStatus,
    errors,
)
from kvrelay.cli.chat import ChatConfig
from kvrelay.cli.generate import GenerateConfig
from kvrelay.cli.usage import usage_json
from kvrelay.client import AsyncStream, Stream
from kvrelay.client.convert import fleet_of, logprobs_of, usage_of
from kvrelay.client.parameters import HINTS, Parameters
from kvrelay.sampling import DEFAULT_MAX_TOKENS
from kvrelay.v1 import router_pb2, types_pb2
from tests.house.sources import ROOT

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PARAMETERS = list(inspect.signature(Parameters).parameters)


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_every_name_is_visible() -> None:
    own = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, KvrelayError)
    }
    wanted = {"Client", "AsyncClient", "Usage", "LegUsage", "Sampling", "__version__", *own}
    assert wanted <= set(kvrelay.__all__)
    assert set(kvrelay.__all__) <= set(dir(kvrelay))
    for name in kvrelay.__all__:
        assert getattr(kvrelay, name) is not None
    assert {name for name in dir(kvrelay) if not name.startswith("__")} | {"__version__"} == set(
        kvrelay.__all__
    )
    with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
        getattr(kvrelay, "Clinet")  # noqa: B009 - a name that does not exist


def test_both_clients_have_the_same_methods() -> None:
    assert public(Client) == public(AsyncClient)
    assert public(Stream) - {"close"} == public(AsyncStream) - {"aclose"}
    for name in public(Client):
        one, other = (inspect.signature(getattr(kind, name)) for kind in (Client, AsyncClient))
        assert list(one.parameters) == list(other.parameters), name
    one, other = inspect.signature(Client), inspect.signature(AsyncClient)
    assert one.parameters == other.parameters


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("method", ["generate", "complete"])
def test_help_shows_every_parameter(kind: type, method: str) -> None:
    signature = inspect.signature(getattr(kind, method))
    assert list(signature.parameters) == ["self", *PARAMETERS]
    page = pydoc.plain(pydoc.render_doc(getattr(kind, method)))
    assert "max_tokens: int | None = None" in page
    assert "temperature: float | None = None" in page
    assert "**" not in page.splitlines()[2]
    doc = inspect.getdoc(getattr(kind, method)) or ""
    for name in PARAMETERS:
        assert name in doc, name


def test_there_is_one_set_of_defaults() -> None:
    """In the library, in the commands and in the contract."""
    doc = inspect.getdoc(Parameters) or ""
    assert f"default {DEFAULT_MAX_TOKENS}" in doc
    assert f"default {Sampling().temperature:g}." in doc
    for config in (GenerateConfig(), ChatConfig()):
        assert config.max_tokens == DEFAULT_MAX_TOKENS
        assert config.temperature == Sampling().temperature
    contract = ROOT / "protos" / "kvrelay" / "v1"
    told = re.search(r" max_tokens = 7;.*default (\d+)", (contract / "router.proto").read_text())
    assert told is not None
    assert int(told[1]) == DEFAULT_MAX_TOKENS
    types = (contract / "types.proto").read_text()
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_tokens"):
        told = re.search(rf" {name} = \d+;.*default (\d+)", types)
        assert told is not None, name
        assert float(told[1]) == getattr(Sampling(), name)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("stream", "complete"),
        ("best_of", "use n"),
        ("max_new_tokens", "max_tokens"),
        ("tempature", "did you mean temperature?"),
        ("promt", "did you mean prompt?"),
        ("zzz", "the parameters are timeout, prompt"),
    ],
)
async def test_a_parameter_that_does_not_exist_is_answered_with_a_hint(
    name: str, hint: str
) -> None:
    calls: list[Callable[..., object]] = [
        Client("127.0.0.1:1").generate,
        AsyncClient("127.0.0.1:1").complete,
    ]
    for call in calls:
        with pytest.raises(TypeError, match=f"{name}.*{hint}"):
            call(**{"prompt": "x", name: True})


def test_no_hint_is_about_a_parameter_that_exists() -> None:
    assert not HINTS.keys() & set(PARAMETERS)


def test_sampling_may_be_given_as_one_value() -> None:
    chosen = Sampling(temperature=0.5, seed=7, stop=("a", "b"), stop_token_ids=(3,))
    message = Parameters(prompt="x", sampling=chosen, seed=8, stop="c").message().sampling
    assert (message.temperature, message.seed) == (0.5, 8)
    assert (list(message.stop), list(message.stop_token_ids)) == (["c"], [3])
    assert not message.HasField("logprobs")
    with pytest.raises(Rejected, match="eos_token_ids"):
        Parameters(prompt="x", sampling=Sampling(eos_token_ids=(1,))).message()


def filled(message: Message, chance: random.Random) -> Message:
    """The message with a value in every field, two elements in every list."""
    for field in message.DESCRIPTOR.fields:
        for _ in range(2 if field.is_repeated else 1):
            _fill(message, field, chance)  # type: ignore[arg-type]  # of either implementation
    return message


def _fill(message: Message, field: FieldDescriptor, chance: random.Random) -> None:
    kind = field.cpp_type
    value: object
    if kind == FieldDescriptor.CPPTYPE_MESSAGE:
        inner = getattr(message, field.name)
        filled(inner.add() if field.is_repeated else inner, chance)
        return
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        value = 1
    elif kind == FieldDescriptor.CPPTYPE_STRING:
        value = f"{field.name}{chance.randrange(1000)}"
        value = value.encode() if field.type == FieldDescriptor.TYPE_BYTES else value
    elif kind == FieldDescriptor.CPPTYPE_BOOL:
        value = True
    elif kind == FieldDescriptor.CPPTYPE_DOUBLE:
        value = chance.random()
    else:
        value = chance.randrange(1, 1 << 31)
    setattr(message, field.name, value)


def test_a_usage_has_every_figure_of_the_message() -> None:
    """Also: its JSON on the command line is that of the message."""
    message = types_pb2.Usage()
    filled(message, random.Random(5))
    usage = usage_of(message)
    for one in (types_pb2.Usage(), message):
        wanted = MessageToDict(
            one, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        assert usage_json(usage_of(one)) == wanted
    assert usage_of(types_pb2.Usage(legs=[types_pb2.LegUsage()])).legs[0].saved is None
    with pytest.raises(FrozenInstanceError):
        usage.prompt_tokens = 3  # type: ignore[misc]


def test_log_probabilities_are_values() -> None:
    message = types_pb2.Logprobs()
    filled(message, random.Random(6))
    logprobs = logprobs_of(message)
    assert logprobs.chosen.token_id == message.chosen.token_id
    assert [one.logprob for one in logprobs.top] == [one.logprob for one in message.top]


def test_a_usage_can_be_written_as_json() -> None:
    message = types_pb2.Usage()
    filled(message, random.Random(7))
    usage = usage_of(message)
    told = json.loads(json.dumps(asdict(usage)))
    assert told["legs"][1]["missed"][0] == {"reason": "never_stored", "blocks": ANY}
    assert told["legs"][1]["executed"] == usage.legs[1].executed
    assert Miss("evicted") is Miss.EVICTED


def test_a_fleet_has_the_figures_of_the_message() -> None:
    message = router_pb2.ListWorkersResponse()
    filled(message, random.Random(8))
    fleet = fleet_of(message)
    assert len(fleet.workers) == 2
    for status, one in zip(fleet.workers, message.workers, strict=True):
        assert (status.address, status.reason) == (one.address, one.reason)
        assert (status.role, status.state, status.healthy) == ("prefill", "starting", True)
        assert status.info is not None
        assert_copied(status.info, one.info, "namespace")
        assert_copied(status.info.namespace, one.info.namespace)
        assert_copied(status.load, one.load)
    assert_copied(fleet.queue, message.queue)
    assert json.loads(json.dumps(asdict(fleet)))["queue"]["refused"] == message.queue.refused
    unknown = fleet_of(router_pb2.ListWorkersResponse(workers=[router_pb2.WorkerStatus()]))
    (status,) = unknown.workers
    assert (status.role, status.state, status.info) == (None, "unknown", None)
    assert not any(asdict(status.load).values())


def assert_copied(value: DataclassInstance, message: Message, *converted: str) -> None:
    for field in fields(value):
        if field.name not in converted:
            assert getattr(value, field.name) == getattr(message, field.name), field.name


VALUES = (Usage, LegUsage, FleetStatus, WorkerStatus, WorkerInfo, WorkerNamespace, WorkerLoad)


@pytest.mark.parametrize("kind", [*VALUES, QueueStatus])
def test_no_value_holds_a_message(kind: type) -> None:
    assert is_dataclass(kind)
    assert not any("pb2" in str(field.type) for field in fields(kind))
