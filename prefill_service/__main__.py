"""``python -m prefill_service``: one prefill worker, whose role may change to decode."""

from __future__ import annotations

import sys

from kvrelay.process import sigint

if __name__ == "__main__":
    sigint.exit_on_sigint()
    from kvrelay import installation  # no import before the line above

    installation.require_service(
        "prefill_service", "worker", "One prefill worker, whose role may change to decode."
    )
    from kvrelay.process import cores, tempdir

    tempdir.require("prefill_service")  # before the import of torch
    cores.set_torch_variables()
    from decode_service.service import register as decode
    from kvrelay.v1 import types_pb2
    from kvrelay.worker.main import main
    from prefill_service.service import register as prefill

    status = main(types_pb2.ROLE_PREFILL, (prefill, decode), sys.argv[1:])
    sigint.exit_on_sigint()
    sys.exit(status)
