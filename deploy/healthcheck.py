"""``python deploy/healthcheck.py HOST:PORT``: status 0 if the server there says SERVING."""

from __future__ import annotations

import asyncio
import sys

from kvrelay.config.reader import read
from kvrelay.errors import KvrelayError
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.health import is_serving
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.options import SecurityOptions

SECONDS = 3.0


async def serving(address: str) -> bool:
    """Whether it serves, asked once."""
    async with open_channel(address) as channel:
        try:
            return await is_serving(channel, Deadline.after(SECONDS), wait=True)
        except KvrelayError as error:
            print(f"{address}: {error}", file=sys.stderr)
            return False


if __name__ == "__main__":
    # With TLS this reads the same KVRELAY_TLS_... as the service that it asks.
    policy.install(read(SecurityOptions, [], "healthcheck", ""))
    sys.exit(0 if asyncio.run(serving(sys.argv[1])) else 1)
