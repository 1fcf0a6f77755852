"""``kvrelay store inspect NAME``: the header of one block, and whether the block is intact."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrelay.block.header import Header
from kvrelay.block.name import root_name
from kvrelay.cli.screen import paint, print_out, table
from kvrelay.cli.store.options import StoreSelection, as_json, browsing, connected, places
from kvrelay.config.reader import load, required
from kvrelay.config.values import show_bytes
from kvrelay.errors import KvrelayError, NotFound
from kvstore.base import ListedBlock, NameQuery
from kvstore.client.browse import resolve_digits
from kvstore.client.verify import VerifiedBlock, verify_blocks
from kvstore.urls import public_url

DESCRIPTION = """\
Shows one block of a store: its header with the token ids, its parent, its lengths and its readers.
Reads the block back and checks its checksums and its name. NAME is the beginning of the name, long
enough to fit one block only. Ends with status 1 if the block is absent or wrong."""
LINE = 88


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectConfig(StoreSelection):
    """The block to inspect."""

    name: str = required(str, "first digits of its name", metavar="NAME", positional=True)


@dataclass(frozen=True, slots=True)
class InspectedBlock:
    """A block of ``store``. ``parent_there``: whether its parent is in the same store."""

    store: str
    listed: ListedBlock
    header: Header
    parent_there: bool
    state: str

    @property
    def right(self) -> bool:
        return self.state == "right"

    def as_json(self) -> dict[str, object]:
        """Every field as JSON."""
        listed, header = self.listed, self.header
        return {
            **as_json(listed),
            "store": self.store,
            "namespace": header.namespace.hex(),
            "parent": header.parent.hex(),
            "parent_there": self.parent_there,
            "count": header.count,
            "tokens": list(header.tokens),
            "dtype": header.dtype,
            "shape": list(header.shape),
            "header_bytes": header.length,
            "payload_bytes": header.payload_bytes,
            "payload_checksums": [f"{one:016x}" for one in header.checksums],
            "state": self.state,
            "readers": readers(listed, header),
        }


def main(argv: Sequence[str]) -> int:
    config = load(InspectConfig, argv, "kvrelay store inspect", DESCRIPTION)
    found = _found(config, config.urls())
    if config.json:
        print_out(json.dumps([one.as_json() for one in found], indent=2))
    else:
        print_out("\n\n".join(map(describe, found)))
    return 0 if all(one.right for one in found) else 1


def _found(config: InspectConfig, urls: Iterable[str]) -> list[InspectedBlock]:
    """The block, from every store that holds it."""
    found: list[InspectedBlock] = []
    absent: KvrelayError = NotFound(f"there is no block {config.name}")
    for url in urls:
        try:
            found.append(_inspected(url, config.name, config.timeout))
        except NotFound as error:
            absent = error
    if not found:
        raise absent
    return found


def _inspected(url: str, digits: str, timeout: float) -> InspectedBlock:
    with browsing(url) as browser, connected(url) as store:
        name = resolve_digits(browser, digits, timeout)
        listed, header = browser.inspect(name.name, timeout, name.tenant)
        there = store.survey(NameQuery([header.parent]), timeout).sizes[0] is not None
        (one,) = verify_blocks(store, [listed], timeout)
    return InspectedBlock(public_url(url), listed, header, there, state_of(one))


def state_of(one: VerifiedBlock) -> str:
    """``right``, or the error."""
    if one.error is not None:
        return str(one.error)
    if one.removed and one.listed.tenant:
        return f"not read: only tenant {one.listed.tenant} may"
    return "removed while it was looked at" if one.removed else "right"


def readers(listed: ListedBlock, header: Header) -> str:
    """The workers that may read it."""
    workers = f"workers of namespace {header.namespace.hex()[:16]}"
    return f"{workers} for tenant {listed.tenant}" if listed.tenant else workers


def describe(one: InspectedBlock) -> str:
    """The block as a table for people."""
    listed, header = one.listed, one.header
    kind = "partial" if listed.partial else "full"
    after = "in this store" if one.parent_there else "not in this store"
    first = header.parent == root_name(header.namespace)
    rows = [
        ("store", one.store),
        ("namespace", header.namespace.hex()),
        ("parent", f"{header.parent.hex()} ({'the beginning' if first else after})"),
        ("tokens", f"{header.count} ({kind})"),
        ("dtype", header.dtype),
        ("shape", " x ".join(map(str, header.shape))),
        ("header", f"{header.length:,} bytes"),
        ("payload", f"{header.payload_bytes:,} bytes ({show_bytes(header.payload_bytes)})"),
        ("checksums", " ".join(f"{one:016x}" for one in header.checksums)),
        ("state", paint(one.state, "green" if one.right else "red")),
        ("held by", f"{listed.leases} leases"),
        ("lies in", places(listed)),
        ("readers", readers(listed, header)),
    ]
    ids = textwrap.fill(
        " ".join(map(str, header.tokens)), LINE, initial_indent="  ", subsequent_indent="  "
    )
    lines = table(["block", listed.name.hex()], [list(row) for row in rows], frozenset())
    return f"{lines}\n  token ids\n{ids}"
