"""Histograms of requests as their clients see them: times in seconds, lengths in tokens.

A request counts in a histogram of times once that time has passed, and in one of lengths when it
has finished; a resumed one has no time to its first token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import Histogram
from prometheus_client.core import Metric

from kvrelay.rpc.server.families import (
    FIRST_TOKEN_SECONDS,
    REQUEST_SECONDS,
    SAMPLES,
    TOKEN_SECONDS,
    TOKENS,
    histogram,
)
from kvrelay.v1 import router_pb2
from router.generate.request import AcceptedRequest


class RequestHistograms:
    """All histograms of a router."""

    def __init__(self) -> None:
        self.tokenize = histogram(
            "request_tokenize_time_seconds",
            "From the message to its token ids, the wait for a thread included.",
            FIRST_TOKEN_SECONDS,
        )
        self.queue = histogram(
            "request_queue_time_seconds", "In the router's queue, of each sample.", REQUEST_SECONDS
        )
        self.first_token = histogram(
            "time_to_first_token_seconds",
            "From the message to the first token of a request.",
            FIRST_TOKEN_SECONDS,
        )
        self.between_tokens = histogram(
            "inter_token_latency_seconds", "Between two tokens of a sample.", TOKEN_SECONDS
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time between two tokens, of each finished sample.",
            TOKEN_SECONDS,
        )
        self.end_to_end = histogram(
            "e2e_request_latency_seconds", "From the message to the last token.", REQUEST_SECONDS
        )
        self.prefill = histogram(
            "request_prefill_time_seconds", "To compute the prompt.", REQUEST_SECONDS
        )
        self.transfer = histogram(
            "request_transfer_time_seconds", "To load KV from the store.", FIRST_TOKEN_SECONDS
        )
        self.decode = histogram(
            "request_decode_time_seconds", "From the first token to the last.", REQUEST_SECONDS
        )
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt lengths.", TOKENS)
        self.generation_tokens = histogram("request_generation_tokens", "Output lengths.", TOKENS)
        self.max_tokens = histogram("request_params_max_tokens", "max_tokens of requests.", TOKENS)
        self.samples = histogram("request_params_n", "Samples that requests ask for.", SAMPLES)

    def collect(self) -> Iterator[Metric]:
        """Every histogram."""
        for value in vars(self).values():
            if isinstance(value, Histogram):
                yield from value.collect()


@dataclass(slots=True)
class _SampleTimes:
    first: float
    last: float
    tokens: int


class RequestTimes:
    """Observes one accepted request: every response, and its end if all of them were sent."""

    def __init__(
        self, histograms: RequestHistograms, request: AcceptedRequest, *, resumed: bool
    ) -> None:
        self._histograms = histograms
        self._request = request
        self._resumed = resumed
        self._samples: dict[int, _SampleTimes] = {}

    def take(self, response: router_pb2.GenerateResponse) -> float | None:
        """Observe a response; returns the seconds to the first token if it has that."""
        count, now = len(response.tokens), time.monotonic()
        times = self._samples.get(response.index)
        seconds = None
        if times is None and count:
            if not self._samples and not self._resumed:
                seconds = now - self._request.received_at
                self._histograms.first_token.observe(seconds)
            self._samples[response.index] = _SampleTimes(now, now, count)
        elif times is not None and count:
            gap = (now - times.last) / count
            for _ in range(count):
                self._histograms.between_tokens.observe(gap)
            times.last = now
            times.tokens += count
        if response.HasField("usage"):
            self._histograms.prefill.observe(response.usage.prefill_seconds)
            self._histograms.transfer.observe(response.usage.transfer_seconds)
        return seconds

    def finished(self) -> None:
        """Observe the end: every sample is whole."""
        histograms, request, now = self._histograms, self._request, time.monotonic()
        histograms.end_to_end.observe(now - request.received_at)
        histograms.prompt_tokens.observe(len(request.prompt))
        histograms.max_tokens.observe(request.max_tokens)
        histograms.samples.observe(max(len(request.samples), 1))
        for times in self._samples.values():
            histograms.generation_tokens.observe(times.tokens)
            histograms.decode.observe(times.last - times.first)
            if times.tokens > 1:
                per_token = (times.last - times.first) / (times.tokens - 1)
                histograms.per_token.observe(per_token)
