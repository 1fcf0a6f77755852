"""A service for the supervisor's tests: serves health, misbehaves on request."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


def main(port: int, manner: str) -> int:
    if manner == "fails":
        print("cannot start: no such model", flush=True)
        return 3
    told, tells = socket.socketpair()
    tells.setblocking(False)
    if manner == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        # As asyncio does it: a process that was stopped may get the signal in any of its threads.
        signal.set_wakeup_fd(tells.fileno())
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    if manner == "parent":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"grandchild {child.pid}", flush=True)
    if manner == "silent":
        told.recv(1)
        return 0
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    print(f"ready on 127.0.0.1:{port}", flush=True)
    told.recv(1)
    server.stop(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
