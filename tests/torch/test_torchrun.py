"""The demo under torch's launcher: the same script, unchanged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

DEMO = Path(__file__).parents[2] / "examples" / "mesh_2x4.py"


def test_demo_under_torchrun():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=8"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    process = subprocess.run(
        [*torchrun, str(DEMO)],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "(equal to float tolerance)" in process.stdout
