"""The store that whoever starts the ranks serves for them."""

import contextlib
import socket
from collections.abc import Iterator

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def serve_store() -> Iterator[tuple[str, int]]:
    """A store on the loopback address for as long as the block runs: (host, port).

    The port is bound before anybody hears of it, so no other process can take it.
    """
    try:
        from devicemesh import StoreServer
    except ImportError:
        with socket.create_server((LOOPBACK, 0)) as listener:
            yield LOOPBACK, listener.getsockname()[1]
        return

    server = StoreServer(LOOPBACK, 0)
    try:
        yield LOOPBACK, server.port
    finally:
        server.close()
