"""``kvrelay store verify``: every block read back; checksums, names, lengths and tags compared."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvrelay.block.mac import BlockKey
from kvrelay.cli.screen import paint, print_err, print_out
from kvrelay.cli.store.options import StoreSelection, browsing, connected
from kvrelay.config.reader import load, option
from kvrelay.config.values import show_bytes
from kvrelay.rpc.security.policy import installed
from kvstore.client.browse import SHOWN, blocks_by_digits
from kvstore.client.verify import VerifiedBlock, verify_blocks
from kvstore.urls import public_url

DESCRIPTION = """\
Reads every block of a store back and checks its header, its payload and its name, which must follow
from the header. With the fleet's key (of kvrelay up, --credentials or KVRELAY_FLEET_KEY) it also
checks the tag by which workers know their fleet's blocks: a block of another fleet, or an unsigned
one, is then wrong; --no-tags where several fleets share the store. Reading a block counts as a use
of it, also for eviction. With --repair, wrong blocks are removed, so that right ones can be put in
their place. Ends with status 1 if a block is wrong and was not removed."""
PROGRESS_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig(StoreSelection):
    """The blocks to verify."""

    prefix: str = option("", "first digits of the names", metavar="PREFIX", positional=True)
    repair: bool = option(False, "remove wrong blocks")
    tags: bool = option(True, "do not check which fleet wrote a block")


@dataclass(slots=True)
class VerifyProgress:
    """The result for one store so far."""

    store: str
    tags: bool  # whether they are checked
    began: float = field(default_factory=time.monotonic)
    blocks: int = 0
    bytes: int = 0
    evicted: int = 0
    foreign: int = 0
    wrong: list[VerifiedBlock] = field(default_factory=list)

    def add(self, one: VerifiedBlock) -> None:
        """Count one block."""
        self.blocks += 1
        if one.error is not None:
            self.wrong.append(one)
        elif one.removed and one.listed.tenant:
            self.foreign += 1
        elif one.removed:
            self.evicted += 1
        else:
            self.bytes += one.listed.size

    @property
    def left(self) -> int:
        """Wrong blocks that were not removed."""
        return sum(not one.removed for one in self.wrong)

    @property
    def wrong_tags(self) -> int:
        """Blocks that are whole, and that another fleet or a stranger wrote."""
        return sum(one.wrong_tag for one in self.wrong)

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self.began, 1e-9)
        more = [f"{self.evicted:,} evicted before they were read"] if self.evicted else []
        more += [f"{self.foreign:,} of tenants, not read"] if self.foreign else []
        rate = f"{show_bytes(self.bytes)} at {self.bytes / seconds / 1e9:.2f} GB/s"
        parts = [f"{self.blocks:,} blocks", rate, *more, f"{len(self.wrong):,} wrong"]
        if self.wrong_tags:
            parts.append(f"{self.wrong_tags:,} of them by their tag")
        if not self.tags:
            parts.append("tags not checked")
        if removed := len(self.wrong) - self.left:
            parts.append(f"{removed:,} of them removed")
        return f"{self.store}: {', '.join(parts)}"

    def as_json(self) -> dict[str, object]:
        """Every figure as JSON, and the wrong blocks."""
        return {
            "store": self.store,
            "blocks": self.blocks,
            "bytes": self.bytes,
            "evicted": self.evicted,
            "not_read": self.foreign,
            "tags_checked": self.tags,
            "wrong_tags": self.wrong_tags,
            "wrong": [
                {
                    "name": one.listed.name.hex(),
                    "error": str(one.error),
                    "removed": one.removed,
                }
                for one in self.wrong
            ],
        }


def main(argv: Sequence[str]) -> int:
    config = load(VerifyConfig, argv, "kvrelay store verify", DESCRIPTION)
    done = [_verified(url, config) for url in config.urls()]
    if config.json:
        print_out(json.dumps([progress.as_json() for progress in done], indent=2))
    else:
        for progress in done:
            for one in progress.wrong:
                name = one.listed.name.hex()[:SHOWN]
                end = "; removed" if one.removed else ""
                print_out(f"{paint('wrong', 'red')} {name} in {progress.store}: {one.error}{end}")
            print_out(str(progress))
    return 1 if any(progress.left for progress in done) else 0


def _verified(url: str, config: VerifyConfig) -> VerifyProgress:
    key = BlockKey.of(installed().credentials.fleet_key) if config.tags else None
    progress = VerifyProgress(public_url(url), key is not None)
    with browsing(url) as browser, connected(url) as store:
        # All names first: reading takes longer than a list may stay open.
        listed = list(blocks_by_digits(browser, config.prefix, config.timeout))
        found = verify_blocks(store, listed, config.timeout, config.repair, key)
        for one in _watched(found, progress, len(listed)):
            progress.add(one)
    return progress


def _watched(
    found: Iterator[VerifiedBlock], progress: VerifyProgress, total: int
) -> Iterator[VerifiedBlock]:
    """The same blocks; on a terminal, shows a line of progress twice a second."""
    shown = time.monotonic()
    watching = sys.stderr.isatty()
    for one in found:
        yield one
        if watching and time.monotonic() - shown > PROGRESS_SECONDS:
            shown = time.monotonic()
            sys.stderr.write(f"\r  {progress.blocks:,} of {total:,} blocks\x1b[K")
            sys.stderr.flush()
    if watching:
        print_err("\r\x1b[K")
