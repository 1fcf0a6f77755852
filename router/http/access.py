"""Who calls: API keys are the tokens of the credentials file, bounded as gRPC's calls are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from kvrelay.errors import Exhausted
from kvrelay.rpc.bearer import HEADER, SCHEME
from kvrelay.rpc.security.credentials import Credentials
from kvrelay.rpc.security.identity import ANONYMOUS, LOCAL_CALLER, Caller, CallerKind
from kvrelay.rpc.server.authorization import RETRY_SECONDS, OpenCalls, refused
from kvrelay.rpc.server.server import CALL_SHARES
from router.http.errors import HttpRefusal

GENERATE = "/kvrelay.v1.RouterService/Generate"
"""The method whose rights and bounds a generating request has."""


class Access:
    """The callers of this door and their open requests."""

    def __init__(self, current: Callable[[], Credentials], max_calls: int) -> None:
        self._current = current
        share = max(max_calls // CALL_SHARES, 1)
        self._calls = OpenCalls(current(), share, max(max_calls - share, 1))

    @contextmanager
    def admitted(self, headers: Mapping[str, str]) -> Iterator[Caller]:
        """The caller of a request, which counts as open inside.

        Raises ``HttpRefusal`` for a caller without a known token, ``Exhausted`` for one with too
        many open requests.
        """
        known = self._current()
        if not known.required:
            yield LOCAL_CALLER
            return
        found = _identify(known, headers)
        if found is None and not known.open:
            raise _unauthorized()
        if found is not None and found.kind is CallerKind.METRICS:
            raise _forbidden("this token only reads metrics pages")
        if found is not None and found.kind is not CallerKind.CLIENT:
            yield found
            return
        if not self._calls.enter(found, GENERATE):
            raise Exhausted(self._calls.full(found, GENERATE), RETRY_SECONDS)
        try:
            yield found or ANONYMOUS
        finally:
            self._calls.leave(found, GENERATE)

    def check_operator(self, headers: Mapping[str, str]) -> None:
        """Raise ``HttpRefusal`` for a caller who may not see figures of all tenants together."""
        known = self._current()
        if not known.required or known.open:
            return
        found = _identify(known, headers)
        if found is None:
            raise _unauthorized()
        if found.kind is CallerKind.CLIENT:
            raise _forbidden("a tenant may not read this page")


def _identify(known: Credentials, headers: Mapping[str, str]) -> Caller | None:
    scheme, _, token = headers.get(HEADER, "").partition(" ")
    if scheme.lower() != SCHEME.strip().lower():
        return None
    return known.identify(token.strip())


def _forbidden(why: str) -> HttpRefusal:
    refused["forbidden"] += 1
    return HttpRefusal(403, "forbidden", HEADER, why)


def _unauthorized() -> HttpRefusal:
    refused["unauthenticated"] += 1
    return HttpRefusal(
        401,
        "invalid_api_key",
        HEADER,
        "no API key that this server knows: send `Authorization: Bearer KEY` with your token",
        ((b"www-authenticate", b"Bearer"),),
    )
