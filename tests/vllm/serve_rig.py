"""``vllm serve`` as a user starts it, asked over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.door.vllm import COMMAND
from kvrelay.cluster.ports import free_ports
from tests.cluster.processes import until
from tests.vllm.environment import ROOT, WorkerEnvironment
from tests.vllm.rig import BLOCK, CALL_SECONDS, ENVIRON

MODEL = "tiny"
START_SECONDS = 600.0  # three processes import vLLM, one after the other
FLAGS = (
    *("--host", "127.0.0.1", "--served-model-name", MODEL, "--dtype", "float32"),
    *("--block-size", str(BLOCK), "--num-gpu-blocks-override", "256"),
    *("--max-model-len", "1024", "--max-num-seqs", "8", "--max-num-batched-tokens", "256"),
    *("--enforce-eager", "--uvicorn-log-level", "warning"),
)
OURS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
}


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A completion: its tokens, kvrelay's account of it, and the candidates of each token."""

    tokens: list[int]
    account: Mapping[str, int | str]
    candidates: Sequence[Mapping[str, float]]


class VllmServer:
    """The processes of one ``vllm serve``; with a ``transfer`` configuration, our connector.

    They import from the folders in ``path`` first.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        transfer: Mapping[str, object] | None = None,
        *flags: str,
        path: Sequence[Path] = (ROOT,),
    ) -> None:
        self._port = free_ports(1)[0]
        self._log = log
        words = ["serve", str(model), "--port", str(self._port), *FLAGS, *flags]
        if transfer is not None:
            words += ["--kv-transfer-config", json.dumps(transfer)]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [WorkerEnvironment().python, "-c", COMMAND, *words],
                cwd=ROOT,
                env={**os.environ, **ENVIRON, **OURS, "PYTHONPATH": ":".join(map(str, path))},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Where it serves HTTP."""
        return f"127.0.0.1:{self._port}"

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._healthy():
            said = self._log.read_text()[-3000:]
            assert self.process.poll() is None, f"vllm serve ended: {said}"
            assert time.monotonic() < deadline, f"vllm serve does not answer: {said}"
            time.sleep(0.2)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=5) as page:
                return bool(page.status == 200)
        except OSError:
            return False

    def complete(
        self, prompt: Sequence[int] | str, count: int = 16, **fields: object
    ) -> HttpAnswer:
        """A greedy completion of ``count`` tokens, unless ``fields`` say otherwise."""
        with closing(self._post("/v1/completions", _body(prompt, count, fields))) as answer:
            found = json.loads(answer.read())
        (choice,) = found["choices"]
        account = (found.get("kv_transfer_params") or {}).get("kvrelay") or {}
        candidates = (choice["logprobs"] or {}).get("top_logprobs") or ()
        return HttpAnswer(choice["token_ids"], account, candidates)

    def stream(self, prompt: Sequence[int], count: int, **fields: object) -> Iterator[list[int]]:
        """The same, event by event."""
        body = {**_body(prompt, count, fields), "stream": True}
        with closing(self._post("/v1/completions", body)) as answer:
            line = b""
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    yield [token for choice in event["choices"] for token in choice["token_ids"]]
            assert line.strip() in (b"", b"data: [DONE]")

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, so that only the store has what was computed.

        vLLM refuses while a save holds a reference.
        """
        until(self._reset, "every save has ended", CALL_SECONDS)

    def _reset(self) -> bool:
        with closing(self._post("/reset_prefix_cache", {})) as answer:
            return bool(json.loads(answer.read())["success"])

    def counter(self, name: str) -> int:
        """A counter of ours on vLLM's metrics page."""
        with urllib.request.urlopen(f"http://{self.address}/metrics", timeout=20) as page:
            lines = page.read().decode().splitlines()
        (line,) = [one for one in lines if one.startswith(f"kvrelay:{name}_total{{")]
        return int(float(line.rpartition(" ")[2]))

    def _post(self, path: str, body: Mapping[str, object]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.address, timeout=CALL_SECONDS)
        headers = {"content-type": "application/json", "connection": "close"}
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        return answer

    def close(self) -> None:
        """End every process of it."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Those that run: API server, engine and rank, which share a session."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            except (OSError, ValueError):
                continue
            if int(session) == self.process.pid and state != "Z":
                found.append(int(path.parent.name))
        return found


def _body(
    prompt: Sequence[int] | str, count: int, fields: Mapping[str, object]
) -> dict[str, object]:
    return {
        "model": MODEL,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
