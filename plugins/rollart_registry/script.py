"""Is a script still what pip writes for an entry point?

Takes: a file and the entry point. Gives: what is wrong with it. Never: runs it, or believes the
RECORD, which lies beside it: pip writes scripts itself, so a wheel holds no hash of them.

    #!/path/to/python
    import re, sys
    from MODULE import NAME
    if __name__ == "__main__":
        sys.argv[0] = ...
        sys.exit(NAME())

Versions of pip differ in how they shorten ``argv[0]``; that alone is left free.
"""

from __future__ import annotations

import ast
import os
import shlex
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Final

from rollart_registry.interpreter import TargetInterpreter

_NODES: Final = (
    ast.Module,
    ast.Import,
    ast.ImportFrom,
    ast.alias,
    ast.If,
    ast.Compare,
    ast.Eq,
    ast.Expr,
    ast.Call,
    ast.Assign,
    ast.Name,
    ast.Attribute,
    ast.Subscript,
    ast.Slice,
    ast.UnaryOp,
    ast.USub,
    ast.Constant,
    ast.Load,
    ast.Store,
)
_CALLS: Final = ("re.sub", "sys.argv[0].endswith", "sys.argv[0].removesuffix", "sys.exit")


def script_fault(path: Path, value: str, interpreter: TargetInterpreter) -> str:
    """Return what is wrong with an installed script; empty when nothing is.

    Args:
        path: Of the script.
        value: Of its entry point: ``module:function``.
        interpreter: Whose script it is.
    """
    try:
        text = path.read_text("utf-8")
        tree = ast.parse(text)
    except OSError as e:
        return f"cannot be read ({e.strerror})"
    except (ValueError, SyntaxError):
        return "is not what pip writes"
    entry = EntryPoint("script", value, "console_scripts")
    if not _same_python(text, interpreter):
        return "is run by another program than its Python"
    return "" if _is_pips(tree, entry) else f"runs something else than {value}"


def _same_python(text: str, interpreter: TargetInterpreter) -> bool:
    lines = text.splitlines()
    try:
        words = shlex.split(lines[0].removeprefix("#!"))
        if words == ["/bin/sh"]:  # for a path that is too long, or has spaces: exec PATH "$0" "$@"
            words = shlex.split(lines[1].removeprefix("'''exec' "))[:1]
    except (IndexError, ValueError):
        return False
    python = os.path.realpath(interpreter.python)
    return len(words) == 1 and os.path.realpath(words[0]) == python


def _is_pips(tree: ast.Module, entry: EntryPoint) -> bool:
    first = entry.attr.partition(".")[0]
    imported = f"from {entry.module} import {first}"
    nodes = list(ast.walk(tree))
    froms = [ast.unparse(node) for node in nodes if isinstance(node, ast.ImportFrom)]
    plain = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    targets = {ast.unparse(t) for n in nodes if isinstance(n, ast.Assign) for t in n.targets}
    renamed = any(isinstance(node, ast.alias) and node.asname for node in nodes)
    return (
        all(isinstance(node, _NODES) for node in nodes)
        and froms == [imported]
        and plain <= {"re", "sys"}
        and not renamed
        and targets <= {"sys.argv[0]"}
        and {*calls} <= {*_CALLS, entry.attr}
        and f"sys.exit({entry.attr}())" in map(ast.unparse, nodes)
    )
