"""``python -m decode_service``: one decode worker, whose role may change to prefill."""

from __future__ import annotations

import sys

from kvrelay.process import sigint

if __name__ == "__main__":
    sigint.exit_on_sigint()
    from kvrelay import installation  # no import before the line above

    installation.require_service(
        "decode_service", "worker", "One decode worker, whose role may change to prefill."
    )
    from kvrelay.process import cores, tempdir

    tempdir.require("decode_service")  # before the import of torch
    cores.set_torch_variables()
    from decode_service.service import register as decode
    from kvrelay.v1 import types_pb2
    from kvrelay.worker.main import main
    from prefill_service.service import register as prefill

    status = main(types_pb2.ROLE_DECODE, (decode, prefill), sys.argv[1:])
    sigint.exit_on_sigint()
    sys.exit(status)
