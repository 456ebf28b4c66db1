"""python -m devicemesh run: a script on N processes of this machine.

One thread, one selector: the ranks' output, their ends (pidfds) and the signals sent to
the launcher all arrive there. Ranks lead process groups of their own, so that a Ctrl-C
reaches them through the launcher only, in order, and what they start ends with them. The
kernel ends a rank whose launcher is gone.
"""

import argparse
import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from devicemesh.launch.environment import rank_environment
from devicemesh.launch.output import Sink, Stream
from devicemesh.launch.process import describe_exit, parent_guard, signal_group
from devicemesh.launch.store import serve_store

GRACE = 5.0  # seconds between the request to end and SIGKILL
TIMED_OUT = 124  # exit code, as of timeout(1)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    """Runs the command; its exit code."""
    options = _parse(arguments)
    with serve_store() as (host, port):
        return Launcher(options.n, options.timeout).run(_command(options), host, port)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m devicemesh run",
        description="Runs a Python script on N processes of this machine, with torchrun's "
        "environment variables set and a store for the ranks to meet at.",
        epilog="The exit code is that of the rank that failed first (128 + the signal's number "
        f"if a signal killed it), {TIMED_OUT} after --timeout, 0 if all ranks succeeded.",
    )
    parser.add_argument("-n", type=_count, required=True, metavar="N", help="number of processes")
    parser.add_argument(
        "--timeout", type=_seconds, metavar="S", help="end everything after S seconds"
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is the name of a module"
    )
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"not a number of processes: {text!r}")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"not a number of seconds: {text!r}")
    return number


def _command(options: argparse.Namespace) -> list[str]:
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    script = ["-m", options.script] if options.module else [options.script]
    return [sys.executable, *flags, *script, *options.args]


class _Rank:
    """A started rank."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], sinks: tuple[Sink, Sink]):
        assert process.stdout is not None
        assert process.stderr is not None
        self.rank = rank
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        prefix = f"[{rank}] ".encode()
        self.stdout = Stream(process.stdout.fileno(), prefix, sinks[0])
        self.stderr = Stream(process.stderr.fileno(), prefix, sinks[1])
        self.streams = {each.fd: each for each in (self.stdout, self.stderr)}

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def reap(self) -> int:
        """Waits for the process, which has ended or is about to; its exit code."""
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        signal_group(self.process.pid, signal.SIGKILL)  # whatever it started
        self.stdout.finish()
        self.stderr.finish()
        return self.process.wait()

    def close(self) -> None:
        os.close(self.pidfd)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


class Launcher:
    """Starts the ranks, passes their output on, and sees all of them out."""

    def __init__(self, n: int, timeout: float | None) -> None:
        self._n = n
        self._timeout = timeout
        self._sinks = (Sink(1), Sink(2))
        self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._first: _Rank | None = None  # the first that failed
        self._exit_code: int | None = None  # decided once the end has begun
        self._words: list[str] = []  # to say at the end
        self._kill_at = float("inf")
        self._signals: list[int] = []

    def run(self, command: list[str], host: str, port: int) -> int:
        """Runs `command` on every rank until all have ended; the exit code."""
        deadline = time.monotonic() + self._timeout if self._timeout else float("inf")
        try:
            with _signal_socket() as signals:
                self._selector.register(signals, selectors.EVENT_READ, None)
                guard = parent_guard()
                for rank in range(self._n):
                    self._start(command, rank_environment(rank, self._n, host, port), guard)
                self._watch(signals, deadline)
                self._say()
        except BrokenPipeError:  # nobody reads what the ranks write
            self._exit_code = 128 + signal.SIGPIPE
            _forget_output()
        finally:
            for each in self._ranks:
                if each.code is None:
                    signal_group(each.process.pid, signal.SIGKILL)
                    each.process.wait()
                each.close()
            self._selector.close()
        return self._exit_code or 0

    def _start(
        self, command: list[str], environment: dict[str, str], guard: Callable[[], None]
    ) -> None:
        """Starts the next rank."""
        process = subprocess.Popen(
            command,
            env={**_defaults(self._n), **os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,
            preexec_fn=guard,
        )
        each = _Rank(len(self._ranks), process, self._sinks)
        self._ranks.append(each)
        for fd in (each.pidfd, *each.streams):
            self._selector.register(fd, selectors.EVENT_READ, each)

    def _watch(self, signals: socket.socket, deadline: float) -> None:
        """Until all ranks have ended."""
        while any(each.code is None for each in self._ranks):
            now = time.monotonic()
            if now >= self._kill_at:
                self._kill()
            elif now >= deadline and self._exit_code is None:
                self._time_out()
            limit = deadline if self._exit_code is None else self._kill_at
            wait = None if limit == float("inf") else max(0.0, limit - now)
            for key, _ in self._selector.select(wait):
                each = key.data
                if each is None:
                    for signum in signals.recv(64):
                        self._on_signal(signum)
                elif each.code is not None:
                    pass  # it ended a moment ago, in this loop
                elif key.fd == each.pidfd:
                    self._on_exit(each)
                elif not each.streams[key.fd].pump():
                    self._selector.unregister(key.fd)  # the rank closed its output

    def _on_exit(self, each: _Rank) -> None:
        for fd in (each.pidfd, *each.streams):
            with contextlib.suppress(KeyError):
                self._selector.unregister(fd)
        code = each.reap()
        if code != 0 and self._exit_code is None:
            self._first = each
            self._end(signal.SIGTERM, code if code > 0 else 128 - code)

    def _on_signal(self, signum: int) -> None:
        if signum not in _SIGNALS:
            return
        if signum in self._signals:  # asked twice
            self._kill()
            return
        self._signals.append(signum)
        self._end(signum, 128 + signum)

    def _time_out(self) -> None:
        left = [str(each.rank) for each in self._ranks if each.code is None]
        self._words.append(
            f"not finished within {self._timeout:g} s; still running: "
            f"{'rank' if len(left) == 1 else 'ranks'} {', '.join(left)}"
        )
        # With faulthandler on, SIGABRT has each rank write down where its threads stand.
        self._end(signal.SIGABRT, TIMED_OUT)

    def _end(self, signum: int, exit_code: int) -> None:
        """Begins the end: ranks that still run get `signum` now and SIGKILL later."""
        if self._exit_code is None:
            self._exit_code = exit_code
        self._kill_at = min(self._kill_at, time.monotonic() + GRACE)
        self._send(signum)

    def _kill(self) -> None:
        self._kill_at = float("inf")
        self._send(signal.SIGKILL)

    def _send(self, signum: int) -> None:
        for each in self._ranks:
            if each.code is None:
                signal_group(each.process.pid, signum)

    def _say(self) -> None:
        """The closing words: what went wrong first, its traceback last."""
        first = self._first
        if first is not None:
            words = f"rank {first.rank} (pid {first.process.pid}) {describe_exit(first.code or 0)}"
            if self._n > 1:
                words += ", the first to fail"
            lines, buried = first.stderr.last_words()
            if buried:
                words += "; its last words again:"
            self._words.append(words)
        text = [f"devicemesh run: {words}\n".encode() for words in self._words]
        if first is not None and buried:
            text += lines
        if text:
            self._sinks[1].write(text)


def _defaults(n: int) -> dict[str, str]:
    """Variables for the ranks where the user has not set them."""
    defaults = {
        "PYTHONUNBUFFERED": "1",  # lines come when they are written
        "PYTHONFAULTHANDLER": "1",  # a crash shows where in the Python code
    }
    if n > 1:
        defaults["OMP_NUM_THREADS"] = "1"  # as torchrun: N ranks share the cores
    return defaults


@contextlib.contextmanager
def _signal_socket() -> Iterator[socket.socket]:
    """A socket that receives the number of each signal that comes during the block."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        handlers = {each: signal.signal(each, lambda *_: None) for each in _SIGNALS}
        previous = signal.set_wakeup_fd(theirs.fileno())
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(previous)
            for signum, handler in handlers.items():
                signal.signal(signum, handler)


def _forget_output() -> None:
    """Python would complain once more about the broken pipe when it flushes at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
