"""Our store and torch's TCPStore, each as client and as server of the other."""

import os
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest

dist = pytest.importorskip("torch.distributed")

import devicemesh as dm  # noqa: E402

ROOT = Path(__file__).parents[2]
TIMEOUT = 20.0
SOON = timedelta(milliseconds=20)


@pytest.fixture
def our_server():
    with dm.StoreServer() as server:
        yield server


@pytest.fixture
def torch_server():
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=TIMEOUT))


def torch_client(server, world_size=None):
    return dist.TCPStore("127.0.0.1", server.port, world_size, False, timedelta(seconds=TIMEOUT))


def our_client(server):
    return dm.TCPStore("127.0.0.1", server.port, timeout=TIMEOUT)


def exercise(store):
    """Every method that both have, with the answers that torch's gives."""
    store.set("text", "value")
    assert store.get("text") == b"value"
    store.set("bytes", b"\x00\xff")
    assert store.get("bytes") == b"\x00\xff"
    store.set("empty", "")
    assert store.get("empty") == b""
    big = os.urandom(5 << 20)
    store.set("big", big)
    assert store.get("big") == big

    assert store.add("n", 3) == 3
    assert store.add("n", -5) == -2
    assert store.get("n") == b"-2"

    assert store.compare_set("c", "other", "new") == b"other"
    assert not store.check(["c"])
    assert store.compare_set("c", "", "new") == b"new"
    assert store.compare_set("c", "other", "newer") == b"new"
    assert store.compare_set("c", "new", "newer") == b"newer"

    store.append("p", "po")
    store.append("p", b"tato")
    assert store.get("p") == b"potato"
    store.multi_set(["m1", "m2"], ["1", b"2"])
    assert store.multi_get(["m2", "m1", "m2"]) == [b"2", b"1", b"2"]
    store.wait(["m1", "m2"])
    assert store.check(["m1", "m2"])
    assert not store.check(["m1", "absent"])
    assert store.delete_key("m1") is True
    assert store.delete_key("m1") is False

    store.queue_push("q", "first")
    store.queue_push("q", "second")
    assert store.queue_len("q") == 2
    assert store.check(["q"])
    assert store.queue_pop("q") == b"first"
    assert store.queue_pop("q", block=False) == b"second"
    with pytest.raises(RuntimeError, match="empty"):
        store.queue_pop("q", block=False)

    assert store.num_keys() == len(store.list_keys())
    assert set(store.list_keys()) >= {"text", "n", "c", "p", "m2"}
    with pytest.raises(RuntimeError, match="absent"):
        store.wait(["text", "absent"], SOON)
    assert store.get("text") == b"value"  # the connection is good after a time-out


def test_torch_client_of_our_server(our_server):
    exercise(torch_client(our_server))


def test_torch_prefix_store_over_our_server(our_server):
    client = torch_client(our_server)
    exercise(dist.PrefixStore("outer", dist.PrefixStore("inner", client)))
    assert our_client(our_server).get("inner/outer/p") == b"potato"


def test_our_client_of_torch_server(torch_server):
    exercise(our_client(torch_server))


def test_our_prefix_store_over_torch_server(torch_server):
    exercise(dm.PrefixStore("inner", our_client(torch_server)))
    assert torch_client(torch_server).get("inner/p") == b"potato"


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_clients_of_both_kinds_see_each_other(kind, our_server, torch_server):
    server = our_server if kind == "ours" else torch_server
    ours, theirs = our_client(server), torch_client(server)
    ours.set("from ours", "1")
    assert theirs.get("from ours") == b"1"
    theirs.set("from torch", "2")
    assert ours.get("from torch") == b"2"
    assert ours.add("n", 1) + theirs.add("n", 1) == 3

    # Each wakes the other.
    got = []
    waiting = threading.Thread(target=lambda: got.append(ours.get("late ours")))
    waiting.start()
    theirs.set("late ours", "3")
    waiting.join()
    waiting = threading.Thread(target=lambda: got.append(theirs.get("late torch")))
    waiting.start()
    ours.set("late torch", "4")
    waiting.join()
    assert got == [b"3", b"4"]


def test_torch_barrier_on_our_server(our_server):
    stores = [torch_client(our_server) for _ in range(3)]
    threads = [threading.Thread(target=s.barrier, args=("b", 3)) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(RuntimeError, match="timeout"):
        stores[0].barrier("other", 2, SOON)


def test_our_barrier_on_torch_server(torch_server):
    stores = [our_client(torch_server) for _ in range(3)]

    def rounds(store):
        for _ in range(20):
            store.barrier("b", 3)

    threads = [threading.Thread(target=rounds, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stores[0].add("b/count", 0) == 60


def test_waiting_call_does_not_block_others_on_torch_server(torch_server):
    store = our_client(torch_server)
    got = []
    store.set("before", "1")  # unanswered when the first of them begins to wait
    threads = [threading.Thread(target=lambda: got.append(store.get("late"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    store.set("late", "1")
    for thread in threads:
        thread.join()
    assert got == [b"1"] * 3


def test_no_departures_on_torch_server(torch_server):
    store = our_client(torch_server)
    with pytest.raises(NotImplementedError, match="will"):
        store.will("departed/0", "gone")
    torch_client(torch_server).set("departed/1", "rank 1 is gone")
    with pytest.raises(dm.PeerError, match="rank 1 is gone"):
        store.wait_unless(["never"], ["departed/0", "departed/1"])


def test_adding_to_a_text_on_torch_server(torch_server):
    """Torch's server closes the connection; ours says what is wrong."""
    store = our_client(torch_server)
    store.set("text", "x")
    with pytest.raises(dm.StoreError, match=r"'text'.*number"):
        store.add("text", 1)
    assert store.get("text") == b"x"  # on a new connection


def test_limits_are_torchs(our_server, torch_server):
    longest = "k" * 8191
    for client in (torch_client(our_server), our_client(torch_server), torch_client(torch_server)):
        client.set(longest, b"v" * (8 << 20))
        assert len(client.get(longest)) == 8 << 20
    client = torch_client(our_server)
    client.set("k" * 8192, "v")  # torch sends it and learns nothing
    with pytest.raises(RuntimeError):
        client.get("k")


def test_torch_workers_meet_on_our_master():
    """world_size and wait_for_workers, as torch's TCPStore counts them."""
    made = []
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def master():
        descriptor = listener.detach()
        made.append(dm.TCPStore("127.0.0.1", port, 3, True, TIMEOUT, master_listen_fd=descriptor))

    thread = threading.Thread(target=master)
    thread.start()
    others = [
        dist.TCPStore("127.0.0.1", port, 3, False, timedelta(seconds=TIMEOUT)),
        dm.TCPStore("127.0.0.1", port, 3, False, TIMEOUT),
    ]
    thread.join()
    others[0].set("a", "1")
    assert made[0].get("a") == b"1"
    made[0].close()


def test_torch_process_group_over_our_server(our_server):
    """gloo's whole rendezvous: two ranks as threads cannot be, so as processes."""
    code = (
        "import sys, torch, torch.distributed as dist\n"
        "from datetime import timedelta\n"
        "rank, port = int(sys.argv[1]), int(sys.argv[2])\n"
        "store = dist.TCPStore('127.0.0.1', port, None, False, timedelta(seconds=60))\n"
        "dist.init_process_group('gloo', store=store, rank=rank, world_size=2)\n"
        "x = torch.ones(3); dist.all_reduce(x); assert x.tolist() == [2, 2, 2]\n"
        "dist.destroy_process_group()\n"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(our_server.port)])
        for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]


def test_inside_torchrun(tmp_path):
    """Our client in the store of a real torchrun agent, without importing torch."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import devicemesh as dm\n"
        "rank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
        "host, port = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "store = dm.TCPStore(host, port, timeout=60)\n"
        "store = dm.PrefixStore('job', store)\n"
        "store.set(f'rank/{rank}', str(rank))\n"
        "assert store.multi_get([f'rank/{r}' for r in range(size)]) == [b'0', b'1']\n"
        "for _ in range(10):\n"
        "    store.barrier('b', size)\n"
        "try:\n"
        "    store.wait(['never'], 0.02)\n"
        "except TimeoutError as error:\n"
        "    assert 'never' in str(error)\n"
        "assert store.add('done', 1) in (1, 2)\n"
        "assert 'torch' not in sys.modules\n"
        "print(f'rank {rank} of {size} done', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2 done" in done.stdout
    assert "rank 1 of 2 done" in done.stdout
