"""A service for the supervisor's tests: serves health, says its pid, misbehaves when asked to."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


def main(port: int, manner: str) -> int:
    if manner == "fails":
        print("cannot start: no such model", flush=True)
        return 3
    stop = threading.Event()
    if manner == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    if manner == "parent":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"grandchild {child.pid}", flush=True)
    if manner == "silent":
        stop.wait(600)
        return 0
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    print(f"ready on 127.0.0.1:{port}", flush=True)
    stop.wait(600)
    server.stop(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
