"""The processes that deployment files start, and what each reads from its command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrelay.cluster.layout import CONFIGS, MODULES
from kvrelay.config.reader import read
from kvrelay.worker.config import WorkerConfig
from kvstore.config import StoreConfig
from router.config import RouterConfig
from tests.deploy.rig import ROOT

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
Service = RouterConfig | WorkerConfig | StoreConfig


def role_of(module: str) -> str:
    """The role of the process that ``python -m module`` runs."""
    (role,) = (role for role, each in MODULES.items() if each == module)
    return role


def read_service(command: Sequence[str], environment: Mapping[str, str], name: str) -> Service:
    """The configuration of a process; ``command`` begins with its module."""
    module, *flags = command
    made = read(CONFIGS[role_of(module)], flags, name, "", environment)
    assert isinstance(made, Service)
    return made
