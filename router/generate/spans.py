"""Attributes of a request's spans, named by OpenTelemetry's GenAI conventions where they exist.

The others begin with ``kvrelay.`` and have the words of docs/accounting.md. No attribute has text
of a prompt or answer.
"""

from __future__ import annotations

from kvrelay.rpc.address import Address
from kvrelay.rpc.protocol import Role, role_name
from kvrelay.rpc.tracing import Attributes, Span
from kvrelay.v1 import router_pb2, types_pb2
from router.generate.request import AcceptedRequest, samples_of

COUNTS = (
    *("length", "local", "external", "computed", "recomputed", "failed", "saved", "executed"),
)
SAMPLING = {"temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty"}


def note_request(
    span: Span, message: router_pb2.GenerateRequest, request: AcceptedRequest, model: str
) -> None:
    """Name the span of an accepted request, and set its attributes."""
    operation = "chat" if message.WhichOneof("input") == "chat" else "text_completion"
    about: dict[str, str | float] = {
        f"gen_ai.request.{field.name}": value
        for field, value in message.sampling.ListFields()
        if field.name in SAMPLING
    }
    if (count := samples_of(message)) > 1:
        about["gen_ai.request.choice.count"] = count
    if request.tenant.name:
        about["kvrelay.tenant"] = request.tenant.name
    about |= {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "kvrelay",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.response.id": request.id,
    }
    span.set(about, f"{operation} {model}")


class AnswerSpan:
    """Records the finish reasons and the usage of a request on its span."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._reasons: list[str] = []  # why the samples have ended

    def take(self, response: router_pb2.GenerateResponse) -> None:
        """Record a response that goes to the client."""
        if response.finish_reason:
            name = types_pb2.FinishReason.Name(response.finish_reason)
            self._reasons.append(name.removeprefix("FINISH_REASON_").lower())
        if not response.HasField("usage"):
            return
        usage = response.usage
        if usage.HasField("cached_prompt_tokens"):
            self._span.set({"gen_ai.usage.cache_read.input_tokens": usage.cached_prompt_tokens})
        self._span.set(
            {
                "gen_ai.response.finish_reasons": self._reasons,
                "gen_ai.response.time_to_first_chunk": usage.first_token_seconds,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "kvrelay.tokens.recomputed": usage.recomputed,
            }
        )


def leg_span(leg: types_pb2.Leg, role: Role, address: str) -> tuple[str, Attributes]:
    """The name and the first attributes of a leg's span."""
    about: dict[str, str | int] = {"kvrelay.leg.index": leg.leg_index}
    place = Address.parse(address)
    about["server.address"] = place.host
    if place.port is not None:
        about["server.port"] = place.port
    return f"{role_name(role)} leg", about


def account_attributes(account: types_pb2.LegUsage, generated: int, lost: bool) -> Attributes:
    """The attributes of a leg's account; a ``lost`` leg has the figures of its admission."""
    about: dict[str, str | int] = {"kvrelay.leg.lost": lost, "kvrelay.tokens.generated": generated}
    if account.worker_id:
        about["kvrelay.worker.id"] = account.worker_id
        about |= {f"kvrelay.tokens.{name}": getattr(account, name) for name in COUNTS}
        about["kvrelay.preemptions"] = account.preemptions
    return about
