"""Stores and servers leave nothing behind: memory, descriptors, threads, references."""

import gc
import os
import sys
import tempfile
import threading
from contextlib import suppress
from functools import partial

from measure import check_steady

import devicemesh as dm

# malloc counts what its per-thread caches keep as given out: without them.
if "GLIBC_TUNABLES" not in os.environ:
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.tcache_count=0"
    os.execv(sys.executable, [sys.executable, "-W", "error", "-X", "faulthandler", *sys.argv])

FOLDER = tempfile.mkdtemp()
SERVER = dm.StoreServer()
TCP = dm.TCPStore("127.0.0.1", SERVER.port)
FILE = dm.FileStore(os.path.join(FOLDER, "kept"))
HASH = dm.HashStore()
PREFIX = dm.PrefixStore("p", TCP)


class Mine(dm.Store):
    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value

    def get(self, key):
        return self.values[key]

    def add(self, key, amount):
        self.values[key] = b"%d" % (int(self.values.get(key, b"0")) + amount)
        return int(self.values[key])

    def wait(self, keys, timeout):
        if not all(key in self.values for key in keys):
            raise TimeoutError("absent")


PYTHON = dm.PrefixStore("p", Mine())


def call_all(store):
    store.set("a", b"x" * 100)
    store.get("a")
    store.delete_key("n")
    store.add("n", 1)
    store.compare_set("a", "y", "z")
    store.check(["a", "n"])
    store.wait(("a", "n"))
    store.wait_unless(["a"], ["b"])
    store.append("t", "x")
    store.delete_key("t")
    store.multi_set(["a", "b"], [b"1", "2"])
    store.multi_get(["a", "b"])
    store.num_keys()
    store.list_keys()
    store.queue_push("q", "1")
    store.queue_pop("q")
    store.queue_len("q")
    store.barrier("b", 1)
    for key in store.list_keys():
        store.delete_key(key)
    store.set_timeout(60)
    repr(store), store.timeout, hash(store), store.clone(), store.has_extended_api()


def file_calls():
    """Its file grows with each change, so each round has one of its own."""
    path = os.path.join(FOLDER, "fresh")
    with dm.FileStore(path, 1) as store:
        call_all(store)


def python_calls():
    store = dm.PrefixStore("p", Mine())
    store.set("a", "1")
    store.get("a")
    store.add("n", 1)
    store.compare_set("c", "", "d")
    store.multi_get(["a", "n"])
    store.barrier("b", 1)
    for call in (partial(store.check, ["a"]), partial(store.queue_pop, "q"), store.num_keys):
        with suppress(NotImplementedError):
            call()
    assert store.underlying_store is not None
    store.close()


def wrong_calls(store):
    for call in (
        partial(store.set, "k"),
        partial(store.set, b"k", "v"),
        partial(store.set, "k", 1),
        partial(store.set, "k\0", "v"),
        partial(store.set, "k" * 9000, "v"),
        partial(store.add, "k", 1.5),
        partial(store.wait, "keys"),
        partial(store.wait, ["a", 1]),
        partial(store.wait, [], "soon"),
        partial(store.multi_set, ["a", "b"], [b"1"]),
        partial(store.multi_set, ["a", "b"], [b"1", 2]),
        partial(store.multi_get, ["a", None]),
        partial(store.barrier, "b", 0),
        partial(store.queue_pop, "q", False),
        partial(store.wait, ["never"], 0),
        partial(store.wait_unless, ["never"], 1),
    ):
        with suppress(TypeError, ValueError, dm.DeviceMeshError):
            call()
    store.set("text", "x")
    with suppress(ValueError):
        store.add("text", 1)
    store.delete_key("text")


def wrong_constructors():
    for make in (
        dm.Store,
        dm.TCPStore,
        partial(dm.TCPStore, "127.0.0.1", 0),
        partial(dm.TCPStore, "127.0.0.1", SERVER.port, timeout="x"),
        partial(dm.TCPStore, "", 1),
        partial(dm.TCPStore, "127.0.0.1", SERVER.port, is_master=True),
        partial(dm.StoreServer, "127.0.0.1", SERVER.port),
        partial(dm.StoreServer, listen_fd=0),
        partial(dm.FileStore, "/no/such/folder/x"),
        partial(dm.PrefixStore, "p" * 9000, HASH),
        partial(dm.PrefixStore, "p", {}),
    ):
        with suppress(TypeError, ValueError, OSError):
            make()


def objects():
    store = dm.HashStore()
    view = dm.PrefixStore("p", store)
    assert view.underlying_store is store
    del store
    view.underlying_store.set("a", "1")
    Mine().set("a", "1")


def clients():
    with dm.TCPStore("127.0.0.1", SERVER.port) as store:
        store.set("a", "1")
        store.will("w", "1")
        store.will("w", "2")
        store.barrier("b", 1)


def servers():
    with dm.StoreServer() as server, dm.TCPStore("127.0.0.1", server.port, 1, token="x") as store:
        store.set("a", "1")
        store.queue_push("q", "1")
        store.will("w", "1")
    with dm.TCPStore("127.0.0.1", 0, 1, True, token="secret") as store:
        store.set("a", "1")


def waiting_and_closed():
    """A thread waits on a further connection; closing ends it."""

    def wait(store):
        with suppress(dm.ClosedError):
            store.get("never")

    for store in (dm.TCPStore("127.0.0.1", SERVER.port), dm.HashStore()):
        thread = threading.Thread(target=wait, args=(store,))
        thread.start()
        store.set("a", "1")
        store.close()
        thread.join()
    gc.collect()


TYPES = (
    dm.Store,
    dm.TCPStore,
    dm.FileStore,
    dm.HashStore,
    dm.PrefixStore,
    dm.StoreServer,
    Mine,
)

for each in (TCP, HASH, PREFIX):
    check_steady(partial(call_all, each), *TYPES, rounds=50)
    check_steady(partial(wrong_calls, each), *TYPES, rounds=50)
check_steady(partial(wrong_calls, FILE), *TYPES, rounds=50)
for step in (file_calls, python_calls, wrong_constructors, objects, clients, servers):
    check_steady(step, *TYPES, rounds=50)
check_steady(waiting_and_closed, *TYPES, rounds=20)

for each in (TCP, FILE, PREFIX):
    each.close()
SERVER.close()
os.remove(os.path.join(FOLDER, "kept"))
os.rmdir(FOLDER)
