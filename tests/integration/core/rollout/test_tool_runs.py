from pathlib import Path

import pytest
from support.chat_templates import CHATML, TEXTS, write_tokenizer
from support.tool_templates import HERMES

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.errors import ConfigError
from rollart_core.models.new import train_tokenizer
from rollart_core.runtime.run_envs import RunEnvs
from rollart_testing import ScriptedEngine


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (CHATML, "does not show tools"),
        (HERMES.replace("<tool_call>", "<function=f>"), "in an unknown format"),
        (HERMES, None),
    ],
)
def test_a_model_that_cannot_call_tools_is_refused_before_the_first_episode(
    template, told, tmp_path, repo_root
):
    backend = train_tokenizer(TEXTS, 300)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    folder = write_tokenizer(tmp_path, backend.to_str(), template, "<|im_end|>")
    config = load_config(Path(repo_root) / "examples/stock.yaml", [])
    envs = RunEnvs(resolve_run(config, source="stock.yaml", import_classes=False))
    if told is None:
        envs.wire(None, ScriptedEngine(), str(folder))
        return
    with pytest.raises(ConfigError, match=f"toy/Stock-v1 has tools.*{told}"):
        envs.wire(None, ScriptedEngine(), str(folder))
