"""Snapshots of the box: taken for the host, who keeps them, and brought back.

Takes: the calls ``snapshot``, ``rewind`` and ``restore``. Gives: an archive; then which parts of it
are needed; then the folders as they were. Never: lets anything of the old episode run on, or run
while the folders are on their way back.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time

from rollart_sandboxes.inside.packing import Packing, records
from rollart_sandboxes.inside.processes import children, descendants, signal_one
from rollart_sandboxes.inside.restoring import Restoring
from rollart_sandboxes.inside.tree import Note, every

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Tuple

MOST_NOTED = 100_000
END_S = 10.0


class Snapshots:
    """What is noted of each snapshot, newest last."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent
        self.notes: Dict[str, Dict[str, Note]] = {}
        self.num_notes: Dict[str, int] = {}
        self.restoring: Optional[Restoring] = None
        self.one_at_a_time = threading.Lock()

    def take(self, header: Dict[str, Any]) -> None:
        """Send an archive of the folders; what a program may still write to is not noted."""
        with self.one_at_a_time:
            alone, begun = self.alone(), self.agent.num_execs
            packing = Packing(self.agent.roots)
            for piece in packing:
                self.agent.send_when_room({"id": header["id"], "part": 1}, piece)
            alone = alone and self.agent.num_execs == begun and self.alone()
            if not (alone and packing.folders.clock_moves_on()):
                distrust(packing.notes)
            self.notes[header["name"]] = packing.notes
            self.num_notes[header["name"]] = packing.num_notes
            while sum(self.num_notes.values()) > MOST_NOTED:
                oldest = next(iter(self.notes))
                del self.notes[oldest], self.num_notes[oldest]

    def alone(self) -> bool:
        """Whether nothing else runs; what is dying gets a moment."""
        for _ in range(50):
            if self.agent.execs:
                return False
            if not self.others():
                return True
            time.sleep(0.001)
        return False

    def others(self) -> List[int]:
        """Return the processes that are not the agent's own."""
        if self.agent.pid == 1:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        return sorted(descendants(children()))

    def rewind(self, header: Dict[str, Any]) -> Optional[Tuple[Dict[str, Any], bytes]]:
        """Kill everything, remove what differs, and say what is needed to bring the rest back."""
        with self.one_at_a_time:
            self.end_others()
            known = self.notes.get(header["name"])
            self.restoring = Restoring(self.agent.roots, known or {})
            if known is None or header["whole"]:
                self.restoring.wipe()
                return {"whole": True}, b""
            spans = self.restoring.compare()
            if spans:
                return {"whole": False}, json.dumps(spans).encode()
            self.finish(header["name"])
            return {"done": True}, b""

    def restore(self, header: Dict[str, Any]) -> None:
        """Unpack what was asked for."""
        with self.one_at_a_time:
            pieces, rest = self.agent.files.uploaded(header["id"]), memoryview(b"")

            def read(size: int) -> bytes:
                nonlocal rest
                if not rest:
                    rest = memoryview(next(pieces, b""))
                given, rest = rest[:size], rest[size:]
                return bytes(given)

            if self.restoring is None:
                raise OSError(errno.EINVAL, "nothing is being restored")
            for record, body in records(read):
                self.restoring.place(record, body)
            self.finish(header["name"])

    def finish(self, name: str) -> None:
        restoring = self.restoring
        assert restoring is not None
        restoring.settle()
        if not restoring.folders.clock_moves_on():
            distrust(restoring.notes)
        self.restoring = None
        self.agent.thaw()

    def end_others(self) -> None:
        """Kill all that runs in the box besides the agent, and wait for its end."""
        ends_at = time.monotonic() + END_S
        while self.agent.execs or self.others():
            if time.monotonic() > ends_at:
                raise OSError(errno.EBUSY, "what runs in the box does not end")
            for run in list(self.agent.execs.values()):
                self.agent.kill(run)
            if self.agent.pid == 1:
                signal_one(-1, signal.SIGKILL)
            else:
                for number in (signal.SIGSTOP, signal.SIGKILL):
                    for pid in self.others():
                        signal_one(pid, number)
            time.sleep(0.001)


def distrust(notes: Dict[str, Note]) -> None:
    """Let everything differ from what was noted."""
    for note in every(notes):
        note.ctime_ns = -1
