#!/usr/bin/env python3
"""Ask real SGLang and vLLM servers what they support, and write docs/reference/servers.md.

    scripts/probe_servers.py            print the table
    scripts/probe_servers.py --write    also write the page

`make test-sglang` and `make test-vllm` create the environments of the servers. Each server is
started on this machine's CPU with a small model, and each cell is the result of a request to it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

PAGE = ROOT / "docs/reference/servers.md"
SGLANG = [str(ROOT / ".venv-sglang/bin/python"), str(ROOT / "tests/sglang_cpu/serve_cpu.py")]
VLLM = [str(ROOT / ".venv-vllm/bin/python"), str(ROOT / "tests/vllm_cpu/serve_vllm.py")]
START_S, ANSWER_S = 600.0, 120.0
PROMPT = [5, 6, 7, 8]
Answer = tuple[int, Any]


class Server:
    """One running server.

    Args:
        name: ``SGLang`` or ``vLLM``.
        model: The folder of its model.
    """

    def __init__(self, name: str, model: str) -> None:
        self.name, self.model = name, model
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
        common = ["--port", str(self.port), "--host", "127.0.0.1", "--dtype", "float32"]
        if name == "SGLang":
            more = ["--model-path", model, "--device", "cpu", "--disable-overlap-schedule"]
            argv = [*SGLANG, *more, "--max-total-tokens", "16384", *common]
        else:
            more = ["--enable-scale-out", "--enforce-eager", "--max-model-len", "512"]
            more += ["--logprobs-mode", "processed_logprobs", "--num-gpu-blocks-override", "256"]
            argv = [*VLLM, model, *more, *common]
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1"}
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server
        self.process = subprocess.Popen(
            argv, env=environment, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def wait(self) -> str:
        """Wait until it answers, and return its error if it ends first."""
        until = time.monotonic() + START_S
        while self.ask("GET", "/health")[0] != 200:
            if self.process.poll() is not None or time.monotonic() > until:
                self.log.seek(0)
                lines = self.log.read().decode(errors="replace").splitlines()
                errors = [line for line in lines if "Error: " in line]
                return (errors or lines or ["no output"])[-1][-160:]
            time.sleep(0.5)
        return ""

    def ask(self, method: str, path: str, body: object = None) -> Answer:
        """Return the status and the body of an answer; status 0 if there is none."""
        data = None if method == "GET" else json.dumps(body or {}).encode()
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as e:
            status, text = e.code, e.read().decode()
        except OSError as e:
            return 0, str(e)
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def generate(self, tokens: int, rid: str, **more: object) -> Answer:
        """Generate from token ids."""
        if self.name == "SGLang":
            params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.8}
            body = {"input_ids": PROMPT, "sampling_params": params, "rid": rid}
            return self.ask("POST", "/generate", {**body, "return_logprob": True, **more})
        params = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.8, "logprobs": 0}
        body = {"token_ids": PROMPT, "sampling_params": {**params, **more}, "request_id": rid}
        return self.ask("POST", "/inference/v1/generate", body)

    def busy(self) -> bool:
        """Return whether a request is running."""
        if self.name == "SGLang":
            body = self.ask("GET", "/v1/loads?include=core")[1]
            return any(one.get("num_running_reqs") for one in body["loads"])
        running = "vllm:num_requests_running{"
        lines = str(self.ask("GET", "/metrics")[1]).splitlines()
        return any(line.startswith(running) and float(line.split()[-1]) > 0 for line in lines)

    def resident_mb(self) -> int:
        """Return the memory of its processes, in MB."""
        total = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                group = int(stat.read_text().rpartition(")")[2].split()[2])
                if group == self.process.pid:
                    total += int((stat.parent / "statm").read_text().split()[1])
            except (OSError, ValueError):
                continue
        return total * os.sysconf("SC_PAGE_SIZE") // 10**6

    def close(self) -> None:
        """End it and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def said(answer: Answer) -> str:
    """Return an answer as one short line."""
    status, body = answer
    if isinstance(body, Mapping):
        inner = body.get("error_message", body.get("error", body.get("message", body)))
        body = inner.get("message", inner) if isinstance(inner, Mapping) else inner
    line = " ".join(str(body).split()).replace("|", "/")
    return "yes" if status == 200 else f"{status}: {line[:110]}"


def _version(server: Server) -> str:
    path = "/server_info" if server.name == "SGLang" else "/version"
    return str(server.ask("GET", path)[1].get("version"))


def _tokens_out(server: Server) -> str:
    status, body = server.generate(4, "tokens")
    if status != 200:
        return said((status, body))
    if server.name == "SGLang":
        rows = body["meta_info"]["output_token_logprobs"]
        return f"yes, {len(rows)} tokens with logprobs (`/generate`)"
    (choice,) = body["choices"]
    rows = choice["logprobs"]["content"]
    return (
        f"yes, {len(choice['token_ids'])} tokens, {len(rows)} logprobs (`/inference/v1/generate`)"
    )


def _scores(server: Server) -> str:
    if server.name == "SGLang":
        status, body = server.generate(1, "score", logprob_start_len=0)
        rows = body["meta_info"].get("input_token_logprobs") if status == 200 else None
    else:
        status, body = server.generate(1, "score", prompt_logprobs=0)
        rows = body.get("prompt_logprobs") if status == 200 else None
    return f"yes, {len(rows)} of {len(PROMPT)} prompt tokens" if rows else said((status, body))


def _versions(server: Server) -> str:
    body = server.generate(4, "versions")[1]
    if server.name == "SGLang":
        names = sorted(n for n in body["meta_info"] if "weight_version" in n)
        return f"yes (`{'`, `'.join(names)}`)" if names else "no"
    spans = body["choices"][0].get("weight_versions")
    return "yes, a span for each version (`weight_versions`)" if spans else "no"


def _pauses(server: Server) -> str:
    pause, resume = ("/pause?mode=keep", "/resume")
    body: object = None
    if server.name == "SGLang":
        pause, resume, body = "/pause_generation", "/continue_generation", {"mode": "in_place"}
    found: list[Answer] = []
    thread = threading.Thread(target=lambda: found.append(server.generate(400, "paused")))
    thread.start()
    while not server.busy():
        time.sleep(0.01)
    paused = server.ask("POST", pause, body)
    thread.join(2.0)
    waits = thread.is_alive()
    server.ask("POST", resume)
    thread.join()
    if paused[0] != 200 or found[0][0] != 200:
        return said(paused)
    return "yes, the request waits and then continues" if waits else "the request ended"


def _aborts(server: Server) -> str:
    found: list[Answer] = []
    thread = threading.Thread(target=lambda: found.append(server.generate(480, "aborted")))
    thread.start()
    while not server.busy():
        time.sleep(0.01)
    if server.name == "SGLang":
        answer = server.ask("POST", "/abort_request", {"rid": "aborted"})
    else:
        answer = server.ask("POST", "/abort_requests", {"request_ids": ["generate-tokens-aborted"]})
    thread.join()
    return "yes, it returns its tokens" if answer[0] == found[0][0] == 200 else said(answer)


def _from_folder(server: Server) -> str:
    if server.name == "SGLang":
        body = {"model_path": server.model, "weight_version": "2", "abort_all_requests": False}
        answer = server.ask("POST", "/update_weights_from_disk", body)
        return said(answer)
    body = {"method": "reload_weights", "kwargs": {"weights_path": server.model}}
    return said(server.ask("POST", "/collective_rpc", body))


def _by_group(server: Server) -> str:
    if server.name == "SGLang":
        return "yes, gloo (`make test-sglang` sends weights by it)"
    info = {"init_info": {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2}}
    return said(server.ask("POST", "/init_weight_transfer_engine", info))


def _memory(server: Server) -> str:
    before = server.resident_mb()
    if server.name == "SGLang":
        answer = server.ask("POST", "/release_memory_occupation")
        after, back = server.resident_mb(), "/resume_memory_occupation"
    else:
        answer = server.ask("POST", "/sleep?level=1")
        after, back = server.resident_mb(), "/wake_up"
    if server.process.poll() is not None or answer[0] != 200:
        return said(answer)
    server.ask("POST", back)
    return f"the endpoint answers, and frees {before - after} of {before} MB here"


def _adapters(server: Server) -> str:
    body = {"lora_name": "probe", "lora_path": "/nowhere"}
    path = "/load_lora_adapter" if server.name == "SGLang" else "/v1/load_lora_adapter"
    return said(server.ask("POST", path, body))


ROWS: dict[str, Callable[[Server], str]] = {
    "Version": _version,
    "Token ids in and out, with logprobs": _tokens_out,
    "Logprobs of given tokens": _scores,
    "Which weights sampled a token": _versions,
    "Pause with requests in progress": _pauses,
    "Abort one request": _aborts,
    "New weights from a folder": _from_folder,
    "New weights by a process group": _by_group,
    "LoRA adapter by request, without LoRA at start": _adapters,
    "Release of memory": _memory,
}
"""Feature -> the probe. The last one may leave the server unusable."""


def probe(name: str, model: str) -> dict[str, str]:
    """Start a server, and return the answer of each row."""
    print(f"starting {name}", file=sys.stderr)
    server = Server(name, model)
    try:
        if why := server.wait():
            sys.exit(why)
        found = {}
        for feature, row in ROWS.items():
            try:
                found[feature] = row(server)
            except (KeyError, TypeError, ValueError, AttributeError) as e:
                found[feature] = f"unreadable answer ({type(e).__name__}: {e})"
            print(f"{name}: {feature}: {found[feature]}", file=sys.stderr)
        return found
    finally:
        server.close()


def page(found: Mapping[str, Mapping[str, str]], date: str) -> str:
    """Return the page of the results by server."""
    names = list(found)
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    lines += [f"| {row} | {' | '.join(found[name][row] for name in names)} |" for row in ROWS]
    return f"""# Inference servers

See what the CPU builds of the inference servers answer, and which features RollArt can rely on.

    make test-sglang test-vllm        # creates the environments of the servers
    scripts/probe_servers.py --write  # asks real servers and writes this page

Each cell is the answer of a real server on a CPU, on {date}, with a small Qwen3 model in float32. A
number is the HTTP status of a refusal. Servers on GPUs can answer differently. SGLang 0.5.23 with
`--enable-lora` ends at its start on a CPU, because it needs pinned memory. A launch script that
ignores requests for pinned memory makes its LoRA adapters work on a CPU (`make test-sglang`), like
those of vLLM (`make test-vllm`).

{chr(10).join(lines)}

Guides: [SGLang](../guides/sglang.md), [vLLM](../guides/vllm.md).
"""


def main() -> None:
    """Probe both servers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="write the page")
    write = parser.parse_args().write
    from support.engine_servers import make_model

    folder = Path(tempfile.mkdtemp())
    try:
        model = make_model(folder / "model")
        found = {name: probe(name, model) for name in ("SGLang", "vLLM")}
    finally:
        shutil.rmtree(folder)
    text = page(found, datetime.now(UTC).date().isoformat())
    print(text)
    if write:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
