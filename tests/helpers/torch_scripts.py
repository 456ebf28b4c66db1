"""Runs the scripts of examples/torch_scripts."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "examples/torch_scripts").glob("*.py"))


def run_script(name, ranks, *arguments):
    """What rank 0 printed, as the JSON it is."""
    script = ROOT / "examples/torch_scripts" / f"{name}.py"
    process = subprocess.run(
        [sys.executable, "-m", "devicemesh", "run", "-n", str(ranks), str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    lines = [line for line in process.stdout.splitlines() if "{" in line]
    return json.loads(lines[-1][lines[-1].index("{") :])
