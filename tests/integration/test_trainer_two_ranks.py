"""FSDP2 over two gloo ranks gives what one rank gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_models import make_groups, make_trainer, save_model

RANK = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from small_models import make_groups, make_trainer
from rollart_algorithms.grpo import GRPO
from rollart_plugins.weights.shared_memory import SharedMemoryChannel

model, folder = sys.argv[2:]
dist.init_process_group("gloo")
channel = SharedMemoryChannel(folder + "/w")
trainer = make_trainer(model, GRPO(kl_coef=0.1), updates_per_batch=2, channel=channel)
reports = [r.metrics for n in range(2) for r in trainer.train_batch(make_groups(3, seed=n), n)]
reports.append(trainer.supervise([s for g in make_groups(1) for s in g.samples], 1e-3))
trainer.publish(2)
trainer.save(folder + "/c", policy_version=2)
trainer.export_hf(folder + "/hf")
if dist.get_rank() == 0:
    json.dump(reports, open(folder + "/reports.json", "w"))
    sent = {n: float(t.float().norm()) for n, t in channel.fetch(2)}
    json.dump(sent, open(folder + "/sent.json", "w"))
dist.barrier()
channel.close()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    from rollart_algorithms.grpo import GRPO

    model = save_model(tmp_path / "model")
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [*command, str(script), here, model, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    trainer = make_trainer(model, GRPO(kl_coef=0.1), updates_per_batch=2)
    want = [r.metrics for n in range(2) for r in trainer.train_batch(make_groups(3, seed=n), n)]
    want.append(trainer.supervise([s for g in make_groups(1) for s in g.samples], 1e-3))
    got = json.loads((tmp_path / "reports.json").read_text())
    for a, b in zip(got, want, strict=True):
        for name in {"loss", "grad_norm", "entropy", "logprob_diff_max", "ref_kl"} & set(b):
            assert a[name] == pytest.approx(b[name], rel=2e-3, abs=2e-5), name
    sent = json.loads((tmp_path / "sent.json").read_text())
    norms = {n: float(p.detach().norm()) for n, p in trainer._model.named_parameters()}
    assert list(sent) == list(norms)
    np.testing.assert_allclose([sent[n] for n in norms], list(norms.values()), rtol=1e-3)
    assert make_trainer(model, GRPO(kl_coef=0.1)).load(str(tmp_path / "c")) == (2, 4)
    make_trainer(str(tmp_path / "hf"))
