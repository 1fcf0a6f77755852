"""The connector of a worker, as its configuration says."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.block.name import Namer
from kvrelay.block.namespace import Namespace
from kvrelay.connector.counters import ConnectorCounters
from kvrelay.connector.mock import MockConnector
from kvrelay.connector.none import NoConnector
from kvrelay.connector.script import PREFIX, read_script
from kvrelay.connector.store import StoreConnector
from kvrelay.engine.core.external import Connector
from kvrelay.engine.runner import Runner
from kvstore.client.connect import connect


def connector(url: str | None, runner: Runner, namespace: Namespace, namer: Namer) -> Connector:
    """External KV at ``url``: none, a store, or a script that distorts one (``mock:FILE``)."""
    if url is None:
        return NoConnector()
    if not url.startswith(PREFIX):
        return StoreConnector(connect(url), namer, namespace, runner.pool)
    scripted = read_script(url)
    inner = connector(scripted.store, runner, namespace, namer)
    return MockConnector(scripted.script, inner)


def counters_of(outside: Connector) -> Callable[[], ConnectorCounters] | None:
    """Reads what the store connector counts; ``None`` without one."""
    if isinstance(outside, MockConnector) and outside.inner is not None:
        return counters_of(outside.inner)
    return (lambda: outside.counters) if isinstance(outside, StoreConnector) else None
