"""What tests need to know about processes."""

import time
from pathlib import Path


def is_gone(pid):
    """Whether the process has ended (whoever it was left to may not have waited for it)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def wait_until(condition, what, timeout=30.0):
    """Returns when condition() is true; fails the test, naming `what`, after `timeout` s."""
    limit = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < limit, f"{what}: not within {timeout} s"
        time.sleep(0.01)
