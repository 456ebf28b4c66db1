"""Runs a function on N forked processes of this machine and tells how each of them ended.

The children are forked before the store's server is started, so that the process that
forks has no thread of ours at that moment and no child inherits a server's sockets; the
children wait until they are told where the store is.

Every process ended here is a child that has not been waited for, by its own id: a child
leads a process group of its own, so what it started ends with it.
"""

import contextlib
import faulthandler
import gc
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TextIO

from devicemesh.launch.environment import rank_environment
from devicemesh.launch.process import describe_exit, parent_guard, signal_group
from devicemesh.launch.store import serve_store

# What `body` is called with besides its rank: send(message, failed=False).
Send = Callable[..., None]

GRACE = 3.0  # seconds that the other ranks get after the first one has failed
_STACKS_WAIT = 2.0  # seconds that ranks get to write down where they stand
_FRAME = struct.Struct("<QB")  # payload size, kind
_MESSAGE, _FAILED, _DONE = range(3)
_STACKS_SIGNAL = signal.SIGUSR1


class Rank:
    """One child, as its parent sees it.

    Attributes:
        rank, pid: who it is.
        messages: what it sent, in order.
        done: whether the body came back.
        code: how the process ended, as in subprocess: exit code, or minus a signal.
        order: its place among the ranks that failed, from 0; None if it did not fail.
        stopped: it was still running when the time was up (or when the ranks' time after
            a failure was) and was ended here.
        output: its stdout and stderr together, as text. stacks: where its threads stood
            before it was ended.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid = -1
        self.messages: list[Any] = []
        self.done = False
        self.code: int | None = None
        self.order: int | None = None
        self.stopped = False
        self.output = self.stacks = ""
        self.output_fd = os.memfd_create(f"rank-{rank}-output")
        self.stacks_fd = os.memfd_create(f"rank-{rank}-stacks")
        self.channel, self.child_channel = socket.socketpair()
        self.pidfd = -1
        self._received = bytearray()

    def how_it_ended(self) -> str:
        """For people: "rank 1 (pid 812) was killed by SIGSEGV"."""
        if self.stopped:
            return f"rank {self.rank} (pid {self.pid}) was still running and was ended"
        return f"rank {self.rank} (pid {self.pid}) {describe_exit(self.code or 0)}"

    def receive(self) -> tuple[bool, bool]:
        """Takes in what has come. (whether a failure was among it, end of file)"""
        failed = False
        while True:
            try:
                data = self.channel.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return failed, False
            except ConnectionError:
                data = b""
            if not data:
                return failed, True
            self._received += data
            while len(self._received) >= _FRAME.size:
                size, kind = _FRAME.unpack_from(self._received)
                if len(self._received) < _FRAME.size + size:
                    break
                payload = bytes(self._received[_FRAME.size : _FRAME.size + size])
                del self._received[: _FRAME.size + size]
                failed = failed or kind == _FAILED
                if kind == _DONE:
                    self.done = True
                else:
                    self.messages.append(pickle.loads(payload))

    def reap(self) -> None:
        """Waits for the process, which has ended or is about to."""
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        signal_group(self.pid, signal.SIGKILL)  # whatever it started
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.receive()
        self.output = _read_all(self.output_fd)
        self.stacks = _read_all(self.stacks_fd)

    def close(self) -> None:
        """Forgets the process. What was read from it stays."""
        for fd in (self.output_fd, self.stacks_fd, self.pidfd):
            if fd >= 0:
                os.close(fd)
        self.channel.close()
        self.child_channel.close()


def run_ranks(
    body: Callable[[int, Send], None],
    world_size: int,
    *,
    timeout: float,
    grace: float = GRACE,
    serve: Callable[[], AbstractContextManager[tuple[str, int]]] = serve_store,
) -> list[Rank]:
    """Runs body(rank, send) on `world_size` forked processes with torchrun's variables set.

    Args:
        body: runs in each child. send(message, failed=False) hands a picklable message to
            the parent at once; failed=True says that this rank has failed.
        world_size: how many.
        timeout: seconds; ranks that still run then write down their stacks and are ended.
        grace: seconds that the other ranks get after the first failure, within `timeout`.
        serve: makes the store's context manager, which gives (host, port).

    Returns:
        The ranks, by rank. All processes have ended.
    """
    ranks: list[Rank] = []
    guard = parent_guard()
    # A timer's thread stays behind in a fork, and to cancel the timer there would be to wait
    # for that thread for ever. `timeout` does the timer's work.
    faulthandler.cancel_dump_traceback_later()
    _flush()
    try:
        for rank in range(world_size):
            ranks.append(Rank(rank))
            _fork(ranks, guard, body)
        with serve() as (host, port):
            for each in ranks:
                environment = rank_environment(each.rank, world_size, host, port)
                with contextlib.suppress(ConnectionError):  # it died already: seen below
                    each.channel.sendall(pickle.dumps(environment))
            _watch(ranks, timeout, grace)
    finally:
        for each in ranks:
            if each.pid > 0 and each.code is None:
                signal_group(each.pid, signal.SIGKILL)
                each.reap()
            each.close()
    return ranks


# --- the parent ---------------------------------------------------------------------


def _fork(ranks: list[Rank], guard: Callable[[], None], body: Callable[[int, Send], None]) -> None:
    """Forks the last of `ranks`."""
    me = ranks[-1]
    # Python warns of threads in a process that forks; the child runs nothing but the test.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        me.pid = os.fork()
    if me.pid == 0:
        _child(ranks, guard, body)  # does not return
    me.child_channel.close()
    me.pidfd = os.pidfd_open(me.pid)
    with contextlib.suppress(OSError):  # whoever of the two is first; the other may fail
        os.setpgid(me.pid, me.pid)


def _watch(ranks: list[Rank], timeout: float, grace: float) -> None:
    """Until all have ended or time is up; ends those that are left."""
    limit = time.monotonic() + timeout
    failures = 0
    with selectors.DefaultSelector() as selector:
        for each in ranks:
            selector.register(each.channel, selectors.EVENT_READ, each)
            selector.register(each.pidfd, selectors.EVENT_READ, each)
        while any(each.code is None for each in ranks):
            events = selector.select(max(0.0, limit - time.monotonic()))
            if not events and time.monotonic() >= limit:
                break
            for key, _ in events:
                each = key.data
                if each.code is not None:
                    continue  # its other descriptor was ready too
                failed, end = each.receive()
                if key.fd == each.pidfd:
                    each.reap()
                    failed = failed or not each.done or each.code != 0
                    end = True
                    selector.unregister(each.pidfd)
                if end:
                    with contextlib.suppress(KeyError):
                        selector.unregister(each.channel)
                if failed and each.order is None:
                    each.order = failures
                    failures += 1
                    limit = min(limit, time.monotonic() + grace)
    left = [each for each in ranks if each.code is None]
    if left:
        _ask_for_stacks(left)
        for each in left:
            each.stopped = True
            signal_group(each.pid, signal.SIGKILL)
            each.reap()
            if each.order is None:
                each.order = failures
                failures += 1


def _ask_for_stacks(left: list[Rank]) -> None:
    """Has ranks write their stacks; returns when the files have stopped growing."""
    for each in left:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(each.pidfd, _STACKS_SIGNAL)
    limit = time.monotonic() + _STACKS_WAIT
    sizes = None
    while time.monotonic() < limit:
        seen = [os.fstat(each.stacks_fd).st_size for each in left]
        if all(seen) and seen == sizes:
            return
        sizes = seen
        time.sleep(0.01)


def _flush() -> None:
    """What is buffered before a fork would be written by each child again."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            stream.flush()


def _read_all(fd: int) -> str:
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")


# --- the child ----------------------------------------------------------------------


def _child(ranks: list[Rank], guard: Callable[[], None], body: Callable[[int, Send], None]) -> None:
    """The life of a child: never returns, never runs the parent's exit handlers."""
    code = 1
    try:
        os.setpgid(0, 0)
        guard()
        gc.freeze()  # the parent's objects are not ours to finalize
        me = ranks[-1]
        for each in ranks:
            each.channel.close()
            if each is not me:
                each.close()
        _own_output(me)
        environment = pickle.loads(me.child_channel.recv(1 << 16))
        os.environ.update(environment)

        def send(message: Any, failed: bool = False) -> None:
            _send(me.child_channel, _FAILED if failed else _MESSAGE, message)

        try:
            body(me.rank, send)
            sys.stdout.flush()
            _send(me.child_channel, _DONE, None)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _own_output(me: Rank) -> None:
    """From here on descriptors 0, 1, 2 and sys.stdout and sys.stderr are this rank's own."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(me.output_fd, 1)
    os.dup2(me.output_fd, 2)
    sys.stdout = _text_stream(1)
    sys.stderr = _text_stream(2)
    faulthandler.enable(file=2)
    faulthandler.register(_STACKS_SIGNAL, file=me.stacks_fd, all_threads=True, chain=False)


def _text_stream(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)


def _send(channel: socket.socket, kind: int, message: Any) -> None:
    payload = pickle.dumps(message)
    channel.sendall(_FRAME.pack(len(payload), kind) + payload)
