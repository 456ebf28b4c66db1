"""How ranks find each other: what `init_process_group` does before there is a group.

A store may have seen earlier worlds of the same ranks. Each rank counts in it how often it
has joined, and the count is part of all keys, so that init, destroy, init works on one store:
all ranks have to join equally often.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from devicemesh import _core, bootstrap
from devicemesh._core import World


def meet(init_method: str, rank: int, size: int, timeout: Any) -> World:
    """The default world by ``env://``, ``tcp://host:port`` or ``file:///path``."""
    if not isinstance(init_method, str):
        raise TypeError(f"init_method must be a URL, got {init_method!r}")
    url = urlsplit(init_method)
    query = {name: values[-1] for name, values in parse_qs(url.query).items()}
    rank = _given(rank, query, "rank")
    size = _given(size, query, "world_size")
    if url.scheme == "env":
        return _meet_by_environment(rank, size, timeout)
    if url.scheme not in ("tcp", "file"):
        raise ValueError(
            "init_method must be 'env://', 'tcp://host:port' or 'file:///path', got "
            f"{init_method!r}"
        )
    _check_place(rank, size, init_method)
    if url.scheme == "tcp":
        if not url.hostname or not url.port:
            raise ValueError(f"init_method must name host and port, got {init_method!r}")
        host, port = url.hostname, url.port
        return bootstrap._install(lambda: bootstrap._meet(host, port, rank, size, timeout))
    path = unquote(url.path)
    if url.netloc or not path:
        raise ValueError(f"init_method must name a file of this host, got {init_method!r}")
    return bootstrap._install(lambda: _world_in_file(path, rank, size, timeout))


def meet_in_store(store: Any, rank: int, size: int, timeout: Any) -> World:
    """The default world over a store, which stays open."""
    _check_place(rank, size, "store")
    return bootstrap._install(lambda: _world_in(store, rank, size, timeout))


def simulate(size: int, rank: int, timeout: Any) -> World:
    """A default world without communication; a size or rank that is not given is the
    environment's."""
    if size < 0:
        size = int(os.environ.get("WORLD_SIZE") or 1)
    if rank < 0:
        rank = int(os.environ.get("RANK") or 0)
    return bootstrap._install(lambda: World.simulated(size, rank, timeout))


def _given(value: int, query: dict[str, str], name: str) -> int:
    if value >= 0 or name not in query:
        return value
    try:
        return int(query[name])
    except ValueError:
        raise ValueError(f"init_method: {name} must be a number, got {query[name]!r}") from None


def _check_place(rank: int, size: int, what: str) -> None:
    if size < 1 or not 0 <= rank < size:
        raise ValueError(
            f"with {what}, world_size must be given (1 or more) and rank in 0..world_size-1, "
            f"got rank={rank}, world_size={size}"
        )


def _meet_by_environment(rank: int, size: int, timeout: Any) -> World:
    if size == 1 and rank in (-1, 0):
        return bootstrap._install(lambda: World(None, 0, 1, timeout))
    given = {}
    if rank >= 0:
        given["RANK"] = str(rank)
    if size >= 0:
        given["WORLD_SIZE"] = str(size)
    return bootstrap._install(lambda: bootstrap._environment_world(timeout, given))


def _world_in(store: Any, rank: int, size: int, timeout: Any) -> World:
    count = store.add(f"devicemesh/joined/{rank}", 1)
    return World(_core.PrefixStore(f"default_pg/{count}", store), rank, size, timeout)


def _world_in_file(path: str, rank: int, size: int, timeout: Any) -> World:
    store = _core.FileStore(path)
    try:
        world = _world_in(store, rank, size, timeout)
    except BaseException:
        store.close()
        raise
    bootstrap._client = store  # closed with the world
    return world
