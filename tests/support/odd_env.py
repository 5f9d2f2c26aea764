"""An environment of the standard library alone that does what it is told; runs in boxes."""

from __future__ import annotations

import os
import sys
import threading
import time


class Scalar:
    """A number as NumPy has them."""

    def tolist(self):
        return 7


class OddEnv:
    def __init__(self, name="odd", num_tasks=3, making=""):
        if making == "hang":
            time.sleep(600)
        if making == "raise":
            raise RuntimeError("it cannot be made")
        self.name, self._tasks, self.turn = name, num_tasks, -1

    def reset(self, *, seed=None, options=None):
        self.turn = 0
        return f"{self.name} {seed} {options} é漢\U0001f600\ud800\u2028", {
            "available_actions": ["go"]
        }

    def step(self, action):
        self.turn += 1
        what, _, more = action.partition(" ")
        said = getattr(self, "do_" + what, lambda more: "nothing")(more)
        if isinstance(said, tuple):
            return said
        return said, 0.5, what == "end", False, {"success": what == "end", "odd": {1, 2}}

    def do_pid(self, more):
        return str(os.getpid())

    def do_turn(self, more):
        return str(self.turn)

    def do_python(self, more):
        return ".".join(map(str, sys.version_info[:2]))

    def do_exit(self, more):
        os._exit(int(more))

    def do_quit(self, more):
        sys.exit("out of here")

    def do_hang(self, more):
        while True:
            pass

    def do_sleep(self, more):
        time.sleep(float(more))
        return "slept"

    def do_eat(self, more):
        eaten = []
        while True:
            eaten.append(bytearray(b"x") * (16 << 20))

    def do_print(self, more):
        print("printed", more)
        os.write(1, b'{"id": 1, "value": "spoofed"}\n')
        os.write(2, b"on stderr\n")
        sys.stdout.flush()
        return "still here"

    def do_read(self, more):
        with open(more) as file:
            return file.read()

    def do_write(self, more):
        with open(more, "w") as file:
            file.write("written")
        return "written"

    def do_raise(self, more):
        raise ZeroDivisionError("of all things")

    def do_nan(self, more):
        return "nan", float("nan"), False, False, {}

    def do_wrong(self, more):
        return "two", 1

    def do_none(self, more):
        return None, 0.0, False, False, {}

    def do_unspeakable(self, more):
        class Mute(Exception):
            def __str__(self):
                raise ValueError("no words")

        raise Mute

    def do_messages(self, more):
        return [{"role": "user", "content": "hello"}], 1, False, True, {}

    def do_thread(self, more):
        threading.Thread(target=lambda: time.sleep(600)).start()
        return "started"

    def do_version(self, more):
        import shared_dependency

        return shared_dependency.VERSION

    def oracle(self):
        return "end"

    def num_tasks(self, split):
        if split == "scalar":
            return Scalar()
        return object() if split == "odd" else self._tasks

    def close(self):
        pass


class VowelEnv(OddEnv):
    """Wants a word with an ``a`` in it; some tasks end the process, hang or raise."""

    def __init__(self, trouble=()):
        super().__init__("vowels", 8)
        self.trouble = dict(trouble)

    def reset(self, *, seed=None, options=None):
        self.what = self.trouble.get(str(options["task"])) if options["split"] == "train" else None
        return "say a word with a vowel", {}

    def step(self, action):
        if self.what:
            getattr(self, "do_" + self.what.partition(" ")[0])(self.what.partition(" ")[2])
        return "", float("a" in action), True, False, {"success": "a" in action}

    def oracle(self):
        return "pan"

    def corpus(self):
        yield from ("say a word with a vowel", "abcdefghijklmnopqrstuvwxyz")
