"""The examples, run as people run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LAUNCHER = [sys.executable, "-m", "devicemesh", "run", "-n", "8", "--timeout", "100"]


def run(*command):
    # Where devicemesh is not installed it is found in the tree.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_hello_mesh():
    lines = sorted(run(*LAUNCHER, str(EXAMPLES / "hello_mesh.py")).splitlines())
    assert lines == [
        f"[{rank}] rank {rank} at ({rank // 4}, {rank % 4}): row {row}, mean of rows 14"
        for rank, row in enumerate([6] * 4 + [22] * 4)
    ]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_mesh_2x4_equals_training_in_one_process(transport, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setenv("DEVICEMESH_TRANSPORT", transport)
    out = run(*LAUNCHER, str(EXAMPLES / "mesh_2x4.py"))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] / 10
    assert float(re.search(r"test accuracy ([\d.]+)%", out)[1]) > 90
    assert re.search(r"one process: \S+ \(equal to float tolerance\)", out)


def test_pipeline_equals_training_in_one_process():
    launcher = [sys.executable, "-m", "devicemesh", "run", "-n", "4", "--timeout", "100"]
    out = run(*launcher, str(EXAMPLES / "pipeline.py"))
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", out).groups())
    assert last < first
    assert re.search(r"one process: \S+ \(equal to float tolerance\)", out)
