"""Where the default world comes from.

The first of these that applies (see `init_world`):

1. explicit `store`, `rank` and `world_size`;
2. the launcher's variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun,
   `python -m devicemesh run`, srun or mpirun with those set by hand);
3. neither: one bare process is a world of one and needs no environment.

Everybody meets in the store at MASTER_ADDR:MASTER_PORT. Under torchrun and `devicemesh run`
the launcher serves it (TORCHELASTIC_USE_AGENT_STORE); otherwise rank 0 does, and goes on
until its interpreter exits, since the others may need it longer than rank 0 does.

Keys carry the launcher's restart count and the number of `init_world` calls that this
process has made at that address, so that init, close, init works on one port. All ranks
have to make those calls equally often.
"""

import _thread
import atexit
import os

from devicemesh import _core

_STORE_TIMEOUT_S = 300.0  # to reach the store, where no time-out is given; torch's

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# How often init_world has been called here at each "host:port"; never goes down.
_incarnations: dict[str, int] = {}
# "host:port" -> the server that this process, as rank 0, runs there.
_servers: dict[str, object] = {}
# The client that the default world uses and that close_world closes.
_client = None
# Two threads that need the default world first must not make two.
_lock = _thread.RLock()


def is_initialized() -> bool:
    """Whether there is a default world that has not been closed.

    Example:
        >>> import devicemesh
        >>> with devicemesh.simulate(world_size=4):
        ...     devicemesh.is_initialized()
        True
    """
    world = _core._get_default_world()
    return world is not None and not world.closed


def default_world(timeout=None):
    """The default world of this process, made by `init_world` on first use.

    Args:
        timeout: as for `init_world`; ignored where the world is there already.

    Returns:
        The World that meshes are made in when none is named.
    """
    with _lock:
        if is_initialized():
            return _core._get_default_world()
        return init_world(timeout=timeout)


def init_world(store=None, rank=None, world_size=None, timeout=None):
    """Makes the default world.

    Calling it is optional: `init_device_mesh` does when there is no default world yet.

    Args:
        store: a Store that all ranks share; needs `rank` and `world_size` too. Its keys
            are used as they are: give each world a PrefixStore of its own. Never closed.
        rank: this process's rank, 0..world_size-1.
        world_size: number of ranks.
        timeout: how long to wait for the store, and the default time-out of the world's
            groups, in seconds or as a timedelta; None means half an hour.

    Returns:
        The World.

    Raises:
        ValueError: some but not all of the arguments, or of the launcher's variables, are
            there (the text lists the missing ones), or one has an unusable value.
        DeviceMeshError: there is a default world already.
        StoreError, OSError: the store cannot be reached or served.

    Example:
        >>> import devicemesh
        >>> world = devicemesh.init_world(rank=0, world_size=1)
        >>> world.rank, world.size
        (0, 1)
        >>> devicemesh.close_world()
    """
    if store is not None or rank is not None or world_size is not None:
        return _install(lambda: _explicit_world(store, rank, world_size, timeout))
    return _install(lambda: _environment_world(timeout))


def close_world() -> None:
    """Closes the default world: its groups, its connection to the store.

    Idempotent; waits for no other rank. `init_world` may be called again afterwards. A
    store that was given to `init_world` stays open.
    """
    global _client
    with _lock:
        world = _core._set_default_world(None)
        client, _client = _client, None
    if world is not None:
        world.close()
    if client is not None:
        client.close()


def _install(make):
    """Makes make()'s world the default one."""
    with _lock:
        if is_initialized():
            raise _core.DeviceMeshError(
                "there is a default world already: close_world() ends it, "
                "World(store, rank, size) makes others beside it"
            )
        close_world()  # one that was closed by hand may have left its connection
        world = make()
        _core._set_default_world(world)
        return world


def _explicit_world(store, rank, world_size, timeout):
    missing = [
        name for name, value in (("rank", rank), ("world_size", world_size)) if value is None
    ]
    if store is None and world_size != 1:
        missing.insert(0, "store")
    if missing:
        raise ValueError(
            "store, rank and world_size belong together (store may be left out for a world "
            f"of one): missing {', '.join(missing)}"
        )
    return _core.World(store, rank, world_size, timeout)


def _environment_world(timeout, given=None):
    """From the launcher's variables; what is in `given` counts more."""
    values = {name: os.environ.get(name, "") for name in _VARIABLES} | (given or {})
    missing = [name for name, value in values.items() if not value]
    if len(missing) == len(values):
        return _core.World(None, 0, 1, timeout)
    if missing:
        raise ValueError(_missing_text(values, missing))

    size = _number(values, "WORLD_SIZE", 1, 2**31 - 1)
    rank = _number(values, "RANK", 0, size - 1)
    port = _number(values, "MASTER_PORT", 1, 65535)
    if size == 1:
        return _core.World(None, rank, size, timeout)
    return _meet(values["MASTER_ADDR"], port, rank, size, timeout)


def _missing_text(values, missing):
    there = ", ".join(f"{name}={value}" for name, value in values.items() if value)
    return (
        f"the environment is only half that of a launcher: {', '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not set, but {there} "
        f"{'is' if len(values) - len(missing) == 1 else 'are'}. Start local processes with "
        "'python -m devicemesh run -n N script.py' or 'torchrun --nproc-per-node=N "
        "script.py'; or set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT on every "
        "rank; or none of them for a world of one"
    )


def _number(values, name, low, high):
    text = values[name]
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or not low <= number <= high:
        raise ValueError(f"environment variable {name} must be in {low}..{high}, got '{text}'")
    return number


def _meet(host, port, rank, size, timeout):
    """The world whose ranks meet in the store at host:port."""
    global _client
    address = f"{host}:{port}"
    # The launcher's store is at MASTER_ADDR:MASTER_PORT and nowhere else, which is where
    # we are going; then everybody is a client.
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and not served and address not in _servers:
        _servers[address] = _serve(host, port)
    client = _core.TCPStore(host, port, timeout=_STORE_TIMEOUT_S if timeout is None else timeout)
    try:
        incarnation = _incarnations.get(address, 0)
        _incarnations[address] = incarnation + 1
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
        store = _core.PrefixStore(f"devicemesh/{restarts}/{incarnation}", client)
        world = _core.World(store, rank, size, timeout)
    except BaseException:
        client.close()
        raise
    _client = client
    return world


def _serve(host, port):
    try:
        return _core.StoreServer(host, port)
    except OSError as error:
        raise type(error)(
            error.errno,
            f"{error.strerror} (rank 0 serves the store at MASTER_ADDR={host}, MASTER_PORT={port})",
        ) from error


def _at_exit():
    """Threads of ours must not run into the interpreter's end."""
    close_world()
    _core._close_running()
    for server in _servers.values():
        server.close()
    _servers.clear()


def _after_fork():
    """Connections and servers are the parent's. So is the default world, which stays in
    place: a child that uses it by mistake is told so."""
    global _client, _lock
    _lock = _thread.RLock()
    _client = None
    _servers.clear()
    _incarnations.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
