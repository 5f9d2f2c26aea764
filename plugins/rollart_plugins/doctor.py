"""``rollart doctor``: what the machines lack for a run.

    config ──> placement as in the run ──> each machine: driver, memory, files, clock, limits
                                       ──> each trainer rank: an all-reduce

Takes: a run config. Gives: one finding for each check and machine, with what to fix. Never: loads
a model, starts an engine or a training step, or leaves a process or file behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rollart_core.cli.output import print_json, print_table
from rollart_core.contracts.host import Finding
from rollart_core.errors import ConfigError, RollartError, first_line

if TYPE_CHECKING:
    from rollart_core.config.resolve import ResolvedRun
    from rollart_core.runtime.workers import WorkersRuntime

_SIGNS: Final = {"ok": "ok", "warn": "!", "bad": "bad"}
_GB: Final = 1e9
LEAST_FILES: Final = 4096
"""Open files that a run with many environments and connections needs."""
MOST_USED: Final = 0.1
"""Share of a GPU's memory that other processes may use."""
BYTES: Final = 16 * 2**20
"""Size of the tensor of the all-reduce."""
ROUNDS: Final = 4
CONNECT_S: Final = 10.0
"""Seconds in which a machine must reach a port of the trainer's machine."""
PREFLIGHT: Final = "preflight checks"
TESTED: Final = {"sglang": "0.5.23", "vllm": "0.32"}
"""Server -> the version that RollArt is tested with."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One finding, and the machine it is about."""

    node: str
    finding: Finding


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, as the driver reports it."""

    name: str
    total_bytes: float
    used_bytes: float
    driver: str


def doctor(
    config: Annotated[str, typer.Argument(help="The config file of the run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check on every machine whether a run can work there, and say what to fix.

    Example: rollart doctor examples/gpu/qwen3_8b_webshop_16.yaml env.data_dir=DIR

    The exit code is 1 if anything must be fixed.
    """
    from rollart_core.runtime.interrupts import sigterm_is_ctrl_c
    from rollart_core.runtime.prepare import prepare

    try:
        run = prepare(config, overrides or [])
    except ConfigError as e:
        found = list(_problems(e, "config"))
    else:
        with sigterm_is_ctrl_c():
            found = asyncio.run(examine(run, lambda text: typer.echo(text, err=True)))
    works = all(one.finding.state != "bad" for one in found)
    if as_json:
        rows = [{"node": one.node, **asdict(one.finding)} for one in found]
        print_json({"works": works, "findings": rows})
    else:
        shown = [
            (_SIGNS[f.state], one.node, f.what, f.says, f.mend)
            for one in found
            for f in [one.finding]
        ]
        print_table("", ("", "machine", "check", "finding", "what to fix"), shown)
    if not works:
        raise typer.Exit(1)


async def examine(run: ResolvedRun, progress: Callable[[str], None]) -> list[Diagnosis]:
    """Place the run's workers as the run would, and check their machines.

    Args:
        run: The run.
        progress: Receives the name of each step.
    """
    from rollart_core.runtime.launch import new_runtime
    from rollart_core.runtime.placement import demand_of, place
    from rollart_core.store.run_dir import new_run_dir

    run_dir = new_run_dir(run.config.runs_dir, "doctor")
    runtime = new_runtime(run, run_dir)
    found: list[Diagnosis] = []
    try:
        progress("placing the workers")
        try:
            pools = await runtime.connect()
            await runtime.place(place(run, pools, demand_of(run)))
        except ConfigError as e:
            found += _problems(e, PREFLIGHT)
        else:
            says = "places, versions, files, run directory, weights"
            found.append(Diagnosis("", Finding(PREFLIGHT, "ok", says)))
        progress("asking the machines")
        found += await _machines(run, runtime)
        if found[0].finding.state == "ok":
            progress("starting an all-reduce of the trainer ranks")
            found += await _all_reduce(run, runtime)
    except RollartError as e:
        found.append(Diagnosis("", Finding("workers", "bad", first_line(str(e)))))
    finally:
        await runtime.close()
        _remove(run_dir)
    return found


def _problems(error: ConfigError, what: str) -> Iterator[Diagnosis]:
    for line in str(error).splitlines():
        yield Diagnosis("", Finding(what, "bad", line.strip()))


def _remove(run_dir: Path) -> None:
    import shutil

    shutil.rmtree(run_dir, ignore_errors=True)


async def _machines(run: ResolvedRun, runtime: WorkersRuntime) -> list[Diagnosis]:
    from rollart_core.runtime.workload import shape_of
    from rollart_ray.nodes import check_sandbox_on_node, compare_clocks

    facts = await runtime.ask(ask_for_facts(str(run.config.runs_dir), _servers(run)))
    if not facts:  # no worker has a place
        return []
    apart, within_s = await compare_clocks(runtime.ask)
    found = [Diagnosis("", Finding("clocks", "bad", *_halves(line))) for line in apart]
    if not apart:
        said = f"agree within {within_s:.2g} s"
        found.append(Diagnosis("", Finding("clocks", "ok", said)))
    found += _versions(facts)
    shape = shape_of(run.config.model)
    params = shape.num_params if shape else 0
    for node, one in facts.items():
        found += [Diagnosis(node, f) for f in findings_of(one, params, on_gpu=_on_gpu(run))]
    for env in run.envs:
        options = env.plugin.options
        if "sandbox" not in options and "isolation" not in options:
            continue
        question = check_sandbox_on_node(env.plugin.spec.id, options)
        for node, fault in (await runtime.ask(question)).items():
            what = f"sandbox of {env.name}"
            ok = Finding(what, "ok", "starts")
            found.append(Diagnosis(node, ok if fault is None else Finding(what, "bad", *fault)))
    return found


def _servers(run: ResolvedRun) -> dict[str, str]:
    """Return the packages of the launched servers, each with its Python; empty: the node's own."""
    found = {}
    for engine in (run.engine, *(one.plugin for one in run.engines)):
        name = engine.spec.alias or engine.spec.id
        if name in TESTED and not engine.options.get("url"):
            found[name] = next(iter(engine.options.get("command") or ()), "")
    return found


def _on_gpu(run: ResolvedRun) -> bool:
    return getattr(run.config.model, "device", "auto") == "cuda"


def _halves(line: str) -> tuple[str, str]:
    says, _, mend = line.partition(": ")
    return says, mend


def ask_for_facts(runs_dir: str, servers: Mapping[str, str]) -> Callable[[], dict[str, Any]]:
    """Return a function that returns the facts about a machine that the checks need.

    Args:
        runs_dir: The folder of runs.
        servers: Those of :func:`_servers`.
    """
    asked = dict(servers)

    def facts() -> dict[str, Any]:
        import os
        import resource
        import shutil
        import subprocess
        import sys
        from importlib.metadata import distributions

        def output(*argv: str) -> str:
            try:
                done = subprocess.run(
                    argv, capture_output=True, text=True, timeout=120, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as e:
                return f"error: {e}"
            return done.stdout.strip() if done.returncode == 0 else f"error: {done.stderr.strip()}"

        def free(path: str) -> int:
            while not os.path.exists(path):
                path = os.path.dirname(path) or "/"
            return shutil.disk_usage(path).free

        here = {d.name.lower(): d.version for d in distributions()}
        versions = {n: here.get(n, "none") for n in ("rollart", "torch", "transformers", "ray")}
        installed = {
            name: output(
                python or sys.executable,
                "-c",
                "import importlib.metadata as m; names = [d.name for d in m.distributions()]; "
                f"print(next(m.version(n) for n in ('{name}', '{name}-cpu') if n in names))",
            )
            for name, python in asked.items()
        }
        probe = "import torch; print(torch.version.cuda or '', torch.cuda.is_available())"
        query = "--query-gpu=name,memory.total,memory.used,driver_version"
        smi = ("nvidia-smi", query, "--format=csv,noheader,nounits")
        return {
            "gpus": output(*smi) if shutil.which(smi[0]) else "",
            "cuda": output(sys.executable, "-c", probe) if versions["torch"] != "none" else "",
            "versions": versions,
            "shm_free": free("/dev/shm"),
            "disk_free": free(os.path.abspath(runs_dir)),
            "memory_free": os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "links": output(smi[0], "topo", "-m") if shutil.which(smi[0]) else "",
            "locked_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "cores": os.cpu_count() or 1,
            "servers": installed,
        }

    return facts


def gpus_of(text: str) -> list[Gpu]:
    """Return the GPUs in the CSV output of nvidia-smi (name, MiB in total, MiB used, driver)."""
    found = []
    for line in text.splitlines():
        name, total, used, driver = (part.strip() for part in line.split(","))
        found.append(Gpu(name, float(total) * 2**20, float(used) * 2**20, driver))
    return found


def slow_pairs(text: str) -> list[str]:
    """Return the pairs of GPUs without NVLink in the output of ``nvidia-smi topo -m``."""
    cells = [line.split() for line in text.splitlines() if line.strip().startswith("GPU")]
    rows = [row for row in cells if "X" in row]  # without the header
    return [
        f"GPU {i} and GPU {j} ({row[j + 1]})"
        for i, row in enumerate(rows)
        for j in range(i + 1, len(rows))
        if not row[j + 1].startswith("NV")
    ]


def findings_of(facts: Mapping[str, Any], num_params: int, *, on_gpu: bool) -> Iterator[Finding]:
    """Yield the findings about one machine.

    Args:
        facts: Those of :func:`ask_for_facts`.
        num_params: Number of parameters of the model; 0 if unknown.
        on_gpu: Whether the run requires GPUs.
    """
    yield from _gpu_findings(facts["gpus"], facts["cuda"], on_gpu=on_gpu)
    if facts["gpus"] and not facts["gpus"].startswith("error"):
        yield from _link_findings(facts["links"], facts["locked_bytes"])
    for name, version in facts["servers"].items():
        is_there = not version.startswith("error")
        says = f"{version} (tested with {TESTED[name]})" if is_there else "is not installed"
        mend = f"install it, and set engine.command to its Python (docs/guides/{name}.md)"
        yield Finding(name, "ok" if is_there else "bad", says, _unless(is_there, mend))
    checkpoint = 12 * num_params
    disk, mend = facts["disk_free"], "free space, or set runs_dir to a larger file system"
    says = f"{disk / _GB:.3g} GB free, a checkpoint needs {checkpoint / _GB:.3g} GB"
    yield Finding(
        "disk", "ok" if disk > checkpoint else "bad", says, _unless(disk > checkpoint, mend)
    )
    yield Finding("/dev/shm", "ok", f"{facts['shm_free'] / _GB:.3g} GB free")
    says = f"{facts['memory_free'] / _GB:.3g} GB free, {facts['cores']} cores"
    yield Finding("memory", "ok", says)
    files = facts["open_files"]
    enough = files < 0 or files >= LEAST_FILES
    mend = f"ulimit -n {LEAST_FILES}, in the shell that starts the node"
    yield Finding(
        "open files", "ok" if enough else "bad", f"at most {files}", _unless(enough, mend)
    )


def _unless(ok: bool, mend: str) -> str:
    return "" if ok else mend


def _gpu_findings(gpus: str, cuda: str, *, on_gpu: bool) -> Iterator[Finding]:
    if gpus.startswith("error"):
        yield Finding("driver", "bad", first_line(gpus), "install or reload the NVIDIA driver")
        return
    found = gpus_of(gpus)
    if not found:
        mend = "run on machines with GPUs, or set model.device: cpu"
        yield Finding("GPUs", "bad" if on_gpu else "ok", "none", _unless(not on_gpu, mend))
        return
    built, _, available = cuda.partition(" ")
    works = available == "True"
    says = f"driver {found[0].driver}, torch for CUDA {built or 'none'}: "
    says += "torch sees the GPUs" if works else "torch does not see the GPUs"
    mend = "install a torch build for a CUDA version that the driver supports"
    yield Finding("driver", "ok" if works else "bad", says, _unless(works, mend))
    for index, gpu in enumerate(found):
        is_free = gpu.used_bytes <= MOST_USED * gpu.total_bytes
        says = f"{gpu.name}, {gpu.used_bytes / _GB:.3g} of {gpu.total_bytes / _GB:.3g} GB used"
        mend = "end the processes that use it (nvidia-smi lists them)"
        yield Finding(f"GPU {index}", "ok" if is_free else "bad", says, _unless(is_free, mend))


def _link_findings(links: str, locked_bytes: int) -> Iterator[Finding]:
    """Yield what slows the transfers between GPUs and between machines."""
    if slow := slow_pairs(links):
        says = f"no NVLink between {slow[0]}" + (f", and {len(slow) - 1} more" * (len(slow) > 1))
        mend = "nothing if this is expected; put the GPUs of one engine or trainer on linked ones"
        yield Finding("links", "warn", says, mend)
    elif "NV" in links:
        yield Finding("links", "ok", "NVLink between all GPUs")
    unlimited = locked_bytes < 0
    says = "unlimited" if unlimited else f"at most {locked_bytes / _GB:.3g} GB"
    mend = "ulimit -l unlimited, in the shell that starts the node, if NCCL uses InfiniBand"
    yield Finding("locked memory", "ok" if unlimited else "warn", says, _unless(unlimited, mend))


def _versions(facts: Mapping[str, Mapping[str, Any]]) -> list[Diagnosis]:
    """Return one finding on the packages of all machines, which must be the same."""
    first_node, first = next(iter(facts.items()))
    found = []
    for name, version in first["versions"].items():
        other = {n: f["versions"][name] for n, f in facts.items() if f["versions"][name] != version}
        if other:
            node, theirs = next(iter(other.items()))
            says = f"{name} {theirs}, but {version} on {first_node}"
            mend = f"install {name}=={version} there"
            found.append(Diagnosis(node, Finding("packages", "bad", says, mend)))
    if not found:
        said = ", ".join(f"{n} {v}" for n, v in first["versions"].items() if v != "none")
        found.append(Diagnosis("", Finding("packages", "ok", said)))
    return found


# The all-reduce


async def _all_reduce(run: ResolvedRun, runtime: WorkersRuntime) -> list[Diagnosis]:
    """Start the trainer ranks without a model, connect to rank 0, and sum a tensor over them."""
    from rollart_core.runtime.remote import OPEN_STORE

    size = run.config.runtime.num_trainer_ranks
    workers = [runtime.new_worker("trainer", rank) for rank in range(size)]
    device = str(getattr(run.config.model, "device", "auto"))
    own = runtime.has_own_devices
    what = f"all-reduce of {size} ranks"
    found: list[Diagnosis] = []
    try:
        await asyncio.gather(*(worker.start() for worker in workers))
        store = await workers[0].call(OPEN_STORE, runtime.trainer_host)
        for node, why in (await runtime.ask(ask_to_connect(store, CONNECT_S))).items():
            found.append(Diagnosis(node, _connection(store, why)))
        calls = [
            worker.call(f"{__name__}:all_reduce", store, rank, size, device, own)
            for rank, worker in enumerate(workers)
        ]
        took_s = max(await asyncio.gather(*calls))
    except Exception as e:
        says = first_line(str(e)) or type(e).__name__
        mend = "check the network interfaces (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and firewalls"
        return [*found, Diagnosis("", Finding(what, "bad", says, mend))]
    finally:
        await asyncio.gather(*(worker.close() for worker in workers), return_exceptions=True)
    says = f"{BYTES / 2**20:.0f} MiB in {1e3 * took_s:.3g} ms ({BYTES / took_s / _GB:.3g} GB/s)"
    return [*found, Diagnosis("", Finding(what, "ok", says))]


def ask_to_connect(address: str, limit_s: float) -> Callable[[], str]:
    """Return a function that connects to ``host:port`` and returns an error, or an empty string."""

    def connect() -> str:
        import socket

        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=limit_s).close()
        except OSError as e:
            return str(e)
        return ""

    return connect


def _connection(address: str, why: str) -> Finding:
    host = address.rpartition(":")[0]
    if not why:
        return Finding("trainer's ports", "ok", f"{host} can be reached")
    mend = "open the ports between all machines of the run in their firewalls"
    return Finding("trainer's ports", "bad", f"cannot connect to {address}: {why}", mend)


def all_reduce(store: str, rank: int, world_size: int, device: str, own_devices: bool) -> float:
    """Join the ranks, sum a tensor over them, and return the seconds of the fastest round.

    Raises:
        RuntimeError: If the sum is wrong, or a rank is unreachable.
    """
    import torch
    import torch.distributed as dist

    from rollart_core.training import process_group

    if world_size == 1:
        return _rounds(lambda: torch.zeros(BYTES // 4).sum())
    process_group.join(store, rank, world_size, device=device, own_devices=own_devices)
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    tensor = torch.ones(BYTES // 4, device="cuda" if use_cuda else "cpu")
    try:
        dist.all_reduce(tensor)
        if float(tensor[0]) != world_size:
            raise RuntimeError(f"the sum over {world_size} ranks is {float(tensor[0]):g}")
        return _rounds(lambda: (dist.all_reduce(tensor), tensor[0].item()))
    finally:
        process_group.leave()


def _rounds(work: Callable[[], object]) -> float:
    seconds: Sequence[float] = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        seconds = [*seconds, time.perf_counter() - began]
    return min(seconds)
