"""Install the foreign clients that the tests run: ``python -m tests.peers.install [NAME ...]``.

What cannot be installed is named with the reason; its tests are skipped and say the same.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from tests.peers.environment import Environment, NotInstalled
from tests.peers.pins import PEERS


def main(names: Sequence[str]) -> int:
    """Install those named, all by default."""
    for peer in PEERS:
        if names and peer.name not in names:
            continue
        environment, begun = Environment(peer), time.monotonic()
        if environment.installed:
            print(f"{peer.name}: in {environment.folder}", flush=True)
            continue
        print(f"{peer.name}: installing into {environment.folder}", flush=True)
        try:
            environment.install()
        except NotInstalled:
            print(f"{environment.reason}; its tests are skipped", flush=True)
        else:
            print(f"{peer.name}: installed in {time.monotonic() - begun:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
