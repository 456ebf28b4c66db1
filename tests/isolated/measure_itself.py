"""The measure notices what is lost: otherwise the other scripts would prove nothing."""

import os
import threading

from measure import check_steady


class Thing:
    pass


kept, target = [], Thing()
stop = threading.Event()


def lose_memory():
    kept.append(os.urandom(1))


def lose_a_reference():
    kept.append(target)


def lose_a_descriptor():
    kept.append(os.dup(2))


def lose_a_thread():
    threading.Thread(target=stop.wait, daemon=True).start()


for step in (lose_memory, lose_a_reference, lose_a_descriptor, lose_a_thread):
    try:
        check_steady(step, target, rounds=20, windows=2)
    except AssertionError:
        continue
    finally:
        kept.clear()
    raise SystemExit(f"{step.__name__} went unnoticed")
stop.set()

check_steady(Thing, target)
