"""What of kvrelay is installed here: which extras are complete, and how its commands are typed.

The base install is the client. Every command and service calls ``require`` with its extras before
it imports their packages, so that a missing one is a line with its name and how to install it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from kvrelay.errors import NotInstalled

_SERVER: Mapping[str, str] = {
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
}
# Of each extra: modules and the distributions they come in, as pyproject.toml declares them.
EXTRAS: Mapping[str, Mapping[str, str]] = {
    "base": {
        "grpc": "grpcio",
        "google.protobuf": "protobuf",
        "google.rpc": "googleapis-common-protos",
    },
    "router": {
        **_SERVER,
        "httptools": "httptools",
        "jinja2": "jinja2",
        "llguidance": "llguidance",
        "prometheus_client": "prometheus-client",
        "starlette": "starlette",
        "tokenizers": "tokenizers",
        "transformers": "transformers",
        "uvicorn": "uvicorn",
        "xxhash": "xxhash",
    },
    "store": {
        **_SERVER,
        "cryptography": "cryptography",
        "numpy": "numpy",
        "prometheus_client": "prometheus-client",
        "redis": "redis",
        "xxhash": "xxhash",
    },
    "worker": {
        **_SERVER,
        "cryptography": "cryptography",
        "huggingface_hub": "huggingface-hub",
        "jinja2": "jinja2",
        "llguidance": "llguidance",
        "numpy": "numpy",
        "prometheus_client": "prometheus-client",
        "redis": "redis",
        "safetensors": "safetensors",
        "tokenizers": "tokenizers",
        "torch": "torch",
        "transformers": "transformers",
        "xxhash": "xxhash",
    },
    "worker-vllm": {
        **_SERVER,
        "cryptography": "cryptography",
        "huggingface_hub": "huggingface-hub",
        "jinja2": "jinja2",
        "llguidance": "llguidance",
        "numpy": "numpy",
        "prometheus_client": "prometheus-client",
        "redis": "redis",
        "safetensors": "safetensors",
        "tokenizers": "tokenizers",
        "torch": "torch",
        "transformers": "transformers",
        "xxhash": "xxhash",
    },
    "certs": {"cryptography": "cryptography"},
    "load": {"aiohttp": "aiohttp", "yarl": "yarl"},
    "otel": {
        "opentelemetry.exporter.otlp.proto.grpc": "opentelemetry-exporter-otlp-proto-grpc",
        "opentelemetry.sdk": "opentelemetry-sdk",
    },
}
PURPOSES: Mapping[str, str] = {
    "router": "for a router",
    "store": "for a store",
    "worker": "for prefill and decode workers",
    "worker-vllm": "next to vLLM, in its environment",
    "certs": "for `kvrelay make-certs`",
    "load": "for `kvrelay load` and `kvrelay conform`",
    "otel": "for OpenTelemetry spans, --otlp-endpoint",
}
CLUSTER = ("router", "store", "worker")
OWN_PACKAGES = ("kvstore", "router", "prefill_service", "decode_service")  # besides kvrelay
HOME = Path(__file__).parents[1]
"""The folder that kvrelay was imported from."""


def missing(*extras: str) -> tuple[str, ...]:
    """The distributions of these extras that cannot be imported here, each once."""
    wanted = {module: name for extra in extras for module, name in EXTRAS[extra].items()}
    return tuple(sorted(name for module, name in wanted.items() if not _found(module)))


def lacking(*extras: str) -> tuple[str, ...]:
    """Those of these extras of which a package is missing."""
    return tuple(extra for extra in extras if missing(extra))


def services_installed() -> bool:
    """Whether packages are here that come with every service and seldom with anything else."""
    return any(map(_found, _SERVER))


def require(*extras: str) -> None:
    """Raises ``NotInstalled`` with the names of the packages that are missing from these extras.

    For the extras of a cluster it also does so if a package of the user hides one of ours.
    """
    absent = missing(*extras)
    if absent:
        verb = "is" if len(absent) == 1 else "are"
        line = install_line(*lacking(*extras))
        raise NotInstalled(f"{', '.join(absent)} {verb} not installed: {line}")
    if set(extras) & set(CLUSTER) and (why := hidden()) is not None:
        raise NotInstalled(why)


def hidden() -> str | None:
    """Why one of our packages cannot be imported, ``None`` if all can. Imports none of them."""
    for name in OWN_PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            return f"the package {name!r} is not in {HOME}, where kvrelay is: install kvrelay again"
        found = _places(spec)
        if not any(place.parent in (HOME, HOME.resolve()) for place in found):
            return (
                f"{found[0].parent} has a {name!r} that hides kvrelay's own: take that folder out"
                " of PYTHONPATH, or rename what it has there"
            )
    return None


def require_service(module: str, extra: str, summary: str) -> None:
    """``require`` for ``python -m MODULE``: ends the process with one line and status 1.

    If help is asked for it prints a short page and ends with status 0.
    """
    try:
        require(extra)
    except NotInstalled as error:
        if not asks_help(sys.argv[1:]):
            sys.exit(f"{module}: {error}")
        sys.stdout.write(short_page(f"python -m {module}", summary, error) + "\n")
        sys.exit(0)


def asks_help(argv: Sequence[str]) -> bool:
    """Whether a command line asks for the page of options."""
    return "--help" in argv or "-h" in argv


def short_page(prog: str, summary: str, error: NotInstalled) -> str:
    """The page of a command whose options cannot be read, because of ``error``."""
    return f"usage: {prog} [options]\n\n{summary}\n\nThe options are not shown here: {error}"


def install_line(*extras: str) -> str:
    """The command that installs these extras into this environment."""
    wanted = "all" if len(extras) > 1 else extras[0]
    root = clone_root()
    if root is None:
        what, edit = f"{_origin()}[{wanted}]", ""
    else:
        where = "." if root == Path.cwd() else str(root)
        what, edit = f"{where}[{wanted}]", "-e "
    return f"{_pip_install()} {edit}{shlex.quote(what)}"


def _origin() -> str:
    """The folder that pip installed kvrelay from; its name if it was another place."""
    with suppress(PackageNotFoundError, LookupError, ValueError, TypeError, OSError):
        found = json.loads(distribution("kvrelay").read_text("direct_url.json") or "{}")
        url = urlsplit(found["url"])
        if url.scheme == "file" and (folder := Path(url2pathname(url.path))).is_dir():
            return str(folder)
    return "kvrelay"


def command(words: str = "") -> str:
    """``kvrelay`` and ``words`` as typed in this folder and shell."""
    script = Path(sysconfig.get_path("scripts"), "kvrelay")
    found = shutil.which("kvrelay")
    if found is not None and Path(found).resolve() == script.resolve():
        typed = "kvrelay"
    elif script.is_file():
        typed = _shown(script)
    else:
        typed = f"{_shown(Path(sys.executable))} -m kvrelay"
    return f"{typed} {words}".rstrip()


def make(target: str) -> str | None:
    """``make TARGET`` as typed in this folder, ``None`` if kvrelay does not run from a clone."""
    root = clone_root()
    if root is None:
        return None
    return f"make {target}" if root == Path.cwd() else f"make -C {shlex.quote(str(root))} {target}"


def clone_root() -> Path | None:
    """The root of the clone that this package is imported from, ``None`` for an installed wheel."""
    root = Path(__file__).resolve().parents[1]
    marks = (root / "pyproject.toml", root / "Makefile", root / "protos" / "kvrelay" / "v1")
    return root if all(mark.exists() for mark in marks) else None


def _places(spec: ModuleSpec) -> list[Path]:
    """The folders of a package, or the file of a module, each also without symbolic links."""
    places = [Path(place) for place in spec.submodule_search_locations or (spec.origin or "",)]
    return [*places, *(place.resolve() for place in places)]


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def _pip_install() -> str:
    """``pip install`` into this environment; ``uv pip`` if it has no pip, as those of uv."""
    found, own = shutil.which("pip"), Path(sysconfig.get_path("scripts"), "pip")
    if found is not None and Path(found).resolve() == own.resolve():
        return "pip install"
    if own.is_file():
        return f"{_shown(own)} install"
    python = _shown(Path(sys.executable))
    if not _found("pip") and shutil.which("uv") is not None:
        return f"uv pip install --python {python}"
    return f"{python} -m pip install"


def _shown(path: Path) -> str:
    """A path from this folder if it lies below it; one in it has a slash, or PATH is searched."""
    here = Path.cwd()
    if not path.is_relative_to(here):
        return shlex.quote(str(path))
    below = path.relative_to(here)
    return shlex.quote(f"./{below}" if len(below.parts) == 1 else str(below))


def import_path(outer: Mapping[str, str]) -> dict[str, str]:
    """``PYTHONPATH`` for a child started with ``python -P``, so that it finds this kvrelay.

    An installed kvrelay needs none: site-packages ahead of the standard library shadows modules.
    """
    root = Path(__file__).resolve().parents[1]
    if root.name in ("site-packages", "dist-packages"):
        return {}
    path = os.pathsep.join(filter(None, (str(root), outer.get("PYTHONPATH"))))
    return {"PYTHONPATH": path}
