"""The store that whoever starts the ranks serves for them."""

import contextlib
from collections.abc import Iterator

from devicemesh import StoreServer


@contextlib.contextmanager
def serve_store() -> Iterator[tuple[str, int]]:
    """A store on the loopback address for as long as the block runs: (host, port).

    The port is bound before anybody hears of it, so no other process can take it.
    """
    with StoreServer("127.0.0.1", 0) as server:
        yield server.host, server.port
