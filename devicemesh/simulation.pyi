from types import TracebackType
from typing import SupportsIndex

from devicemesh._core import World

class simulate:
    def __init__(self, world_size: SupportsIndex, rank: SupportsIndex = 0) -> None: ...
    def __enter__(self) -> World: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...
