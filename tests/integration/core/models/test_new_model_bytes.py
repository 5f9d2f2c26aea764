import hashlib
import json
import subprocess
import sys

from rollart_core.config.model import NewModel
from rollart_core.models.new import new_model

PAGE = """Instruction: find a light blue shirt, size 12, for less than $40.99 [SEP] Back
[light blue]
[navy-blue][12 oz] [b07x1]"""
TEXTS = [PAGE] * 20 + ["click[light blue]", "search[blue shirt]", "é漢"]
SMALL = NewModel(num_layers=1, width=16, num_heads=2, head_dim=8, ffn_width=32, vocab_size=320)


def test_the_same_input_gives_the_same_bytes_in_another_process(tmp_path):
    code = (
        "import json, sys; from rollart_core.config.model import NewModel; "
        "from rollart_core.models.new import new_model; path, spec, texts = sys.argv[1:]; "
        "new_model(path, NewModel.model_validate_json(spec), json.loads(texts), 7)"
    )
    args = [str(tmp_path / "a"), SMALL.model_dump_json(), json.dumps(TEXTS)]
    subprocess.run([sys.executable, "-c", code, *args], check=True)
    new_model(tmp_path / "b", SMALL, TEXTS, 7)
    new_model(tmp_path / "c", SMALL, TEXTS, 8)
    a, b, c = (_digests(tmp_path / name) for name in "abc")
    assert a == b
    assert {name for name in b if b[name] != c[name]} == {"model.safetensors"}


def _digests(folder):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}
