"""Runs the scripts of this folder, each in a fresh interpreter: what they measure (memory,
references, descriptors, threads) is theirs alone. A script passes by ending with exit code 0
and without output on stderr."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HELPERS = HERE.parent / "helpers"
ROOT = HERE.parents[1]
SCRIPTS = sorted(path for path in HERE.glob("*.py") if not path.name.startswith("test_"))
TIMEOUT_S = 120
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script(script):
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    environment["PYTHONPATH"] = os.pathsep.join([str(HELPERS), str(ROOT)])
    # Python's own allocator keeps blocks back: with malloc every byte is counted.
    environment["PYTHONMALLOC"] = "malloc"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "faulthandler", str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
