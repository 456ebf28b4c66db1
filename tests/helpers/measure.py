"""What this process holds: for the scripts in tests/isolated."""

import ctypes
import gc
import os
import sys
import time


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_mallinfo2 = ctypes.CDLL(None).mallinfo2
_mallinfo2.restype = _Mallinfo2


def heap_bytes():
    """Bytes that malloc has given out: blocks in use, large ones included."""
    gc.collect()
    info = _mallinfo2()
    return info.uordblks + info.hblkhd


def descriptors():
    """Open file descriptors, without the one that counts them."""
    return len(os.listdir("/proc/self/fd")) - 1


def threads():
    return len(os.listdir("/proc/self/task"))


def _settle(number):
    """Waits a moment for threads beyond `number`: those that nobody joins take their stacks
    and caches along only when they are gone."""
    deadline = time.monotonic() + 1
    while threads() > number and time.monotonic() < deadline:
        os.sched_yield()


def check_steady(step, *objects, rounds=200, windows=40):
    """`step()` again and again leaves no memory, descriptors, threads or references to
    `objects` (types, arrays) behind.

    Caches of the interpreter and of numpy fill up in the first windows of `rounds` steps;
    what is lost in each step grows in every one of them. The smallest thing that malloc
    gives out, lost once in a step, counts.
    """
    name = getattr(step, "__name__", repr(step))
    growth = []
    for _ in range(windows):
        references = _references(objects)
        before = heap_bytes(), descriptors(), threads()
        for _ in range(rounds):
            step()
        _settle(before[2])
        after = heap_bytes(), descriptors(), threads()
        lost = [new - old for new, old in zip(_references(objects), references, strict=True)]
        growth.append(after[0] - before[0])
        steady = growth[-1] < 16 * rounds and all(abs(n) < rounds // 2 for n in lost)
        if steady and after[1:] == before[1:]:
            return
    assert min(growth) < 16 * rounds, f"{name}: bytes lost in {rounds} rounds: {growth}"
    assert after[1:] == before[1:], f"{name}: descriptors, threads {before[1:]} -> {after[1:]}"
    raise AssertionError(f"{name}: references to {objects}: {lost}")


def _references(objects):
    gc.collect()
    return [sys.getrefcount(each) for each in objects]
