"""Several operations given as one."""

from __future__ import annotations

from typing import Any

from devicemesh._core import Work
from devicemesh.distributed import state
from devicemesh.reduce_op import ReduceOp


class Works:
    """The Works of several operations, as one.

    `wait` waits for all of them (`timeout` is that of each); an error is that of the first
    that failed.
    """

    __slots__ = ("_works",)

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def result(self, timeout: Any = None) -> None:
        self.wait(timeout)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> Exception | None:
        errors = [work.exception() for work in self._works]
        return next((error for error in errors if error is not None), None)


def all_reduce_coalesced(tensors, op=ReduceOp.SUM, group=None, async_op: bool = False):
    """all_reduce of each array of a list, in one call.

    Returns:
        None, or with async_op an object with the methods of a Work.
    """
    pg = state.member(group, "all_reduce_coalesced")
    if pg is None:
        return None
    _check_list(tensors, "tensors")
    with pg.coalesce(async_op) as works:
        for tensor in tensors:
            pg.all_reduce(tensor, op)
    return Works(works) if async_op else None


def all_gather_coalesced(
    output_tensor_lists, input_tensor_list, group=None, async_op: bool = False
):
    """all_gather of each input into the list of outputs in its place, in one call.

    Returns:
        None, or with async_op an object with the methods of a Work.
    """
    pg = state.member(group, "all_gather_coalesced")
    if pg is None:
        return None
    _check_list(output_tensor_lists, "output_tensor_lists")
    _check_list(input_tensor_list, "input_tensor_list")
    if len(output_tensor_lists) != len(input_tensor_list):
        raise ValueError(
            "output_tensor_lists and input_tensor_list must be equally long, they have "
            f"{len(output_tensor_lists)} and {len(input_tensor_list)} entries"
        )
    with pg.coalesce(async_op) as works:
        for outputs, tensor in zip(output_tensor_lists, input_tensor_list, strict=True):
            pg.all_gather(outputs, tensor)
    return Works(works) if async_op else None


def _check_list(value: Any, name: str) -> None:
    if not isinstance(value, list):
        raise TypeError(f"{name} must be a list, got {type(value).__name__}")
