"""The default world: where it comes from."""

import ast
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import devicemesh
from devicemesh import DeviceMeshError, World, bootstrap

VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """A process without launcher and without a default world."""
    for name in (*VARIABLES, "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    devicemesh.close_world()
    yield
    devicemesh.close_world()


# --- bad arguments --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ({"rank": 0}, "store, world_size"),
        ({"world_size": 1}, "rank"),
        ({"world_size": 2}, "store, rank"),
        ({"rank": 0, "world_size": 2}, "store"),
        ({"store": object()}, "rank, world_size"),
    ],
)
def test_arguments_belong_together(arguments, missing):
    with pytest.raises(ValueError, match=rf"belong together .*: missing {missing}$"):
        devicemesh.init_world(**arguments)
    assert not devicemesh.is_initialized()


def test_what_is_no_store():
    with pytest.raises((TypeError, NotImplementedError)):
        devicemesh.init_world(store=object(), rank=0, world_size=2)


@pytest.mark.parametrize("there", [("RANK",), ("MASTER_ADDR", "MASTER_PORT"), tuple(VARIABLES)[1:]])
def test_half_an_environment(monkeypatch, there):
    for name in there:
        monkeypatch.setenv(name, VARIABLES[name])
    missing = ", ".join(name for name in VARIABLES if name not in there)
    with pytest.raises(ValueError, match="only half that of a launcher") as caught:
        devicemesh.default_world()
    text = str(caught.value)
    assert f"{missing} {'is' if len(there) == 3 else 'are'} not set" in text
    assert all(f"{name}={VARIABLES[name]}" in text for name in there)
    assert "python -m devicemesh run -n N script.py" in text


def test_empty_is_not_set(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "")
    with pytest.raises(ValueError, match="MASTER_PORT is not set"):
        devicemesh.default_world()


@pytest.mark.parametrize(
    ("name", "value", "bounds"),
    [
        ("RANK", "2", "0..1"),
        ("RANK", "-1", "0..1"),
        ("RANK", "one", "0..1"),
        ("WORLD_SIZE", "0", "1.."),
        ("MASTER_PORT", "0", "1..65535"),
        ("MASTER_PORT", "65536", "1..65535"),
    ],
)
def test_unusable_variables(monkeypatch, name, value, bounds):
    for other, text in VARIABLES.items():
        monkeypatch.setenv(other, text)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"variable {name} must be in {bounds}.*, got '{value}'"):
        devicemesh.default_world()


def test_twice():
    devicemesh.init_world()
    with pytest.raises(DeviceMeshError, match="there is a default world already"):
        devicemesh.init_world()


# --- the bare process -----------------------------------------------------------------


def test_a_bare_process_is_a_world_of_one():
    assert not devicemesh.is_initialized()
    world = devicemesh.default_world(timeout=5)
    assert devicemesh.is_initialized()
    assert (world.rank, world.size, world.timeout) == (0, 1, 5.0)
    assert not world.is_simulated
    assert devicemesh.default_world() is world


def test_local_rank_alone_is_no_launcher(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert devicemesh.default_world().size == 1


def test_a_launched_world_of_one_needs_no_store(monkeypatch):
    for name, value in {**VARIABLES, "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert devicemesh.default_world().size == 1


def test_init_close_init():
    first = devicemesh.init_world()
    devicemesh.close_world()
    devicemesh.close_world()
    assert first.closed
    assert not devicemesh.is_initialized()
    second = devicemesh.init_world(rank=0, world_size=1)
    assert second is not first
    assert devicemesh.default_world() is second


def test_a_world_closed_by_hand_is_replaced():
    first = devicemesh.default_world()
    first.close()
    assert not devicemesh.is_initialized()
    assert devicemesh.default_world() is not first


def test_threads_make_one_world():
    worlds = []
    start = threading.Barrier(8)

    def ask():
        start.wait()
        worlds.append(devicemesh.default_world())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(worlds)) == 1
    assert isinstance(worlds[0], World)


# --- cost -----------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["bootstrap", "simulation", "reduce_op"])
def test_imports_next_to_nothing(module):
    path = Path(bootstrap.__file__).with_name(f"{module}.py")
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert imported <= {"_thread", "atexit", "os", "devicemesh"}


def test_import_loads_no_heavy_modules():
    program = (
        "import sys; before = set(sys.modules); import devicemesh; "
        "print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {program}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert {name.split(".")[0] for name in loaded} <= {"devicemesh", "atexit"}
