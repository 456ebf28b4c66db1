from datetime import timedelta
from typing import Any, SupportsIndex

from devicemesh._core import World

def is_initialized() -> bool: ...
def default_world(timeout: float | timedelta | None = None) -> World: ...
def init_world(
    store: Any = None,
    rank: SupportsIndex | None = None,
    world_size: SupportsIndex | None = None,
    timeout: float | timedelta | None = None,
) -> World: ...
def close_world() -> None: ...
