"""The rules of ``buf lint`` STANDARD for proto3 files, read from descriptors: needs no npm."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

LOWER_SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
UPPER_SNAKE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
PASCAL = re.compile(r"([A-Z][a-z0-9]*)+")
VERSION = re.compile(r"v[1-9][0-9]*((alpha|beta)[0-9]*)?")


def violations(files: Sequence[FileDescriptorProto]) -> Iterator[str]:
    """One line for each breach, with the name of buf's rule."""
    used: dict[str, str] = {}
    for file in files:
        yield from _file(file)
        for service in file.service:
            yield from _service(file, service, used)
        for message in file.message_type:
            yield from _message(file, message)
        for enum in file.enum_type:
            yield from _enum(file, enum)
    yield from _imports(files)


def _file(file: FileDescriptorProto) -> Iterator[str]:
    folder, _, name = file.name.rpartition("/")
    if file.syntax != "proto3":
        yield f"{file.name}: SYNTAX_SPECIFIED"
    if folder != file.package.replace(".", "/"):
        yield f"{file.name}: PACKAGE_DIRECTORY_MATCH: {file.package}"
    if not all(LOWER_SNAKE.fullmatch(part) for part in file.package.split(".")):
        yield f"{file.name}: PACKAGE_LOWER_SNAKE_CASE: {file.package}"
    if not VERSION.fullmatch(file.package.rpartition(".")[2]):
        yield f"{file.name}: PACKAGE_VERSION_SUFFIX: {file.package}"
    if not LOWER_SNAKE.fullmatch(name.removesuffix(".proto")):
        yield f"{file.name}: FILE_LOWER_SNAKE_CASE"
    if file.public_dependency or file.weak_dependency:
        yield f"{file.name}: IMPORT_NO_PUBLIC or IMPORT_NO_WEAK"


def _service(
    file: FileDescriptorProto, service: ServiceDescriptorProto, used: dict[str, str]
) -> Iterator[str]:
    where = f"{file.name}: {service.name}"
    if not PASCAL.fullmatch(service.name):
        yield f"{where}: SERVICE_PASCAL_CASE"
    if not service.name.endswith("Service"):
        yield f"{where}: SERVICE_SUFFIX"
    for rpc in service.method:
        if not PASCAL.fullmatch(rpc.name):
            yield f"{where}.{rpc.name}: RPC_PASCAL_CASE"
        for kind, full in (("Request", rpc.input_type), ("Response", rpc.output_type)):
            name = full.rpartition(".")[2]
            if name not in (rpc.name + kind, service.name + rpc.name + kind):
                yield f"{where}.{rpc.name}: RPC_{kind.upper()}_STANDARD_NAME: {name}"
            if full in used:
                yield f"{where}.{rpc.name}: RPC_REQUEST_RESPONSE_UNIQUE: {name}, of {used[full]}"
            used[full] = f"{service.name}.{rpc.name}"


def _message(file: FileDescriptorProto, message: DescriptorProto) -> Iterator[str]:
    where = f"{file.name}: {message.name}"
    if not PASCAL.fullmatch(message.name):
        yield f"{where}: MESSAGE_PASCAL_CASE"
    for field in message.field:
        if not LOWER_SNAKE.fullmatch(field.name):
            yield f"{where}.{field.name}: FIELD_LOWER_SNAKE_CASE"
        if field.label == field.LABEL_REQUIRED:
            yield f"{where}.{field.name}: FIELD_NOT_REQUIRED"
    for oneof in message.oneof_decl:  # protoc adds `_name` for an optional field
        if not LOWER_SNAKE.fullmatch(oneof.name.removeprefix("_")):
            yield f"{where}.{oneof.name}: ONEOF_LOWER_SNAKE_CASE"
    for enum in message.enum_type:
        yield from _enum(file, enum)
    for nested in message.nested_type:
        if not nested.options.map_entry:
            yield from _message(file, nested)


def _enum(file: FileDescriptorProto, enum: EnumDescriptorProto) -> Iterator[str]:
    where = f"{file.name}: {enum.name}"
    prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
    if not PASCAL.fullmatch(enum.name):
        yield f"{where}: ENUM_PASCAL_CASE"
    if enum.options.allow_alias:
        yield f"{where}: ENUM_NO_ALLOW_ALIAS"
    if enum.value[0].number != 0:
        yield f"{where}: ENUM_FIRST_VALUE_ZERO"
    for value in enum.value:
        if not UPPER_SNAKE.fullmatch(value.name):
            yield f"{where}.{value.name}: ENUM_VALUE_UPPER_SNAKE_CASE"
        if not value.name.startswith(prefix):
            yield f"{where}.{value.name}: ENUM_VALUE_PREFIX"
        if value.number == 0 and not value.name.endswith("_UNSPECIFIED"):
            yield f"{where}.{value.name}: ENUM_ZERO_VALUE_SUFFIX"


def _imports(files: Sequence[FileDescriptorProto]) -> Iterator[str]:
    owners: dict[str, str] = {}
    for file in files:
        names = [one.name for one in file.message_type] + [one.name for one in file.enum_type]
        owners |= {f".{file.package}.{name}": file.name for name in names}
    for file in files:
        needed = {owners.get(name) for name in _references(file)}
        for dependency in file.dependency:
            if dependency not in needed:
                yield f"{file.name}: IMPORT_USED: {dependency}"


def _references(file: FileDescriptorProto) -> Iterator[str]:
    for service in file.service:
        for rpc in service.method:
            yield rpc.input_type
            yield rpc.output_type
    messages = list(file.message_type)
    while messages:
        message = messages.pop()
        messages += message.nested_type
        yield from (field.type_name for field in message.field)
