"""``python -m decode_service``: one decode worker, which may be told to prefill."""

from __future__ import annotations

import sys

from common import ctrlc

if __name__ == "__main__":
    ctrlc.ends()
    from decode_service.service import register as decode  # much: not before the line above
    from prefill_service.service import register as prefill
    from protos import types_pb2
    from worker.main import main

    status = main(types_pb2.ROLE_DECODE, (decode, prefill), sys.argv[1:])
    ctrlc.ends()
    sys.exit(status)
