"""Disconnected clients do not fill the log; gRPC's other errors are logged."""

from __future__ import annotations

import importlib
import logging

import pytest

from kvrelay.rpc.server.workarounds import GRPC_LOGGER, quiet_grpc_log

ExecuteBatchError: type[Exception] = importlib.import_module(GRPC_LOGGER).ExecuteBatchError


@pytest.mark.parametrize(
    ("error", "levels"),
    [(ExecuteBatchError("execute_batch"), ["DEBUG"]), (ValueError("a bug"), ["ERROR"])],
)
def test_a_client_that_left_is_no_error_of_the_server(
    error: Exception, levels: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    quiet_grpc_log()
    quiet_grpc_log()
    with caplog.at_level(logging.DEBUG):
        try:
            raise error
        except type(error):
            logging.getLogger(GRPC_LOGGER).exception("raised in core by servicer method [/x/Y]")
    assert [record.levelname for record in caplog.records] == levels
    assert "/x/Y" in caplog.text
