import builtins
import math

import pytest

from rollart_plugins.trackers.tensorboard import TensorBoardTracker


def events(run_dir):
    return [path.read_bytes() for path in (run_dir / "tensorboard").glob("events.*")]


def test_scalars_and_config_reach_the_event_file(tmp_path):
    pytest.importorskip("tensorboardX")
    tracker = TensorBoardTracker()
    tracker.start(tmp_path, {"name": "a-run-name"})
    tracker.log({"train/loss": 0.5, "train/odd": math.nan}, train_step=1, policy_version=0)
    tracker.close()
    tracker.close()
    (content,) = events(tmp_path)
    assert b"train/loss" in content
    assert b"a-run-name" in content
    assert b"train/odd" not in content


def test_log_wants_start(tmp_path):
    with pytest.raises(RuntimeError, match="start"):
        TensorBoardTracker().log({}, train_step=0, policy_version=0)


def test_a_missing_tensorboardx_says_how_to_install_it(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "tensorboardX":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'rollart\[train\]'"):
        TensorBoardTracker().start(tmp_path, {})
