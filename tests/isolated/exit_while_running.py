"""The interpreter ends while operations run and wait: no hang, no crash, nothing to say."""

import sys
import threading
from pathlib import Path

import devicemesh
from devicemesh import HashStore, World

if not Path(devicemesh.__file__).with_name("_gloo.so").exists():
    print("built without gloo")
    sys.exit()

store = HashStore()
worlds = [World(store, rank, 2, 600) for rank in (0, 1)]
groups = [None, None]


def connect(rank):
    groups[rank] = worlds[rank].new_group([0, 1])
    groups[rank].barrier()


other = threading.Thread(target=connect, args=(1,))
other.start()
connect(0)
other.join()

running, queued = groups[0].barrier(async_op=True), groups[0].barrier(async_op=True)
worlds[0].new_group([0, 1]).all_reduce(bytearray(8), async_op=True)  # connects, dropped
assert not running.is_completed()
