"""``python -m prefill_service``: one prefill worker."""

from __future__ import annotations

import sys

from prefill_service.service import register
from protos import types_pb2
from worker.main import main

if __name__ == "__main__":
    sys.exit(main(types_pb2.ROLE_PREFILL, "prefill", register, sys.argv[1:]))
