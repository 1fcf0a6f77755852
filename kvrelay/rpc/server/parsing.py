"""A request that does not parse becomes ``Rejected`` naming the field, never an internal error.

protobuf reports only that *some* string had bad UTF-8. So a malformed request, and no other, is
parsed again with a twin of the message in which strings are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TypeVar

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import DecodeError, Message

from kvrelay.errors import Rejected

M = TypeVar("M")


def tolerant_parser(parse: Callable[[bytes], M]) -> Callable[[bytes], M | Rejected]:
    """A deserializer that returns the error instead of raising it inside gRPC."""

    def parse_or_reject(raw: bytes) -> M | Rejected:
        try:
            return parse(raw)
        except DecodeError:
            return malformed(getattr(parse, "__self__", None), raw)

    return parse_or_reject


def malformed(kind: object, raw: bytes) -> Rejected:
    """Why ``raw`` is no message of class ``kind``."""
    descriptor = getattr(kind, "DESCRIPTOR", None)
    if isinstance(descriptor, Descriptor):
        try:
            twin = _twin(descriptor).FromString(raw)
        except DecodeError:
            return Rejected("request", f"{len(raw)} bytes that are no {descriptor.full_name}")
        for field in _bad_strings(twin, descriptor, ""):
            return Rejected(field, "must be UTF-8")
    return Rejected("request", f"{len(raw)} bytes that are no message of this method")


@cache
def _twin(descriptor: Descriptor) -> type[Message]:
    pool = descriptor_pool.DescriptorPool()
    _add_twin(pool, descriptor.file, set())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(descriptor.full_name))


def _add_twin(pool: descriptor_pool.DescriptorPool, file: FileDescriptor, added: set[str]) -> None:
    if file.name in added:
        return
    added.add(file.name)
    for dependency in file.dependencies:
        _add_twin(pool, dependency, added)
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    for message in proto.message_type:
        _strings_to_bytes(message)
    pool.Add(proto)


def _strings_to_bytes(message: descriptor_pb2.DescriptorProto) -> None:
    is_map_entry = message.options.map_entry
    for field in message.field:
        if field.type == field.TYPE_STRING and not (is_map_entry and field.number == 1):
            field.type = field.TYPE_BYTES
    for nested in message.nested_type:
        _strings_to_bytes(nested)


def _bad_strings(twin: Message, original: Descriptor, path: str) -> Iterator[str]:
    for field, value in twin.ListFields():
        name = f"{path}{field.name}"
        values = list(value) if field.is_repeated else [value]
        for index, item in enumerate(values):
            where = f"{name}[{index}]" if field.is_repeated else name
            meant = original.fields_by_name[field.name]
            if meant.type == FieldDescriptor.TYPE_STRING and not _is_utf8(item):
                yield where
            elif isinstance(item, Message) and meant.message_type is not None:
                yield from _bad_strings(item, meant.message_type, where + ".")


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
