"""Checks the stores of a ``--store``: are they reachable, and set up for blocks?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

from kvrelay.cli.doctor.machine import Diagnosis
from kvrelay.config.values import show_size
from kvrelay.errors import KvrelayError, Rejected
from kvstore import connect, redis
from kvstore.urls import public_url, public_urls, split_urls, standalone_url

TIMEOUT = 5.0
TESTED = (6, 2)
EVICTING = re.compile(r"(allkeys|volatile)-(lru|lfu|lrm|random|ttl)")
"""Policies that evict: every block has an expiry, so the volatile ones do too."""


def check_stores(text: str) -> Iterator[Diagnosis]:
    """Findings about each URL of a list; a store that does not answer is ``missing``."""
    try:
        if text:
            connect(text).close()  # says what is wrong with the list
    except KvrelayError as error:
        yield Diagnosis(f"store {public_urls(text)}", "missing", _about(text, error))
        return
    for url in map(standalone_url, split_urls(text) if text else ()):
        try:
            if urlsplit(url).scheme in redis.SCHEMES:
                yield from _redis(url)
            else:
                yield _other(url)
        except KvrelayError as error:
            yield Diagnosis(f"store {public_url(url)}", "missing", _about(url, error))


def _other(url: str) -> Diagnosis:
    with closing(connect(url)) as store:
        stats = store.stats(TIMEOUT)
    found = f"{stats.entries} blocks, {show_size(stats.bytes)} of {show_size(stats.budget)}"
    return Diagnosis(f"store {public_url(url)}", "ok", found)


def _redis(url: str) -> Iterator[Diagnosis]:
    settings = redis.settings_for(url)
    found = redis.examine(settings, TIMEOUT)
    for address, one in found.items():
        name = f"redis {address}"
        if isinstance(one, redis.ServerReport):
            yield from _server(name, one, settings.cluster)
        elif settings.cluster and any(isinstance(o, redis.ServerReport) for o in found.values()):
            means = "its blocks are misses, the others serve"
            yield Diagnosis(name, "absent", f"not reachable: {_line(one)}", means)
        else:
            yield Diagnosis(
                name, "missing", f"not reachable: {_line(one)}", "blocks will be misses"
            )


def _server(name: str, one: redis.ServerReport, cluster: bool) -> Iterator[Diagnosis]:
    """Its version, its eviction, and its behaviour when other servers are down."""
    version = tuple(int(part) for part in re.findall(r"\d+", one.version)[:2])
    older = version < TESTED
    yield Diagnosis(
        name,
        "absent" if older else "ok",
        f"reachable, version {one.version}, {one.keys} keys",
        "older than 6.2, with which kvrelay is tested" if older else "",
    )
    if one.replica and not cluster:
        means = "it accepts no blocks and cannot extend their expiry: name its master"
        yield Diagnosis(f"{name} role", "missing", "is a replica", means)
    yield _room(name, one)
    if one.cluster and not cluster:
        means = "one server of a cluster has only some slots: use redis+cluster://"
        yield Diagnosis(f"{name} cluster", "missing", "is a server of a cluster", means)
    elif one.cluster:
        yield _coverage(name, one)


def _room(name: str, one: redis.ServerReport) -> Diagnosis:
    limit = show_size(one.maxmemory) if one.maxmemory else "none"
    found = f"maxmemory {limit}, maxmemory-policy {one.policy}"
    advice = []
    if not one.maxmemory:
        advice.append("without a limit it grows until the machine is full: CONFIG SET maxmemory")
    if not EVICTING.fullmatch(one.policy):
        advice.append("a full server refuses blocks: CONFIG SET maxmemory-policy allkeys-lru")
    return Diagnosis(f"{name} memory", "absent" if advice else "ok", found, "; ".join(advice))


def _coverage(name: str, one: redis.ServerReport) -> Diagnosis:
    name, words = f"{name} cluster", "cluster-require-full-coverage"
    if one.full_coverage is None:
        return Diagnosis(name, "absent", f"{words} unknown", "this user may not CONFIG GET")
    if one.full_coverage:
        means = f"when one server dies the others refuse too: CONFIG SET {words} no"
        return Diagnosis(name, "absent", f"{words} yes", means)
    return Diagnosis(name, "ok", f"{words} no")


def _about(url: str, error: KvrelayError) -> str:
    """The error behind a finding that begins with the URL: without it."""
    return _line(error).removeprefix(f"{public_url(url)!r}: ")


def _line(error: KvrelayError) -> str:
    text = error.message if isinstance(error, Rejected) else str(error)
    return " ".join(text.split())[:300]
