"""The parameters that say what the text of an answer must be."""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.errors import Rejected
from kvrelay.rpc.protocol import structured_message
from kvrelay.structured import StructuredOutput, of_mapping, of_response_format
from kvrelay.v1 import types_pb2


def set_structured(message: types_pb2.Sampling, wanted: object, response_format: object) -> None:
    """Set ``structured_output`` from the parameter of this name, or from ``response_format``."""
    if wanted is not None and response_format is not None:
        raise Rejected("response_format", "structured_output is given too: leave one out")
    if response_format is not None:
        wanted = of_response_format(response_format)
    elif isinstance(wanted, Mapping):
        wanted = of_mapping(wanted)
    if wanted is None:
        return
    if not isinstance(wanted, StructuredOutput):
        raise Rejected("structured_output", f"must be a StructuredOutput, got {wanted!r:.80}")
    try:
        message.structured_output.CopyFrom(structured_message(wanted))
    except Rejected as error:
        raise Rejected(error.field.removeprefix("sampling."), error.message) from None
