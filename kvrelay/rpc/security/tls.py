"""Certificates of a process: read and checked whole, then given to servers and channels.

Servers ask for them at every handshake, so a process can replace them while it serves.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvrelay.errors import Rejected
from kvrelay.rpc.security.options import SecurityOptions, TlsFiles

MAX_PEM_BYTES = 1 << 20
OUTSIDE_VALIDITY = (9, 10)  # OpenSSL's codes: not valid yet, expired


@dataclass(frozen=True, slots=True)
class TlsCredentials:
    """PEM contents. Without ``ca`` the system's authorities are trusted.

    ``mutual``: a server accepts only clients with a certificate of ``ca``. ``expires`` is the
    certificate's end in seconds since the epoch; ``context`` is the same certificate and rules for
    a server of the standard library.
    """

    ca: bytes | None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    mutual: bool = True
    name: str | None = None
    expires: float | None = field(default=None, compare=False)
    context: ssl.SSLContext | None = field(default=None, repr=False, compare=False)

    def certificates(self) -> grpc.ServerCertificateConfiguration:
        """For a port; ``Rejected`` without a certificate of its own."""
        if self.cert is None or self.key is None:
            raise _without_certificate()
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.ca)

    def channel(self) -> grpc.ChannelCredentials:
        """Credentials for a connection to a server."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    @property
    def asks_clients(self) -> bool:
        """Whether a server accepts only clients with a certificate."""
        return self.ca is not None and self.mutual


def server_credentials(current: Callable[[], TlsCredentials]) -> grpc.ServerCredentials:
    """Credentials for a port; each handshake uses what ``current`` returns then."""
    given = first = current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        now = current()
        if now is given:
            return None
        given = now
        return now.certificates()

    return grpc.dynamic_ssl_server_credentials(
        first.certificates(),
        changed,  # type: ignore[arg-type]  # gRPC documents None: those of before
        first.asks_clients,
    )


def server_context(current: Callable[[], TlsCredentials]) -> ssl.SSLContext:
    """The same for a server of the standard library. Sessions are not resumed."""
    made = _context_of(current())

    def renew(end: ssl.SSLObject | ssl.SSLSocket, name: str | None, of: ssl.SSLContext) -> None:
        end.context = _context_of(current())

    made.sni_callback = renew
    return made


def _context_of(tls: TlsCredentials) -> ssl.SSLContext:
    if tls.context is None:
        raise _without_certificate()
    return tls.context


def _without_certificate() -> Rejected:
    return Rejected("tls_cert", "a server with --tls-ca needs a --tls-cert and --tls-key")


def load(options: SecurityOptions) -> TlsCredentials | None:
    """``None`` when no file is named; ``Rejected`` for one that cannot be used."""
    cert, key, ca = options.tls_cert, options.tls_key, options.tls_ca
    if (cert is None) != (key is None):
        field = "tls_key" if key is None else "tls_cert"
        raise Rejected(field, "missing: --tls-cert and --tls-key go together")
    if cert is None and ca is None:
        if options.tls_name is not None:
            raise Rejected("tls_name", f"{options.tls_name}: needs TLS: give --tls-ca")
        return None
    contents = _contents(options)
    context, expires = None, None
    if ca is not None:
        _check_authority(ca)
    if cert is not None and key is not None:
        context = _checked_pair(cert, key)
        expires = _expiry(context, cert)
    found = TlsCredentials(*contents, options.tls_mutual, options.tls_name, expires, context)
    if context is not None and ca is not None and found.asks_clients:
        context.load_verify_locations(ca)
        context.verify_mode = ssl.CERT_REQUIRED
    if _contents(options) != contents:
        raise Rejected("tls_cert", "the files changed while they were read")
    return found


@dataclass(frozen=True, slots=True)
class HttpsClient:
    """What an HTTPS client trusts and shows; ``name`` as in ``TlsCredentials``."""

    context: ssl.SSLContext
    name: str | None


def https_client(files: TlsFiles) -> HttpsClient | None:
    """``None`` if no file is named; ``Rejected`` for one that cannot be used.

    Without an authority the system's are trusted.
    """
    options = SecurityOptions(
        tls_cert=files.tls_cert, tls_key=files.tls_key, tls_ca=files.tls_ca, tls_name=files.tls_name
    )
    if load(options) is None:
        return None
    context = ssl.create_default_context(cafile=files.tls_ca)
    if files.tls_cert is not None:
        context.load_cert_chain(files.tls_cert, files.tls_key, password=_no_password)
    return HttpsClient(context, files.tls_name)


def _contents(options: TlsFiles) -> tuple[bytes | None, bytes | None, bytes | None]:
    return (
        _read("tls_ca", options.tls_ca),
        _read("tls_cert", options.tls_cert),
        _read("tls_key", options.tls_key),
    )


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


def _checked_pair(cert: str, key: str) -> ssl.SSLContext:
    """A context with the pair; gRPC would only let handshakes fail later."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_TICKET  # a resumed session would outlive the certificates
    context.num_tickets = 0
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise Rejected(
            "tls_cert", f"{cert} and {key} are not a certificate and its key: {error}"
        ) from None
    return context


def _expiry(server: ssl.SSLContext, cert: str) -> float | None:
    """The end of a certificate, from an in-memory handshake with itself.

    ``Rejected`` if it is not valid today; ``None`` if its end is not known, because it has another
    defect, which the peers report.
    """
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
            if error.verify_code in OUTSIDE_VALIDITY:
                why = f"{error.verify_message}, so every peer will refuse it: renew it"
                raise Rejected("tls_cert", f"{cert}: {why}") from None
            return None
        except ssl.SSLError:
            return None
    shown = ends[0].getpeercert()
    return ssl.cert_time_to_seconds(str(shown["notAfter"])) if shown else None


def _check_authority(ca: str) -> None:
    _read("tls_ca", ca)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca)
    except (ssl.SSLError, OSError) as error:
        raise Rejected("tls_ca", f"{ca} holds no certificate of an authority: {error}") from None


def _no_password() -> str:
    raise ValueError("a key with a password cannot be used")
