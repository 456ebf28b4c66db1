"""Stores: arguments, every method on every kind, waiting, threads, ends."""

import copy
import inspect
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager
from datetime import timedelta

import pytest
from processes import wait_until

import devicemesh as dm

TIMEOUT = 20.0
SOON = 0.02
KINDS = ("tcp", "file", "hash", "prefix", "python", "minimal")
FULL = ("tcp", "file", "hash", "prefix", "python")


class PythonStore:
    """Torch's Store methods over a HashStore, as somebody else's class would have them."""

    def __init__(self):
        self.inner = dm.HashStore()


def _forward(name):
    return lambda self, *args: getattr(self.inner, name)(*args)


for _name in (
    *("set", "get", "add", "wait", "check", "compare_set", "delete_key", "append"),
    *("multi_get", "multi_set", "num_keys", "list_keys"),
    *("queue_push", "queue_pop", "queue_len"),
):
    setattr(PythonStore, _name, _forward(_name))


class MinimalStore(dm.Store):
    """What the documentation asks of a class made in Python, and no more."""

    def __init__(self):
        self.values = {}
        self.changed = threading.Condition()

    def set(self, key, value):
        with self.changed:
            self.values[key] = bytes(value)
            self.changed.notify_all()

    def get(self, key):
        return self.values[key]

    def add(self, key, amount):
        with self.changed:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            self.changed.notify_all()
            return total

    def wait(self, keys, timeout):
        with self.changed:
            if not self.changed.wait_for(
                lambda: all(key in self.values for key in keys), timeout.total_seconds()
            ):
                raise RuntimeError("not in time")


@contextmanager
def make_store(kind, folder):
    if kind == "tcp":
        with dm.StoreServer() as server, dm.TCPStore("127.0.0.1", server.port) as store:
            yield store
    elif kind == "file":
        with dm.FileStore(folder / "store") as store:
            yield store
    elif kind == "hash":
        yield dm.HashStore()
    elif kind == "prefix":
        yield dm.PrefixStore("a/b", dm.HashStore())
    elif kind == "python":
        yield dm.PrefixStore("p", PythonStore())
    else:
        yield dm.PrefixStore("m", MinimalStore())


@pytest.fixture
def store(request, tmp_path):
    with make_store(request.param, tmp_path) as made:
        made.set_timeout(TIMEOUT)
        yield made


def on(*kinds):
    return pytest.mark.parametrize("store", kinds, indirect=True)


def run(*functions):
    """Runs each in a thread; raises what the first one raised."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# --- bad arguments --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: dm.Store(), TypeError, "cannot be made"),
        (lambda: dm.HashStore(1), TypeError, "HashStore"),
        (lambda: dm.TCPStore(), TypeError, "host_name"),
        (lambda: dm.TCPStore(b"localhost", 1), TypeError, "host_name must be a str"),
        (lambda: dm.TCPStore("a\0b", 1), ValueError, "host_name must not contain a NUL"),
        (lambda: dm.TCPStore("", 1), ValueError, "host '' is empty"),
        (lambda: dm.TCPStore("x" * 300, 1), ValueError, "too long"),
        (lambda: dm.TCPStore("localhost", 0), ValueError, r"port must be in 1..65535, got 0"),
        (lambda: dm.TCPStore("localhost", 65536), ValueError, "port must be in .* got 65536"),
        (lambda: dm.TCPStore("localhost", "1"), TypeError, "port must be an int, got '1'"),
        (lambda: dm.TCPStore("localhost", 1, 0), ValueError, "world_size must be in .* got 0"),
        (lambda: dm.TCPStore("localhost", 1, timeout=-1), ValueError, "timeout must be 0 or"),
        (lambda: dm.TCPStore("localhost", 1, timeout="1"), TypeError, "timeout must be seconds"),
        (lambda: dm.TCPStore("localhost", 1, token=1), TypeError, "token must be a str"),
        (
            lambda: dm.TCPStore("localhost", 1, is_master=True, master_listen_fd=-1),
            ValueError,
            "master_listen_fd must be in",
        ),
        (lambda: dm.StoreServer(port=-1), ValueError, "port must be in 0..65535, got -1"),
        (lambda: dm.StoreServer(1), TypeError, "host must be a str"),
        (lambda: dm.StoreServer("192.0.2.1"), OSError, "192.0.2.1"),
        (lambda: dm.StoreServer(token="x" * 5000), ValueError, "token"),
        (lambda: dm.FileStore(), TypeError, "file_name"),
        (lambda: dm.FileStore(3), TypeError, "int"),
        (lambda: dm.FileStore("/no/such/folder/x"), FileNotFoundError, "/no/such/folder/x"),
        (lambda: dm.FileStore("x", "2"), TypeError, "world_size must be an int, got '2'"),
        (lambda: dm.PrefixStore("p"), TypeError, "store"),
        (lambda: dm.PrefixStore(1, dm.HashStore()), TypeError, "prefix must be a str"),
        (lambda: dm.PrefixStore("p" * 9000, dm.HashStore()), ValueError, "9000 bytes"),
        (lambda: dm.PrefixStore("p", {}), TypeError, "store must be a Store .* has no set"),
        (lambda: dm.PrefixStore("p", None), TypeError, "store must be a Store .* got None"),
    ],
)
def test_bad_constructor_arguments(make, error, text):
    with pytest.raises(error, match=text):
        make()


@on("tcp", "hash", "python")
@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda s: s.set("k"), TypeError, r"set\(\) is missing the argument 'value'"),
        (lambda s: s.set("k", "v", 1), TypeError, "takes exactly 2 positional"),
        (lambda s: s.set("k", "v", key="k"), TypeError, "multiple values for argument 'key'"),
        (lambda s: s.set("k", vale="v"), TypeError, "unexpected keyword argument 'vale'"),
        (lambda s: s.set(b"k", "v"), TypeError, "key must be a str, got b'k'"),
        (lambda s: s.set("k", 1), TypeError, "value must be str or bytes, got 1"),
        (lambda s: s.set("k", None), TypeError, "value must be str or bytes, got None"),
        (lambda s: s.set("k\0", "v"), ValueError, "key must not contain a NUL"),
        (lambda s: s.set("k" * 8192, "v"), ValueError, "has 8192 bytes, at most 8191"),
        (lambda s: s.set("k", b"v" * (8 * 2**20 + 1)), ValueError, "has 8388609 bytes"),
        (lambda s: s.add("k", 1.5), TypeError, "amount must be an int, got 1.5"),
        (lambda s: s.add("k", 2**63), ValueError, "amount must be in"),
        (lambda s: s.check("keys"), TypeError, "keys must be a sequence of str, got 'keys'"),
        (lambda s: s.wait(["a", 1]), TypeError, "keys must be a str, got 1"),
        (lambda s: s.wait(3), TypeError, "keys must be a sequence of str, got 3"),
        (lambda s: s.wait([], "soon"), TypeError, "timeout must be seconds"),
        (lambda s: s.wait([], -1), ValueError, "timeout must be 0 or more seconds, got -1"),
        (lambda s: s.multi_set(["a", "b"], ["1"]), ValueError, "same length, got 2 and 1"),
        (lambda s: s.multi_set(["a"], "1"), TypeError, "values must be a sequence"),
        (lambda s: s.multi_set(["a"], [1]), TypeError, "values must be str or bytes, got 1"),
        (lambda s: s.barrier("b", 0), ValueError, "world_size must be in 1.* got 0"),
        (lambda s: s.set_timeout(float("nan")), ValueError, "timeout must be 0 or more"),
    ],
)
def test_bad_method_arguments(store, call, error, text):
    with pytest.raises(error, match=text):
        call(store)


# --- every method on every kind ---------------------------------------------------------


@on(*KINDS)
def test_set_and_get(store):
    assert store.set("a", "1") is None
    assert store.get("a") == b"1"
    store.set(key="a", value=b"\x00\xff")
    assert store.get(key="a") == b"\x00\xff"
    store.set("a", bytearray(b"xyz"))
    assert store.get("a") == b"xyz"
    store.set("a", memoryview(b"uvw")[1:])
    assert store.get("a") == b"vw"
    store.set("a", "")
    assert store.get("a") == b""
    store.set("käse/日本", "ü")
    assert store.get("käse/日本") == "ü".encode()
    store.set("", "the empty key")
    assert store.get("") == b"the empty key"
    big = os.urandom(1 << 20)
    store.set("big", big)
    assert store.get("big") == big


@on(*KINDS)
def test_add(store):
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.add(key="n", amount=True) == -1
    assert store.get("n") == b"-1"


@on("tcp", "file", "hash", "prefix", "python")
def test_add_to_what_is_no_number(store):
    store.set("a", "x")
    with pytest.raises(ValueError, match="cannot add to 'x', which is no whole number") as error:
        store.add("a", 1)
    assert "a'" in str(error.value)
    store.add("n", 2**63 - 1)
    with pytest.raises(ValueError, match="does not fit into 64 bits"):
        store.add("n", 1)
    assert store.add("n", -1) == 2**63 - 2


@on(*FULL)
def test_compare_set(store):
    assert store.compare_set("c", "other", "new") == b"other"  # absent and stays so: torch's
    assert not store.check(["c"])
    assert store.compare_set("c", "", "new") == b"new"
    assert store.compare_set("c", "", "newer") == b"new"
    assert store.compare_set("c", "other", "newer") == b"new"
    assert store.compare_set(key="c", expected_value="new", desired_value=b"\0") == b"\0"
    assert store.get("c") == b"\0"


@on("minimal")
def test_compare_set_where_there_is_none(store):
    """Setting what is absent works with add alone, which is what meshes need."""
    assert store.compare_set("c", "", "mine") == b"mine"
    assert store.compare_set("c", "", "yours") == b"mine"
    with pytest.raises(NotImplementedError, match="MinimalStore has no compare_set"):
        store.compare_set("c", "mine", "yours")


@on(*FULL)
def test_check_and_delete(store):
    assert store.check([])
    assert not store.check(["a"])
    store.set("a", "1")
    assert store.check(["a"])
    assert store.check(("a", "a"))
    assert not store.check(iter(["a", "b"]))
    assert store.delete_key("a") is True
    assert store.delete_key("a") is False
    assert not store.check(["a"])


@on(*FULL)
def test_append(store):
    store.append("p", "po")
    store.append("p", b"tato")
    assert store.get("p") == b"potato"


@on(*KINDS)
def test_several_keys(store):
    store.multi_set(["a", "b", "a"], ["1", b"2", "3"])
    assert store.multi_get(["b", "a", "b"]) == [b"2", b"3", b"2"]
    assert store.multi_get([]) == []
    store.multi_set([], [])
    assert store.wait(["a", "b"]) is None
    store.wait([])


@on(*FULL)
def test_number_and_list_of_keys(store):
    before = store.num_keys()
    assert store.list_keys() == []
    store.set("a", "1")
    store.add("n", 1)
    store.queue_push("q", "1")
    assert store.num_keys() == before + 2
    assert sorted(store.list_keys()) == ["a", "n"]


@on(*FULL)
def test_queues(store):
    with pytest.raises(dm.QueueEmptyError, match="empty"):
        store.queue_pop("q", block=False)
    store.queue_push("q", "1")
    store.queue_push("q", b"2")
    assert store.queue_len("q") == 2
    assert store.check(["q"])
    assert store.queue_pop("q") == b"1"
    assert store.queue_pop("q", False) == b"2"
    assert store.queue_len("q") == 0
    assert not store.check(["q"])
    store.set_timeout(SOON)
    with pytest.raises(dm.GroupTimeoutError, match="q'"):
        store.queue_pop("q")


@on(*FULL)
def test_many_keys(store):
    keys = [f"key/{i}" for i in range(1000)]
    store.multi_set(keys, keys)
    assert store.multi_get(keys) == [key.encode() for key in keys]
    with pytest.raises(dm.GroupTimeoutError, match=r"missing|waiting for '[^,]*absent'$"):
        store.wait([*keys, "absent"], SOON)


def test_what_a_minimal_store_lacks():
    store = dm.PrefixStore("m", MinimalStore())
    for call in (
        lambda: store.check(["a"]),
        lambda: store.append("a", "b"),
        lambda: store.delete_key("a"),
        store.num_keys,
        store.list_keys,
        lambda: store.queue_push("q", "1"),
        lambda: store.queue_pop("q"),
        lambda: store.queue_len("q"),
    ):
        with pytest.raises(NotImplementedError, match="python store has no"):
            call()
    bare = MinimalStore()
    with pytest.raises(NotImplementedError, match="has to implement this method"):
        bare.check(["a"])


# --- objects as stores --------------------------------------------------------------------


def test_errors_of_an_object():
    """As stores raise them they become ours; any other comes through as it is."""

    class Failing(MinimalStore):
        error = None

        def add(self, key, amount):
            raise self.error

    failing = Failing()
    store = dm.PrefixStore("p", failing)
    for error, expected in (
        (RuntimeError("lost"), dm.StoreError),
        (ConnectionError("lost"), dm.StoreError),
        (TimeoutError("lost"), dm.GroupTimeoutError),
        (ValueError("lost"), ValueError),
        (NotImplementedError("lost"), NotImplementedError),
    ):
        failing.error = error
        with pytest.raises(expected, match=r"add of a Failing failed: .*lost"):
            store.add("n", 1)
    for error in (ZeroDivisionError("mine"), KeyboardInterrupt(), TypeError("mine")):
        failing.error = error
        with pytest.raises(type(error)) as raised:
            store.add("n", 1)
        assert raised.value is error
        assert raised.traceback[-1].name == "add"


def test_answers_of_an_object_are_checked():
    class Odd(MinimalStore):
        def get(self, key):
            return 3

        def add(self, key, amount):
            return "three"

        def multi_get(self, keys):
            return [b"1"]

    store = dm.PrefixStore("p", Odd())
    store.set("a", "1")
    store.set("b", "1")
    with pytest.raises(TypeError, match="bytes-like"):
        store.get("a")
    with pytest.raises(TypeError):
        store.add("n", 1)
    with pytest.raises(dm.StoreError, match="returned 1 values for 2 keys"):
        store.multi_get(["a", "b"])


def test_text_from_an_object():
    class Text(MinimalStore):
        def get(self, key):
            return "ü"

    store = dm.PrefixStore("p", Text())
    store.set("a", "1")
    assert store.get("a") == "ü".encode()


# --- waiting -------------------------------------------------------------------------------


@on(*KINDS)
def test_timeouts_name_what_is_missing(store):
    store.set("here", "1")
    with pytest.raises(dm.GroupTimeoutError) as error:
        store.wait(["here", "not", "nor"], timedelta(seconds=SOON))
    assert "not'" in str(error.value)
    assert "nor'" in str(error.value)
    assert isinstance(error.value, TimeoutError)
    store.set_timeout(SOON)
    with pytest.raises(dm.GroupTimeoutError, match="not'"):
        store.get("not")
    with pytest.raises(dm.GroupTimeoutError, match="not'"):
        store.multi_get(["here", "not"])
    with pytest.raises(dm.GroupTimeoutError, match="barrier"):
        store.barrier("b", 2)
    with pytest.raises(dm.GroupTimeoutError):
        store.barrier("b2", 2, 0)
    assert store.get("here") == b"1"


@on("tcp", "file", "hash", "prefix", "python")
def test_only_what_is_missing_is_named(store):
    store.set("here", "1")
    with pytest.raises(dm.GroupTimeoutError) as error:
        store.wait(["here", "not"], 0)
    assert "here" not in str(error.value)


@on(*KINDS)
def test_waiting_in_threads(store):
    got = []
    run(
        lambda: got.append(store.get("late")),
        lambda: got.extend(store.multi_get(["late", "late"])),
        lambda: store.wait(["late"]),
        lambda: store.set("late", "1"),
    )
    assert got == [b"1"] * 3


@on(*FULL)
def test_queue_between_threads(store):
    got = []
    run(
        *[lambda: got.append(store.queue_pop("q"))] * 3,
        *[lambda: store.queue_push("q", "1")] * 3,
    )
    assert got == [b"1"] * 3


@on(*KINDS)
def test_barriers_in_threads(store):
    rounds, passed = 10, []

    def member():
        for i in range(rounds):
            store.add("n", 1)
            store.barrier("b", 3)
            passed.append(int(store.get("n")) >= 3 * (i + 1))

    run(member, member, member)
    assert passed == [True] * 3 * rounds


@on(*KINDS)
def test_counting_in_threads(store):
    def member():
        for _ in range(50):
            store.add("n", 1)

    run(member, member, member, member)
    assert store.add("n", 0) == 200


@on("tcp", "file", "hash", "python")
def test_waiting_unless(store):
    store.set("a", "1")
    store.wait_unless(["a"], ["gone"])
    store.set("gone", "rank 3 is gone")
    store.wait_unless(["a"], ["gone"])
    with pytest.raises(dm.PeerError, match=r"^rank 3 is gone$"):
        store.wait_unless(["a", "never"], ["other", "gone"])
    store.delete_key("gone")
    with pytest.raises(dm.GroupTimeoutError, match="never"):
        store.wait_unless(["never"], ["gone"], SOON)
    with pytest.raises(dm.GroupTimeoutError, match="never"):
        store.wait_unless(["never"], [], timeout=SOON)

    def late():
        with pytest.raises(dm.PeerError, match="also gone"):
            store.wait_unless(["never"], ["gone"])

    run(late, lambda: store.set("gone", "also gone"))


class Interrupt(Exception):
    pass


@pytest.fixture
def alarm():
    """alarm(): a signal whose handler raises Interrupt comes soon, and again until it was
    seen (the first may come before the call has begun to wait)."""

    def handler(number, frame):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    yield lambda: signal.setitimer(signal.ITIMER_REAL, 0.05)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@on(*KINDS)
def test_interrupted_by_a_signal(store, alarm):
    for call in (
        lambda: store.get("never"),
        lambda: store.wait(["never"]),
        lambda: store.barrier("b", 2),
        lambda: store.wait_unless(["never"], ["gone"]),
    ):
        with pytest.raises(Interrupt):
            alarm(), call()
    store.set("a", "1")
    assert store.get("a") == b"1"


@on("tcp", "file", "hash", "python")
def test_interrupted_queue_loses_nothing(store, alarm):
    with pytest.raises(Interrupt):
        alarm(), store.queue_pop("q")
    store.queue_push("q", "1")
    assert store.queue_pop("q") == b"1"


def test_interrupted_while_connecting(alarm):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(Interrupt):  # it accepts and says nothing
            alarm(), dm.TCPStore("127.0.0.1", silent.getsockname()[1])
        port = silent.getsockname()[1]
    with pytest.raises(Interrupt):  # nobody is there
        alarm(), dm.TCPStore("127.0.0.1", port)


def test_signals_that_do_not_raise_go_by():
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        with dm.StoreServer() as server, dm.TCPStore("127.0.0.1", server.port) as store:
            with pytest.raises(dm.GroupTimeoutError):
                store.wait(["never"], 0.3)
            assert store.add("n", 1) == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen


# --- time-outs as attributes -----------------------------------------------------------------


@on("hash")
def test_timeout_attribute(store):
    store.set_timeout(1.5)
    assert store.timeout == timedelta(seconds=1.5)
    store.set_timeout(timedelta(days=400, microseconds=1))
    assert store.timeout == timedelta(days=400, microseconds=1)
    store.set_timeout(store.timeout)
    store.set_timeout(timeout=None)
    assert store.timeout is None
    assert dm.HashStore().timeout == timedelta(minutes=5)
    store.set_timeout(7)
    assert dm.PrefixStore("p", store).timeout == timedelta(seconds=7)


# --- servers and clients -----------------------------------------------------------------------


def test_server_facts():
    server = dm.StoreServer()
    assert server.host == "127.0.0.1"
    assert server.port > 0
    assert server.clients == 0
    assert not server.closed
    assert repr(server) == f"<devicemesh.StoreServer 127.0.0.1:{server.port}>"
    with dm.TCPStore("localhost", server.port, timeout=TIMEOUT) as store:
        assert (store.host, store.port) == ("localhost", server.port)
        assert repr(store) == f"<devicemesh.TCPStore localhost:{server.port}>"
        assert server.clients == 1
    wait_until(lambda: server.clients == 0, "the client has left")
    server.close()
    server.close()
    assert server.closed
    assert server.clients == 0
    assert repr(server).endswith(" closed>")
    with pytest.raises(dm.GroupTimeoutError, match="Connection refused"):
        dm.TCPStore("127.0.0.1", server.port, timeout=SOON)


def test_server_takes_the_address_asked_for_and_no_other():
    with dm.StoreServer("127.0.0.1") as server:
        with pytest.raises(OSError, match="in use") as error:
            dm.StoreServer("127.0.0.1", server.port)
        assert "127.0.0.1" in str(error.value)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", server.port))


def test_server_on_a_listening_socket():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with dm.StoreServer(listen_fd=listener.detach()) as server:
        assert server.port == port
        with dm.TCPStore("127.0.0.1", port) as store:
            store.set("a", "1")
    with socket.socket() as unbound, pytest.raises(ValueError, match="no listening"):
        dm.StoreServer(listen_fd=unbound.fileno())


def test_unclosed_server_warns():
    text = r"unclosed store server at 127.0.0.1:\d+"
    with pytest.warns(ResourceWarning, match=text):
        dm.StoreServer()


def test_master():
    with dm.TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT) as master:
        assert repr(master).endswith(" serving>")
        with dm.TCPStore("127.0.0.1", master.port) as client:
            client.set("a", "1")
        assert master.get("a") == b"1"
        with pytest.raises(OSError, match="in use"):
            dm.TCPStore("127.0.0.1", master.port, is_master=True)
        with dm.TCPStore("127.0.0.1", master.port, is_master=True, multi_tenant=True) as second:
            assert second.get("a") == b"1"
    with pytest.raises(dm.GroupTimeoutError):
        dm.TCPStore("127.0.0.1", master.port, timeout=SOON)


def test_master_waits_for_workers():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with pytest.raises(dm.GroupTimeoutError, match="1 of 2 have come"):
        dm.TCPStore("127.0.0.1", port, 2, True, SOON, master_listen_fd=os.dup(listener.fileno()))
    stores = []

    def worker(is_master, **options):
        stores.append(dm.TCPStore("127.0.0.1", port, 3, is_master, TIMEOUT, **options))

    run(
        lambda: worker(True, master_listen_fd=listener.detach()),
        lambda: worker(False),
        lambda: worker(False, wait_for_workers=True),
    )
    assert stores[0].num_keys() == 1  # torch's counter, which list_keys shows too
    for store in stores:
        store.close()


def test_wrong_or_missing_token(monkeypatch):
    monkeypatch.delenv("DEVICEMESH_STORE_TOKEN", raising=False)
    with dm.StoreServer(token="secret") as server:
        for token in (None, "", "secreT", "secrets", "s"):
            with pytest.raises(dm.StoreError, match="DEVICEMESH_STORE_TOKEN"):
                dm.TCPStore("127.0.0.1", server.port, token=token)
        with dm.TCPStore("127.0.0.1", server.port, token="secret") as store:
            run(*[lambda: store.wait(["late"])] * 2, lambda: store.set("late", "1"))
        monkeypatch.setenv("DEVICEMESH_STORE_TOKEN", "secret")
        with dm.TCPStore("127.0.0.1", server.port) as store:
            store.set("a", "1")
    with dm.StoreServer() as server, pytest.raises(dm.StoreError, match="none was given"):
        dm.TCPStore("127.0.0.1", server.port, token="")


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.0\r\n\r\n", b"\x00\xce\xf7\x85\x3d"])
def test_strangers_do_not_disturb(first):
    """They are silent, speak something else, or send a wrong magic."""
    with (
        dm.StoreServer() as server,
        socket.create_connection(("127.0.0.1", server.port)) as stranger,
    ):
        stranger.sendall(first)
        with dm.TCPStore("127.0.0.1", server.port) as store:
            store.set("a", "1")
            assert store.get("a") == b"1"
            assert server.clients == 1


def test_server_that_is_no_store():
    def answer(listener):
        connection, _ = listener.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b"SSH-2.0-nothing\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        with pytest.raises(dm.StoreError, match=rf"127.0.0.1:{port}: what listens there is no st"):
            dm.TCPStore("127.0.0.1", port, timeout=TIMEOUT)
        thread.join()


def test_unknown_host():
    with pytest.raises(dm.GroupTimeoutError, match="no such host!"):
        dm.TCPStore("no such host!", 1, timeout=SOON)


def test_server_gone_in_the_middle_of_a_wait():
    server = dm.StoreServer()
    store = dm.TCPStore("127.0.0.1", server.port)

    def wait():
        with pytest.raises(dm.StoreError, match=rf"store at 127.0.0.1:{server.port}: connection"):
            store.get("never")

    def end():
        wait_until(lambda: server.clients == 1, "the client is there")
        server.close()

    run(wait, end)
    for _ in range(2):
        with pytest.raises(dm.StoreError, match=f"127.0.0.1:{server.port}"):
            store.add("n", 1)


def test_closed_in_the_middle_of_a_wait(tmp_path):
    for kind in ("tcp", "file", "hash", "prefix", "python"):
        folder = tmp_path / kind
        folder.mkdir()
        with make_store(kind, folder) as store:

            def wait(store=store):
                with pytest.raises(dm.ClosedError, match="closed"):
                    store.get("never")

            run(wait, wait, store.close)
            store.close()
            for call in (lambda: store.set("a", "1"), lambda: store.check(["a"]), store.num_keys):
                with pytest.raises(dm.ClosedError, match="closed"):
                    call()


def test_prefix_leaves_the_store_under_it_open():
    base = dm.HashStore()
    with dm.PrefixStore("p", base) as view:
        view.set("a", "1")
    assert base.get("p/a") == b"1"
    assert view.underlying_store is base
    assert base.list_keys() == ["p/a"]


def test_departure_is_published():
    with dm.StoreServer() as server, dm.TCPStore("127.0.0.1", server.port) as store:
        code = (
            "import os, sys, devicemesh as dm\n"
            "store = dm.PrefixStore('w', dm.TCPStore('127.0.0.1', int(sys.argv[1])))\n"
            "store.will('departed/1', 'rank 1 is gone')\n"
            "store.set('ready', '1')\n"
            "store.wait(['end'])\n"
            "if sys.argv[2] == 'die': os.kill(os.getpid(), 9)\n"
            "if sys.argv[2] == 'close': store.underlying_store.close()\n"
        )
        view = dm.PrefixStore("w", store)
        for how, departs in (("close", False), ("die", True), ("exit", True)):
            process = subprocess.Popen([sys.executable, "-c", code, str(server.port), how])
            view.wait(["ready"], TIMEOUT)
            assert not view.check(["departed/1"])
            view.set("end", "1")
            if departs:
                with pytest.raises(dm.PeerError, match="rank 1 is gone"):
                    view.wait_unless(["never"], ["departed/1"], TIMEOUT)
            process.wait(TIMEOUT)
            wait_until(lambda: server.clients == 1, "the other has left")
            assert view.delete_key("departed/1") == departs
            view.delete_key("ready")
            view.delete_key("end")


SERVE_WITH_FEW_DESCRIPTORS = """
import resource, sys, devicemesh as dm
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
with dm.StoreServer() as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""


@contextmanager
def server_with_few_descriptors(soft, hard):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE_WITH_FEW_DESCRIPTORS, str(soft), str(hard)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield int(process.stdout.readline())
        process.stdin.close()
    assert process.returncode == 0


def test_more_clients_than_the_soft_limit():
    with server_with_few_descriptors(32, 1000) as port:
        stores = [dm.TCPStore("127.0.0.1", port, timeout=TIMEOUT) for _ in range(64)]
        assert sum(store.add("n", 1) for store in stores) == 64 * 65 // 2
        for store in stores:
            store.close()


def test_more_clients_than_descriptors():
    """Those that find no place wait until others leave; nobody else notices."""
    with server_with_few_descriptors(32, 32) as port:
        first = dm.TCPStore("127.0.0.1", port, timeout=TIMEOUT)
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(64)]
        first.set("a", "1")
        for stranger in crowd:
            stranger.close()
        with dm.TCPStore("127.0.0.1", port, timeout=TIMEOUT) as second:
            assert second.get("a") == b"1"
        first.close()


def test_ipv6():
    try:
        server = dm.StoreServer("::1")
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    for host in ("::1", "[::1]", "localhost"):
        with dm.TCPStore(host, server.port, timeout=TIMEOUT) as store:
            assert store.add("n", 1) > 0
    server.close()


# --- processes ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads, from 3.12 on
def test_forked_child(tmp_path):
    server = dm.StoreServer()
    stores = [
        dm.TCPStore("127.0.0.1", server.port),
        dm.FileStore(tmp_path / "store"),
        dm.HashStore(),
    ]
    stores.append(dm.PrefixStore("p", stores[0]))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for store in stores:
                with pytest.raises(dm.ClosedError, match="was made by process"):
                    store.set("a", "1")
                store.close()
            server.close()
            with dm.TCPStore("127.0.0.1", server.port) as own:
                own.set("from the child", "1")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert stores[0].get("from the child") == b"1"
    for store in stores:
        store.set("a", "1")
        assert store.get("a") == b"1"
    wait_until(lambda: server.clients == 1, "the child's own client has left")
    stores[0].close()
    server.close()


def test_file_store_between_processes(tmp_path):
    path = tmp_path / "store"
    code = (
        "import sys, devicemesh as dm\n"
        "with dm.FileStore(sys.argv[1], 3) as store:\n"
        "    for _ in range(20): store.add('n', 1); store.barrier('b', 3)\n"
        "    store.set('done', store.get('n'))\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(path)]) for _ in range(2)]
    store = dm.FileStore(file_name=path, world_size=3)
    store.set_timeout(TIMEOUT)
    assert store.path == str(path)
    assert repr(store) == f"<devicemesh.FileStore {str(path)!r}>"
    for _ in range(20):
        store.add("n", 1)
        store.barrier("b", 3)
    assert store.get("done") == b"60"
    assert [process.wait(TIMEOUT) for process in processes] == [0, 0]
    store.close()
    assert not path.exists()


def test_exit_without_close():
    code = (
        "import devicemesh as dm\n"
        "store = dm.TCPStore('127.0.0.1', 0, is_master=True)\n"
        "client = dm.TCPStore('127.0.0.1', store.port)\n"
        "client.will('a', 'b')\n"
        "view = dm.PrefixStore('p', store)\n"
        "view.set('a', '1')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_descriptors_are_not_inherited():
    def inherited():
        code = "import os; print(len(os.listdir('/proc/self/fd')))"
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, close_fds=False).stdout

    before = inherited()
    with dm.StoreServer() as server, dm.TCPStore("127.0.0.1", server.port) as store:
        store.will("a", "b")
        assert inherited() == before


# --- objects ------------------------------------------------------------------------------------


@on(*FULL)
def test_object_protocol(store):
    assert isinstance(store, dm.Store)
    assert store.clone() is store
    assert store.has_extended_api() is True
    assert weakref.ref(store)() is store
    with store as entered:
        assert entered is store
    with pytest.raises(dm.ClosedError):
        store.set("a", "1")
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(store)
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.deepcopy(store)


def test_store_of_a_world():
    """The object that the world was made from, as long as it lives."""
    store = dm.PrefixStore("p", dm.HashStore())
    world = dm.World(store, 0, 2)
    assert world.store is store
    store.set("a", "1")
    del store
    again = world.store
    assert isinstance(again, dm.PrefixStore)
    assert again is world.store
    assert again.get("a") == b"1"
    assert isinstance(again.underlying_store, dm.HashStore)

    mine = PythonStore()
    assert dm.World(mine, 0, 2).store is mine


def test_signatures_and_docstrings():
    for kind in (dm.Store, dm.TCPStore, dm.FileStore, dm.HashStore, dm.PrefixStore, dm.StoreServer):
        inspect.signature(kind)
        assert "\n" in kind.__doc__
    for name, method in vars(dm.Store).items():
        if callable(method) and not name.startswith("_"):
            assert next(iter(inspect.signature(method).parameters)) == "self", name
            assert method.__doc__, name
    assert str(inspect.signature(dm.Store.barrier)) == "(self, /, key, world_size, timeout=None)"


def test_torchs_constructor_signature():
    assert list(inspect.signature(dm.TCPStore).parameters) == [
        *("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers"),
        *("multi_tenant", "master_listen_fd", "use_libuv", "token"),
    ]


def test_repr():
    assert (
        repr(dm.PrefixStore("p", dm.HashStore())) == "<devicemesh.PrefixStore 'p/' of a hash store>"
    )
    assert re.match(r"<devicemesh.HashStore object at 0x", repr(dm.HashStore()))
