"""Certificates of a process: read once, checked at start, then given to servers and channels."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvrelay.errors import Rejected
from kvrelay.rpc.security.options import SecurityOptions

MAX_PEM_BYTES = 1 << 20
OUTSIDE_VALIDITY = (9, 10)  # OpenSSL's codes: not valid yet, expired


@dataclass(frozen=True, slots=True)
class TlsCredentials:
    """PEM contents. Without ``ca`` the system's authorities are trusted.

    ``mutual``: a server accepts only clients with a certificate of ``ca``.
    """

    ca: bytes | None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    mutual: bool = True
    name: str | None = None

    def server(self) -> grpc.ServerCredentials:
        """Credentials for a port; ``Rejected`` without a certificate of its own."""
        if self.cert is None or self.key is None:
            raise Rejected("tls_cert", "a server with --tls-ca needs a --tls-cert and --tls-key")
        return grpc.ssl_server_credentials(
            [(self.key, self.cert)], self.ca, require_client_auth=self.asks_clients
        )

    def channel(self) -> grpc.ChannelCredentials:
        """Credentials for a connection to a server."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    @property
    def asks_clients(self) -> bool:
        """Whether a server accepts only clients with a certificate."""
        return self.ca is not None and self.mutual


def load(options: SecurityOptions) -> TlsCredentials | None:
    """``None`` when no file is named; ``Rejected`` for one that cannot be used."""
    cert, key, ca = options.tls_cert, options.tls_key, options.tls_ca
    if (cert is None) != (key is None):
        field = "tls_key" if key is None else "tls_cert"
        raise Rejected(field, "missing: --tls-cert and --tls-key go together")
    if cert is None and ca is None:
        return None
    if cert is not None and key is not None:
        _check_pair(cert, key)
    if ca is not None:
        _check_authority(ca)
    return TlsCredentials(
        ca=_read("tls_ca", ca),
        cert=_read("tls_cert", cert),
        key=_read("tls_key", key),
        mutual=options.tls_mutual,
        name=options.tls_name,
    )


def server_context(options: SecurityOptions, loaded: TlsCredentials) -> ssl.SSLContext:
    """What ``loaded.server()`` is for gRPC, for a server of the standard library."""
    if options.tls_cert is None or options.tls_key is None:
        raise Rejected("tls_cert", "a server with --tls-ca needs a --tls-cert and --tls-key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options.tls_cert, options.tls_key, password=_no_password)
    context.set_alpn_protocols(["http/1.1"])
    if loaded.ca is not None and loaded.asks_clients:
        context.load_verify_locations(cadata=loaded.ca.decode("ascii", "replace"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _read(field: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise Rejected(field, f"cannot read {path}: {error.strerror or error}") from None
    if len(content) > MAX_PEM_BYTES:
        raise Rejected(field, f"{path} is larger than {MAX_PEM_BYTES} bytes")
    return content


def _check_pair(cert: str, key: str) -> None:
    """Check at start; gRPC would only let handshakes fail later."""
    _read("tls_cert", cert)
    _read("tls_key", key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise Rejected(
            "tls_cert", f"{cert} and {key} are not a certificate and its key: {error}"
        ) from None
    if (why := _outside_validity(context, cert)) is not None:
        raise Rejected("tls_cert", f"{cert}: {why}, so every peer will refuse it: renew it")


def _outside_validity(server: ssl.SSLContext, cert: str) -> str | None:
    """Why a certificate is not valid today: the result of an in-memory handshake with itself."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust it without its authority
    client.load_verify_locations(cert)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
    for end in ends * 2:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLCertVerificationError as error:
            return error.verify_message if error.verify_code in OUTSIDE_VALIDITY else None
        except ssl.SSLError:
            return None  # another defect, which the peers report
    return None


def _check_authority(ca: str) -> None:
    _read("tls_ca", ca)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca)
    except (ssl.SSLError, OSError) as error:
        raise Rejected("tls_ca", f"{ca} holds no certificate of an authority: {error}") from None


def _no_password() -> str:
    raise ValueError("a key with a password cannot be used")
