"""What plugins print while they are loaded goes to stderr; what anybody else prints does not."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout

import pytest
from support.pace import scaled

from rollart_core.plugins import manager as plugins
from rollart_core.plugins.manager import output_of_plugins

LIMIT_S = scaled(30)


@pytest.fixture(autouse=True)
def _stdout_is_put_back() -> Iterator[None]:
    before = sys.stdout
    yield
    sys.stdout = before


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@contextmanager
def loading_elsewhere() -> Iterator[Callable[[], None]]:
    """A thread that is in a block; give what ends its block."""
    inside, end = threading.Event(), threading.Event()

    def load() -> None:
        with output_of_plugins():
            print("plugin")
            inside.set()
            assert end.wait(LIMIT_S)

    thread = threading.Thread(target=load)
    thread.start()
    assert inside.wait(LIMIT_S)

    def ends() -> None:
        end.set()
        thread.join(LIMIT_S)
        assert not thread.is_alive()

    try:
        yield ends
    finally:
        ends()


def test_a_block_diverts_its_thread_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with loading_elsewhere():
        print("program")
    assert tuple(capsys.readouterr()) == ("program\n", "plugin\n")


def test_blocks_that_overlap_leave_stdout_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with loading_elsewhere() as other_ends, output_of_plugins():
        other_ends()  # the first to begin is the first to end
        print("second plugin")
    assert sys.stdout is before
    with output_of_plugins(), loading_elsewhere():
        pass
    assert sys.stdout is before
    print("program")
    assert tuple(capsys.readouterr()) == ("program\n", "plugin\nsecond plugin\nplugin\n")


def test_a_block_in_a_block_ends_with_the_outer_one(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with output_of_plugins():
        with output_of_plugins():
            print("a plugin that loads plugins")
        print("goes on")
    assert sys.stdout is before
    assert tuple(capsys.readouterr()) == ("", "a plugin that loads plugins\ngoes on\n")


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_an_error_ends_the_block(
    error: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    before = sys.stdout
    with pytest.raises(error), output_of_plugins():
        raise error
    assert sys.stdout is before
    print("program")
    assert capsys.readouterr().out == "program\n"


def test_what_is_made_of_stdout_in_a_block_writes_to_stdout_afterwards(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    with output_of_plugins():
        kept = sys.stdout
        wrapped = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", write_through=True)
        wrapped.write("wrapped in the block\n")
        sys.stdout.writelines(["lines", " in the block\n"])
    print("kept", file=kept, flush=True)
    wrapped.write("wrapped\n")
    wrapped.detach()
    captured = capsysbinary.readouterr()
    assert captured.out == b"kept\nwrapped\n"
    assert b"wrapped in the block\n" in captured.err
    assert b"lines in the block\n" in captured.err


def test_a_plugin_that_replaces_stdout_swallows_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Coloured:
        """As colorama's: writes to what stdout was."""

        def __init__(self, stream: object) -> None:
            self.write = stream.write  # type: ignore[attr-defined]

    with output_of_plugins():
        sys.stdout = Coloured(sys.stdout)  # type: ignore[assignment]
        print("plugin")
    print("program")
    assert tuple(capsys.readouterr()) == ("program\n", "plugin\n")


def test_a_redirection_of_another_thread_that_ends_meanwhile_stays_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    began, end = threading.Event(), threading.Event()
    caught = io.StringIO()

    def redirect() -> None:
        with redirect_stdout(caught):
            print("redirected")
            began.set()
            assert end.wait(LIMIT_S)

    thread = threading.Thread(target=redirect)
    thread.start()
    assert began.wait(LIMIT_S)
    with output_of_plugins():
        end.set()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    print("program")
    assert capsys.readouterr().out == "program\n"
    assert caught.getvalue() == "redirected\n"


def test_a_process_without_stdout_or_stderr_can_load_plugins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with output_of_plugins():
        print("nowhere")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", None)
    with output_of_plugins():
        print("nowhere", flush=True)
    assert sys.stdout.getvalue() == ""  # type: ignore[attr-defined]


class _CountingLock:
    """A lock that knows how many threads asked for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.asked = threading.Semaphore(0)

    def acquire(self, timeout: float) -> bool:
        self.asked.release()
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()


def test_threads_that_ask_at_once_load_the_plugins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_threads = 8
    lock = _CountingLock()
    got: list[object] = []
    loads: list[object] = []

    def load() -> object:
        loads.append(object())
        for _ in range(num_threads):  # until all of them have asked
            assert lock.asked.acquire(timeout=LIMIT_S)
        return loads[0]

    monkeypatch.setattr(plugins, "_current", None)
    monkeypatch.setattr(plugins, "_loading", lock)
    monkeypatch.setattr(plugins, "load", load)
    threads = [
        threading.Thread(target=lambda: got.append(plugins.plugins())) for _ in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(loads) == 1
    assert got == loads * num_threads


def test_a_module_that_asks_for_plugins_while_another_thread_waits_for_it_is_no_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    importing = threading.Lock()  # of the module
    importing.acquire()
    loads = threading.Event()

    def load() -> object:
        if threading.current_thread() is not threading.main_thread():
            loads.set()
            assert importing.acquire(timeout=LIMIT_S)
        return object()

    monkeypatch.setattr(plugins, "_current", None)
    monkeypatch.setattr(plugins, "_LOADED_WITHIN_S", 0.05)
    monkeypatch.setattr(plugins, "load", load)
    thread = threading.Thread(target=plugins.plugins)
    thread.start()
    assert loads.wait(LIMIT_S)
    plugins.plugins()
    importing.release()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
