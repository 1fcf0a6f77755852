"""The settings in a Redis URL, checked; no text made of them shows a secret."""

from __future__ import annotations

import math
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from kvrelay.config.reader import option, options, read
from kvrelay.errors import Rejected
from kvrelay.rpc.address import Address
from kvstore.urls import query_parameters

PORT = 6379
SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
FILES = ("ca", "cert", "key", "password_file")
PARAMETERS = ("db", "prefix", "life", "partial_life", "username", *FILES)
DAY = 86_400.0
SHORTEST_LIFE = 1.0
LONGEST_LIFE = 365 * DAY
MAX_PREFIX = 64
MAX_SECRET = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSecrets:
    """Environment variables, so that no secret is on a command line."""

    redis_username: str | None = option(None, "user of a Redis store")
    redis_password: str | None = option(None, "password of a Redis store", secret=True)


@dataclass(frozen=True, slots=True)
class RedisTls:
    """Files: authorities to trust (``None``: the system's), and this client's certificate."""

    ca: str | None
    cert: str | None
    key: str | None


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """A block expires ``life`` seconds after its last use, a partial one after ``partial_life``."""

    url: str  # without user and password
    addresses: tuple[Address, ...]
    cluster: bool
    tls: RedisTls | None
    db: int
    prefix: str
    life: float
    partial_life: float
    username: str | None
    password: str | None = field(repr=False)

    def lives(self, partial: bool) -> bytes:
        """Milliseconds until an unused block expires, as the argument of a command."""
        return b"%d" % round(1000 * (self.partial_life if partial else self.life))


def settings_for(url: str) -> RedisSettings:
    """The settings of a whole URL."""
    parts = urlsplit(url)
    return settings_of(parts, query_parameters(parts.query))


def settings_of(
    parts: SplitResult, given: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> RedisSettings:
    """The settings of a URL with parameters ``given``; ``Rejected`` names what is wrong with it."""
    cluster = parts.scheme.endswith("+cluster")
    safe = parts.scheme.startswith("rediss")
    userinfo, _, hosts = parts.netloc.rpartition("@")
    path = unquote(parts.path)
    if parts.scheme == "unix":
        addresses: tuple[Address, ...] = (_socket(hosts + path),)
    else:
        addresses = tuple(_address(host, parts.scheme) for host in hosts.split(","))
    if len(addresses) > 1 and not cluster:
        raise Rejected("host", f"several are for redis+cluster://, not for {parts.scheme}://")
    if not safe and (wrong := [name for name in ("ca", "cert", "key") if name in given]):
        raise Rejected(wrong[0], "is for TLS: rediss:// or rediss+cluster://")
    secrets = _secrets(os.environ if environ is None else environ)
    username, _, password = userinfo.partition(":")
    return RedisSettings(
        url=f"{parts.scheme}://{hosts}{parts.path}" + _shown(parts.query),
        addresses=addresses,
        cluster=cluster,
        tls=_tls(given) if safe else None,
        db=_db("" if parts.scheme == "unix" else path, given, cluster),
        prefix=_prefix(given.get("prefix", "kvrelay"), cluster),
        life=_seconds("life", given, DAY),
        partial_life=_seconds("partial_life", given, 60.0),
        username=given.get("username") or unquote(username) or secrets.redis_username,
        password=_secret(given) or unquote(password) or secrets.redis_password,
    )


def _secrets(environ: Mapping[str, str]) -> RedisSecrets:
    """From the environment only: a file with options belongs to another configuration."""
    names = {item.variable for item in options(RedisSecrets)}
    own = {name: value for name, value in environ.items() if name in names}
    return read(RedisSecrets, (), "", "", own)


def _shown(query: str) -> str:
    return f"?{query}" if query else ""


def _socket(path: str) -> Address:
    if not path.startswith("/"):
        raise Rejected("path", f"{path!r} is not the whole path of a socket: unix:///PATH")
    return Address(path, None)


def _address(text: str, scheme: str) -> Address:
    """``HOST`` or ``HOST:PORT``."""
    try:
        named = text and not text.rpartition("]")[2].count(":")
        return Address.parse(f"{text}:{PORT}" if named else text)
    except Rejected:
        more = ",HOST:PORT" if "cluster" in scheme else ""
        # The text is not shown: it may be the beginning of a password.
        raise Rejected("host", f"is not HOST:PORT: {scheme}://HOST:PORT{more}") from None


def _tls(given: Mapping[str, str]) -> RedisTls:
    """The files are loaded here, so that a wrong one is found before the first connection."""
    for name in ("ca", "cert", "key"):
        if name in given and not Path(given[name]).is_file():
            raise Rejected(name, f"{given[name]!r} is no file")
    if "key" in given and "cert" not in given:
        raise Rejected("key", "needs a cert: give both or neither")
    try:
        context = ssl.create_default_context(cafile=given.get("ca"))
        if "cert" in given:
            context.load_cert_chain(given["cert"], given.get("key"))
    except (ssl.SSLError, OSError) as error:
        name = "ca" if "cert" not in given else "cert"
        raise Rejected(name, f"cannot be used: {error}") from None
    return RedisTls(given.get("ca"), given.get("cert"), given.get("key"))


def _db(path: str, given: Mapping[str, str], cluster: bool) -> int:
    first = path.strip("/")
    text = given.get("db", first or "0")
    if first and text != first:
        raise Rejected("db", f"{text!r} and, in the path, {first!r}: give one of them")
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        raise Rejected("db", f"{text!r} is not the number of a database")
    if cluster and int(text):
        raise Rejected("db", "a cluster has database 0 only")
    return int(text)


def _prefix(text: str, cluster: bool) -> str:
    """No braces, which would decide the slot, and no characters of a pattern."""
    if cluster and text[-2:-1] == ":" and text[-1].isdigit():  # see ``Topology``
        raise Rejected("prefix", f"{text!r} ends as the other places of {text[:-2]!r} do")
    if not 0 < len(text) <= MAX_PREFIX or not all(c.isalnum() or c in "._:-" for c in text):
        raise Rejected("prefix", f"{text!r} is not 1 to {MAX_PREFIX} of letters, digits and ._:-")
    return text


def _seconds(name: str, given: Mapping[str, str], default: float) -> float:
    try:
        value = float(given.get(name, default))
    except ValueError:
        value = math.nan
    if not SHORTEST_LIFE <= value <= LONGEST_LIFE:
        raise Rejected(
            name, f"{given[name]!r} is not between {SHORTEST_LIFE:g} and {LONGEST_LIFE:g} seconds"
        )
    return value


def _secret(given: Mapping[str, str]) -> str | None:
    """The first line of ``password_file``."""
    if "password_file" not in given:
        return None
    try:
        with Path(given["password_file"]).open(encoding="utf-8") as file:
            text = file.readline(MAX_SECRET).rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise Rejected("password_file", f"cannot be read: {error}") from None
    if not text:
        raise Rejected("password_file", f"{given['password_file']!r} begins with an empty line")
    return text
