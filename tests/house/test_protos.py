"""The contract follows ``buf lint`` STANDARD, as ``make check`` asks buf itself where npm is."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from tests.house.proto_lint import violations
from tests.house.sources import ROOT

BAD = """
syntax = "proto3";
package wrong.V1;
import "unused.proto";
enum Kind { FIRST = 0; KIND_second = 1; }
message some_message { string FieldName = 1; oneof Which { string a = 2; string b = 3; } }
message Shared {}
service Things {
  rpc Get(Shared) returns (Shared);
  rpc list(ListRequest) returns (ListResponse);
}
message ListRequest {}
message ListResponse {}
"""
UNUSED = 'syntax = "proto3"; package wrong.V1; message Unused {}'


def test_the_contract_is_clean() -> None:
    files = []
    for path in sorted((ROOT / "protos" / "kvrelay" / "v1").glob("*.proto")):
        file = FileDescriptorProto()
        import_module(f"kvrelay.v1.{path.stem}_pb2").DESCRIPTOR.CopyToProto(file)
        files.append(file)
    assert len(files) == 6
    assert not list(violations(files))


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is of the dev extra")
    (tmp_path / "Bad.proto").write_text(BAD)
    (tmp_path / "unused.proto").write_text(UNUSED)
    out = tmp_path / "set"
    arguments = [
        "",
        f"-I{tmp_path}",
        "--include_imports",
        f"--descriptor_set_out={out}",
        "Bad.proto",
    ]
    assert protoc.main(arguments) == 0
    found = "\n".join(violations(FileDescriptorSet.FromString(out.read_bytes()).file))
    for rule in (
        "PACKAGE_DIRECTORY_MATCH",
        "PACKAGE_LOWER_SNAKE_CASE",
        "PACKAGE_VERSION_SUFFIX",
        "FILE_LOWER_SNAKE_CASE",
        "IMPORT_USED",
        "ENUM_VALUE_PREFIX",
        "ENUM_VALUE_UPPER_SNAKE_CASE",
        "ENUM_ZERO_VALUE_SUFFIX",
        "MESSAGE_PASCAL_CASE",
        "FIELD_LOWER_SNAKE_CASE",
        "ONEOF_LOWER_SNAKE_CASE",
        "SERVICE_SUFFIX",
        "RPC_PASCAL_CASE",
        "RPC_REQUEST_STANDARD_NAME",
        "RPC_RESPONSE_STANDARD_NAME",
        "RPC_REQUEST_RESPONSE_UNIQUE",
    ):
        assert rule in found, rule
