import asyncio

import pytest

from rollart_core.contracts.sandbox import ExecResult
from rollart_envs.swe.patch import (
    APPLIERS,
    PatchError,
    apply_patch,
    extract_patch,
    file_changes,
    restore_commands,
    steers_the_runner,
    touched_files,
    without_files,
)
from rollart_testing.fakes import FakeSandbox

CHANGED = """\
diff --git a/src/a.py b/src/a.py
index 1..2 100644
--- a/src/a.py
+++ b/src/a.py
@@ -1,3 +1,3 @@
 x = 1
--- a/not/a/header.py
+++ b/not/a/header.py
 y = 2
"""
MADE = """\
diff --git a/tests/new.py b/tests/new.py
new file mode 100644
--- /dev/null
+++ b/tests/new.py
@@ -0,0 +1 @@
+assert True
"""
GONE = """\
diff --git a/old.py b/old.py
deleted file mode 100644
--- a/old.py
+++ /dev/null
@@ -1 +0,0 @@
-x = 1
"""
RENAMED = """\
diff --git a/a b.py b/c.py
similarity index 100%
rename from a b.py
rename to c.py
"""
BINARY = """\
diff --git a/my pic.png b/my pic.png
new file mode 100644
Binary files /dev/null and b/my pic.png differ
"""
QUOTED = """\
diff --git "a/\\303\\251.py" "b/\\303\\251.py"
--- "a/\\303\\251.py"
+++ "b/\\303\\251.py"
@@ -1 +1 @@
-a
+b
"""


def run(coroutine):
    return asyncio.run(coroutine)


@pytest.mark.parametrize(
    ("patch", "old", "new"),
    [
        (CHANGED, "src/a.py", "src/a.py"),
        (MADE, None, "tests/new.py"),
        (GONE, "old.py", None),
        (RENAMED, "a b.py", "c.py"),
        (BINARY, None, "my pic.png"),
        (QUOTED, "é.py", "é.py"),
    ],
)
def test_a_files_part_says_what_it_was_and_is(patch, old, new):
    (change,) = file_changes(patch)
    assert (change.old, change.new, change.text) == (old, new, patch)
    assert change.is_binary == (patch is BINARY)


def test_a_patch_is_cut_where_files_begin_also_without_gits_lines():
    whole = CHANGED + MADE + GONE + RENAMED + BINARY + QUOTED
    assert "".join(change.text for change in file_changes(whole)) == whole
    assert len(file_changes(whole)) == 6
    plain = "--- a/x.py\t2020\n+++ b/x.py\t2021\n@@ -1 +1 @@\n-a\r\n+b\x0c\n--- a/y\n+++ b/y\n"
    assert touched_files(plain) == ("x.py", "y")
    assert touched_files("no patch at all") == ()


def test_files_can_be_left_out():
    conftest = MADE.replace("tests/new.py", "tests/conftest.py")
    assert without_files(CHANGED + conftest + GONE, steers_the_runner) == CHANGED + GONE
    assert [
        p for p in ("a/b.pth", "setup.cfg", "setup.py", "a_conftest.py") if steers_the_runner(p)
    ] == [
        "a/b.pth",
        "setup.cfg",
    ]


def test_restoring_checks_out_what_was_there_and_removes_what_is_made():
    commands = restore_commands(CHANGED + MADE + GONE + RENAMED, "abc1234")
    assert commands == (
        ("rm", "-rf", "--", "tests/new.py", "c.py"),
        ("git", "checkout", "abc1234", "--", "src/a.py", "old.py", "a b.py"),
    )
    assert restore_commands("", "abc1234") == ()


def sandbox_that_takes(works):
    """A box in which only the command ``works`` applies a patch."""

    def apply(argv, files, stdin):
        good = tuple(argv[:-1]) == works
        return ExecResult(0 if good else 1, b"", b"" if good else b"does not apply\n")

    return FakeSandbox({"git": apply, "patch": apply})


@pytest.mark.parametrize("num_tried", [1, 2, 3])
def test_the_fallbacks_are_tried_in_their_order(num_tried):
    async def scenario():
        sandbox = sandbox_that_takes(APPLIERS[num_tried - 1])
        await sandbox.start()
        applied = await apply_patch(sandbox, CHANGED, repo_dir="/r", patch_path="/p")
        return sandbox, applied

    sandbox, applied = run(scenario())
    assert (applied.ok, applied.how) == (True, " ".join(APPLIERS[num_tried - 1]))
    assert sandbox.calls == [(*command, "/p") for command in APPLIERS[:num_tried]]
    assert sandbox.files["/p"] == CHANGED.encode()


def test_a_patch_that_nothing_takes_is_empty_or_leaves_the_tree():
    async def scenario(patch):
        sandbox = sandbox_that_takes(())
        await sandbox.start()
        return await apply_patch(sandbox, patch, repo_dir="/r", patch_path="/p"), sandbox.calls

    refused, calls = run(scenario(CHANGED))
    assert (refused.ok, len(calls), "does not apply" in refused.log) == (False, 3, True)
    assert run(scenario(" \n"))[0].how == "empty"
    for path in ("../x.py", "/etc/x", ".git/config"):
        refused, calls = run(scenario(f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n"))
        assert (refused.ok, calls) == (False, [])


def test_extraction_leaves_binary_files_out_and_says_when_git_fails():
    async def scenario(exit_code, truncated=False):
        def git(argv, files, stdin):
            out = (CHANGED + BINARY).encode() if "diff" in argv else b""
            return ExecResult(exit_code, out, b"bad object", truncated=truncated)

        sandbox = FakeSandbox({"git": git})
        await sandbox.start()
        return await extract_patch(sandbox, repo_dir="/r", base="abc1234", index_path="/i")

    assert run(scenario(0)) == CHANGED
    with pytest.raises(PatchError, match="bad object"):
        run(scenario(128))
    with pytest.raises(PatchError, match=r"larger than the \d+ bytes given back"):
        run(scenario(0, truncated=True))
