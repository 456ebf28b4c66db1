"""Small things about child processes that the launcher and the test harness share."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def parent_guard() -> Callable[[], None]:
    """A function to call in a child right after the fork: it has the kernel kill the
    child when its parent is gone, however the parent went.

    Made before the fork, so that the child looks nothing up.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, ctypes.c_ulong]
    parent = os.getpid()

    def guard() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it went before prctl could see it go
            os._exit(1)

    return guard


def describe_exit(code: int) -> str:
    """ "exited with code 3", or "was killed by SIGKILL" for a negative code (subprocess's
    convention)."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


def signal_group(pid: int, signum: int) -> None:
    """Sends `signum` to a child that leads its process group, and to what it started.

    Only for a child that has not been waited for: until then its id is nobody else's.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)
