"""The secured cluster as its clients, its services and strangers see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvrelay import Client, Completion
from kvrelay.cli.authority import CertificateAuthority
from kvrelay.cluster.supervisor import Cluster
from kvrelay.rpc.channel import ChannelOptions
from kvrelay.rpc.security import policy
from tests.secured import Files, write_files

SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Secured:
    """A running cluster, the files it was given, and every line it wrote."""

    cluster: Cluster
    files: Files
    tokens: str
    authority: CertificateAuthority
    folder: Path
    lines: list[str]

    def options(self, token: str | None) -> ChannelOptions:
        """Options with a certificate and this token."""
        return ChannelOptions(security=policy.load(self.files.options(token=token)))

    def complete(self, token: str | None, prompt: list[int], max_tokens: int = 8) -> Completion:
        """Greedy, through the router, as a client that reads the certificates of now."""
        return self.complete_as(self.options(token), prompt, max_tokens)

    def complete_as(
        self, options: ChannelOptions, prompt: list[int], max_tokens: int = 8
    ) -> Completion:
        """Greedy, through the router, over a connection of its own."""
        with Client(self.cluster.router, options) as client:
            return client.complete(
                timeout=SECONDS,
                token_ids=prompt,
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
            )

    def party(self, name: str, authority: CertificateAuthority, days: float = 1) -> Files:
        """Files of a peer that trusts this cluster's authority."""
        made = write_files(self.folder, name, authority, days)
        return Files(made.cert, made.key, self.files.ca)
