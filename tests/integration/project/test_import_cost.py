"""What a listing, a config, a tokenizer, ``--help`` and a manifest import, in a new process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rollart_core.cli import COMMANDS
from rollart_core.config.model import NewModel
from rollart_core.models.new import new_model

HEAVY = {
    *("torch", "transformers", "tokenizers", "safetensors", "jinja2", "tensorboardX", "trl"),
    *("ray", "docker", "matplotlib", "datasets", "spacy", "scipy", "aiohttp", "fastapi", "nicegui"),
    "tenacity",
}


def test_listing_and_every_config_model_import_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from rollart_core import registry\n"
        "from rollart_core.plugins.manager import KINDS, plugins\n"
        "for kind in KINDS:\n"
        "    for key, found in plugins().registered(kind).items():\n"
        "        if kind != 'commands': registry.config_model(kind, key)\n"
        "print(*{m.split('.')[0] for m in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())


def test_loading_a_config_imports_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("env: webshop\nmodel: {kind: new}\nstop: {batches: 2}\n")
    code = (
        "import sys; from rollart_core.config.load import load_config;"
        "import rollart_core.config.resolve;"
        f"load_config({str(path)!r}); heavy = {{'torch', 'transformers', 'ray', 'docker'}};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_loading_a_folder_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    small = NewModel(num_layers=1, width=16, num_heads=2, head_dim=8, ffn_width=32, vocab_size=320)
    new_model(tmp_path / "m", small, ["click[red]", "search[red shirt]"], 0)
    code = (
        "import sys; from rollart_core.models.tokenizer import load_tokenizer; "
        "load_tokenizer(sys.argv[1]).encode('a'); "
        "sys.exit(str({'torch', 'transformers'} & set(sys.modules)).replace('set()', '') or 0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], check=True)


def test_help_imports_nothing_heavy_and_no_plugin() -> None:
    code = (
        "import sys; sys.argv = ['rollart', '--help']\n"
        "from rollart_core.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    heavy = {"torch", "transformers", "pydantic", "numpy", "gymnasium", "pyarrow", "rich", "yaml"}
    assert not heavy & loaded
    assert not {m for m in loaded if m.startswith("rollart_") and m.split(".")[0] != "rollart_core"}
    assert "rollart_core.cli" in loaded
    assert all(name in done.stdout for name in COMMANDS)


def test_reading_a_manifest_imports_neither_pydantic_nor_torch() -> None:
    code = (
        "import sys, rollart_core.plugins.manifest; print({'pydantic', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
