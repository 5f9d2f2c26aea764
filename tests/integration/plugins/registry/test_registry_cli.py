"""``rollart registry`` as people type it: the road of docs/guides/registry.md, and the pages."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.registry_wheels import Scene, make_scene, make_wheel, passing

from rollart_core.cli import main
from rollart_core.cli.output import print_columns
from rollart_core.errors import RegistryError
from rollart_registry import cli, options, trust
from rollart_registry.client import opened
from rollart_registry.interpreter import TargetInterpreter
from rollart_registry.operator import build_site

ROOT = Path(__file__).resolve().parents[4]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in a folder of its own, and returns exit code, stdout, stderr."""
    monkeypatch.setenv("ROLLART_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("ROLLART_REGISTRY", raising=False)
    monkeypatch.delenv("ROLLART_KEY_PASSPHRASE", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "run_check", passing)

    def call(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return call


@pytest.fixture
def scene(tmp_path: Path, run: Run) -> Scene:
    """A registry with acme-maze 1.0.0, in the folder the commands run in."""
    scene = make_scene(tmp_path)
    scene.publish(make_wheel(tmp_path / "dist"))
    scene.accept()
    return scene


def commands() -> list[str]:
    """Return what docs/guides/registry.md tells a person to type, in order."""
    text = (ROOT / "docs/guides/registry.md").read_text("utf-8")
    blocks = re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


def test_the_road_in_the_documentation(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into an environment of its own that sees RollArt, as if that were the user's."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    parents = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in parents]
    (site / "parent.pth").write_text("\n".join(lines))
    at = TargetInterpreter.at
    python = tmp_path / "venv/bin/python"
    monkeypatch.setattr(
        TargetInterpreter, "at", staticmethod(lambda given=None: at(given or python))
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    lines = commands()
    assert len(lines) > 12
    for line in lines:
        code, out, err = run(line)
        assert code == 0, f"{line}\n{out}\n{err}"
    assert (site / "acme_maze/rollart.yaml").is_file()
    lock = json.loads((tmp_path / "rollart.lock").read_text())
    assert [p["name"] for p in lock["packages"]] == ["acme-maze"]
    assert "rollart" in {p["name"] for p in lock["present"]}
    assert (tmp_path / "site/acme-maze.html").is_file()
    assert not (tmp_path / "acme-maze/build").exists()


def test_the_real_check_is_what_publish_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollart_testing import check

    class Said:
        def to_json(self) -> dict[str, object]:
            return {"passed": True}

    asked: list[str] = []
    monkeypatch.setattr(check, "check", lambda wheel: asked.append(wheel) or Said())
    assert options.run_check("x.whl") == {"passed": True}
    assert asked == ["x.whl"]


def test_a_new_registry_is_asked_about_and_then_remembered(scene: Scene, run: Run) -> None:
    where = f"--registry {scene.tree.path}"
    fingerprint = trust.fingerprint(trust.offered_root(scene.tree.path.as_uri()))
    code, _, err = run("rollart registry search --registry nowhere")
    assert (code, "half written, or not a registry" in err) == (1, True)
    assert run(f"rollart registry search {where} --fingerprint {fingerprint}")[0] == 0
    assert "acme/Maze-v1" in run(f"rollart registry search maze {where}")[1]
    code, _, err = run(f"rollart registry search {where} --fingerprint {'0' * 64}")
    assert (code, "it is not trusted" in err) == (1, True)


def test_nobody_to_ask(run: Run) -> None:
    assert run("rollart registry init ours")[0] == 0
    code, _, err = run("rollart registry search --registry ours")
    assert code == 1
    (fingerprint,) = set(re.findall(r"[0-9a-f]{64}", err))
    assert f"give --fingerprint {fingerprint}" in err
    assert trust.all_trusted() == []
    code, _, err = run("rollart registry search")
    assert "no registry given" in err
    assert run(f"rollart registry search --registry ours --fingerprint {fingerprint}")[0] == 0
    assert run("rollart registry search")[:2] == (0, "The registry is empty.\n")


def test_json_of_what_scripts_read(scene: Scene, run: Run) -> None:
    code, out, _ = run("rollart registry search --json")
    assert code == 0
    (release,) = json.loads(out)["releases"]
    assert (release["owner"], release["version"]) == ("acme", "1.0.0")
    shown = json.loads(run("rollart registry info acme/Maze-v1 --json")[1])
    assert [v["version"] for v in shown["versions"]] == ["1.0.0"]
    assert shown["check"]["passed"] is True
    verified = json.loads(run(f"rollart registry verify {scene.tree.path} --json")[1])
    assert verified == {"ok": True, "differences": []}
    make_wheel(scene.folder / "dist", version="1.1.0")
    wheel = next((scene.folder / "dist").glob("*1.1.0*"))
    published = json.loads(run(f"rollart registry publish {wheel} --key acme.key --json")[1])
    assert published["release"]["version"] == "1.1.0"
    accepted = json.loads(run("rollart registry accept registry --json")[1])
    assert accepted == {"accepted": {"acme": ["acme-maze 1.1.0"]}, "refused": {}}


def test_what_is_refused_fails_the_command(scene: Scene, run: Run) -> None:
    folder = scene.tree.submissions / "acme"
    folder.mkdir()
    (folder / "acme.json").write_text("{}")
    code, _, err = run("rollart registry accept registry")
    assert code == 1
    said = (
        "Refused from acme: acme.json is not TUF metadata: Failed to deserialize JSON; it stays in "
    )
    assert err.startswith(f"{said}registry/submissions/acme/acme.json: ")
    wheel = next(scene.tree.targets.rglob("*.whl"))
    wheel.write_bytes(b"x")
    code, out, _ = run("rollart registry verify registry")
    assert code == 1
    assert out.startswith("Differs: ")


MISTAKES = {
    "info Maze": "is not an id",
    "install acme/Maze-v1@soon": "is not a version",
    "info acme/Maze-v2": "has no 'acme/Maze-v2'",
    "search --registry gopher://x": "give a folder or an http(s) URL",
    "publish nothing --key acme.key": "neither a wheel nor a folder",
    "publish dist --key acme.key.pub": "chmod 600",
    "yank acme/Maze-v1 --reason x --key acme.key": "name the version",
    "yank acme/Maze-v1@1.0.0 --key acme.key": "a yank needs a reason",
    "add-owner registry acme --key acme.key.pub": "taken",
    "add-owner registry webshop --key acme.key.pub": "the name is reserved",
    "add-owner registry toy --key acme.key.pub": "the name is reserved",
    "add-owner registry new --key acme.key": "is a private key",
    "accept nowhere": "is not a registry",
    "add-owner nowhere new --key acme.key.pub": "is not a registry",
    "accept registry --submissions registry": "is the registry itself",
    "accept registry --submissions nowhere": "nowhere is not a folder",
    "search --registry http://[::1": "is not a registry (Invalid IPv6 URL)",
    "search --registry ~nosuchuser/x": "is not a registry (Could not determine home directory",
    "install acme/Maze-v1 --json": "add --yes",
    "refresh nowhere": "nowhere is not a registry",
    "sync --lock acme.key": "is not a lock file: Invalid JSON",
    "refresh registry --role everything": "is not a role",
    "init registry": "exists and is not empty",
    "sync": "cannot read rollart.lock",
    "sync --yes": "cannot read rollart.lock",
    "keygen acme.key": "never overwritten",
    "build-site --out dist": "something else than a site",
}


@pytest.mark.parametrize(("line", "said"), MISTAKES.items())
def test_a_mistake_is_told_in_one_line(scene: Scene, run: Run, line: str, said: str) -> None:
    code, out, err = run(f"rollart registry {line}")
    assert code == 1
    assert said in err
    assert err.count("\n") == 1
    assert out == ""
    assert not Path("nowhere").exists()


def test_what_an_owner_signed_moves_no_cursor(scene: Scene, run: Run) -> None:
    package = {"plugin_id": "acme/Trap-v1", "files": {"acme_trap/rollart.yaml": TRAP}}
    scene.publish(make_wheel(scene.folder / "dist", "acme-trap", **package))  # type: ignore[arg-type]
    accepted = run("rollart registry accept registry")
    shown = run("rollart registry info acme/Trap-v1")
    found = run("rollart registry search")
    yanked = run("rollart registry yank acme/Trap-v1@1.0.0 --key acme.key --reason '\x1b[1A\x9b1A'")
    refused = run("rollart registry accept registry")
    none_left = run("rollart registry install acme/Trap-v1 --yes")
    for code, out, err in (accepted, shown, found, yanked, refused, none_left):
        assert not set(out + err) & {"\x1b", "\x9b", "\x07"}, (code, out, err)
    assert "\N{REPLACEMENT CHARACTER}[1A" in shown[1]
    assert "\N{REPLACEMENT CHARACTER}[1A" in none_left[2]


def test_a_long_list_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    print_columns("a\x1b[2J", ("id", "what"), [("b\x07", "c\x9b1A")])
    assert not set(capsys.readouterr().out) & {"\x1b", "\x9b", "\x07"}


TRAP = """\
contract_version: 2
licence: "Apache-2.0\\e[8m"
environments:
  - id: acme/Trap-v1
    entry_point: acme_trap.env:Maze
    summary: "Find the way.\\e[1A\\x9b1A\\a"
"""


@pytest.mark.parametrize("days", ["-1", "0", "nan", "inf", "1e9"])
@pytest.mark.parametrize(
    "line",
    [
        "init new --root-days",
        "init new --targets-days",
        "init new --snapshot-days",
        "init new --timestamp-days",
        "refresh registry --timestamp-days",
        "refresh registry --snapshot-days",
        "publish dist --key acme.key --days",
        "renew --key acme.key --days",
    ],
)
def test_what_is_signed_holds_for_some_days(run: Run, line: str, days: str) -> None:
    code, _, err = run(f"rollart registry {line} {days}")
    assert code == 2
    assert "days: must be above 0 and at most 36500" in err
    assert not Path("new").exists()


class Pages(HTMLParser):
    """Notes what a page would load, and every tag in it."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links |= {value or "" for name, value in attrs if name in {"href", "src"}}


def test_pages_escape_what_owners_write_and_load_nothing(scene: Scene, tmp_path: Path) -> None:
    with opened(scene.trusted()) as client:
        pages = build_site(client, tmp_path / "site", "<i>Ours</i>")
        again = build_site(client, tmp_path / "site", "Ours")
        with pytest.raises(RegistryError, match="something else"):
            build_site(client, tmp_path / "dist", "Ours")
    assert [p.name for p in pages] == ["index.html", "acme-maze.html"]
    assert pages == again
    for page in pages:
        parsed = Pages()
        parsed.feed(page.read_text("utf-8"))
        assert not parsed.tags & {"out", "i", "img", "link", "iframe"}
        assert parsed.links <= {"index.html", "acme-maze.html"}
    assert "Find the way &lt;out&gt;." in pages[1].read_text("utf-8")


WITHOUT_EXTRA = """
import contextlib, io, json, shlex, sys
sys.modules.update(dict.fromkeys(("tuf", "securesystemslib", "cryptography")))  # not installed
from rollart_core.cli import main

def said(line):
    sys.argv = ["rollart", "registry", *shlex.split(line)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as e:
            return e.code, out.getvalue(), err.getvalue()

print(json.dumps([said(line) for line in sys.argv[1:]]))
"""
LINES = (
    *("init r", "add-owner r acme --key k", "accept r", "refresh r", "build-site --out site"),
    *("keygen k", "publish maze --registry r --key k", "renew --registry r --key k"),
    "yank acme/Maze-v1@1.0.0 --registry r --key k --reason no",
    *("search maze", "info acme/Maze-v1", "install acme/Maze-v1", "sync", "verify"),
)


def test_without_the_extra_each_command_says_in_one_line_what_to_install(tmp_path: Path) -> None:
    known = {
        one.name or (one.callback and one.callback.__name__.replace("_", "-"))
        for one in cli.app.registered_commands
    }
    assert {line.split()[0] for line in LINES} == known
    argv = [sys.executable, "-c", WITHOUT_EXTRA, *LINES, "--help", "install --help"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    *refused, whole_help, one_help = json.loads(done.stdout)
    for line, (code, out, err) in zip(LINES, refused, strict=True):
        assert (code, out) == (1, ""), line
        hint = r"Error: rollart registry needs \w+: pip install 'rollart\[registry\]'\n"
        assert re.fullmatch(hint, err), line
    assert whole_help[0] == one_help[0] == 0
    assert not list(tmp_path.iterdir())
