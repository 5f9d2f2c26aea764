"""Compile C sources, such as ``kernels.c``, once per machine, and bind them.

Takes: a C compiler, if there is one. Gives: a ctypes library, or None. Never: fails a run; without
a compiler the decoder uses torch for the same work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rollart_core.errors import UserError

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
COMPILE_TIMEOUT_S = 120

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES: dict[str, tuple[object, ...]] = {
    "rollart_add_rms_norm": (_P, _P, _P, _P, _I, _I, _F),
    "rollart_silu_mul": (_P, _P, _I, _I),
    "rollart_rotate_and_store": (*(_P,) * 9, *(_I,) * 5, _F),
    "rollart_attention": (*(_P,) * 8, *(_I,) * 5, _F),
    "rollart_copy_slot": (_P, _P, *(_I,) * 6),
    "rollart_sample": (_P, _P, _P, _P, _P, _I, _I),
}


@functools.cache
def load_kernels(required: bool = False) -> ctypes.CDLL | None:
    """Return the compiled kernels, compiling them when this machine has not yet.

    Args:
        required: Whether to raise instead of returning None.

    Raises:
        UserError: If ``required`` and there is no compiler, or it fails.
    """
    return load_library(SOURCE, SIGNATURES, required)


def load_library(
    source: Path, signatures: Mapping[str, tuple[object, ...]], required: bool = False
) -> ctypes.CDLL | None:
    """Return a compiled C source, compiling it when this machine has not yet.

    Args:
        source: The C file.
        signatures: Function name -> its ctypes argument types; all return nothing.
        required: Whether to raise instead of returning None.

    Raises:
        UserError: If ``required`` and there is no compiler, or it fails.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        _give_up(required, "no C compiler (cc, gcc or $CC) on the PATH")
        return None
    try:
        return _bind(_compile(compiler, source), signatures)
    except (OSError, subprocess.SubprocessError) as e:
        said = getattr(e, "stderr", "") or str(e)
        _give_up(required, f"{compiler} could not compile {source.name}: {said[-300:]}")
        return None


def _give_up(required: bool, why: str) -> None:
    if required:
        raise UserError(f"kernels: native was requested, but {why}; use kernels: torch or auto")


def _compile(compiler: str, source: Path) -> Path:
    text = source.read_bytes()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(b"\0".join([text, version, " ".join(FLAGS).encode(), _cpu()]))
    target = _cache_dir() / f"{source.stem}-{key.hexdigest()[:20]}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "made.so"
        try:
            _run_compiler(compiler, source, made, "-fopenmp")
        except subprocess.CalledProcessError:  # clang without libomp: one thread, but native
            _run_compiler(compiler, source, made)
        made.replace(target)  # atomic: other processes see all of it or nothing
    return target


def _run_compiler(compiler: str, source: Path, target: Path, *extra: str) -> None:
    command = [compiler, *FLAGS, *extra, str(source), "-o", str(target), "-lm"]
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S)


def _cpu() -> bytes:
    """What ``-march=native`` depends on: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
        return "\n".join(sorted(facts)).encode()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}".encode()


def _cache_dir() -> Path:
    """A folder that is private to this user, because its files are executed."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "rollart"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="rollart-kernels-"))


def _bind(path: Path, signatures: Mapping[str, tuple[object, ...]]) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None
    return library
