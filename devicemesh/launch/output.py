"""The output of many ranks as whole lines, each with its rank in front.

A rank's stdout and stderr come through one pipe each. A line is written when it is
complete, so no line has another's bytes inside.
"""

import fcntl
import os
from collections import deque

_READ = 1 << 16
_LINE_MAX = 1 << 20  # a longer line is cut, so that what is held stays bounded
_TAIL = 400  # lines of stderr remembered for the closing words about a failure
_SHOWN_WITHOUT_TRACEBACK = 20
_HEADS = (b"Traceback (most recent call last):", b"Fatal Python error:")
_LINKS = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)


class Sink:
    """Where lines go: the launcher's own stdout or stderr. Counts what it wrote, which
    tells how far up on the screen a line stands by now."""

    written = 0  # lines, of all sinks together

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, lines: list[bytes]) -> None:
        Sink.written += len(lines)
        data = memoryview(b"".join(lines))
        while data:
            data = data[os.write(self._fd, data) :]


class Stream:
    """The read end of one rank's stdout or stderr."""

    def __init__(self, fd: int, prefix: bytes, sink: Sink) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._prefix = prefix
        self._sink = sink
        self._partial = bytearray()
        # (line without prefix, how many lines had been written by anybody before it)
        self._tail: deque[tuple[bytes, int]] = deque(maxlen=_TAIL)

    def pump(self) -> bool:
        """Passes on what is there now, up to 64 KiB of it; False if there was nothing."""
        try:
            data = os.read(self.fd, _READ)
        except BlockingIOError:
            return False
        self._partial += data
        self._pass_on()
        return bool(data)

    def finish(self) -> None:
        """Passes on all that the rank, which has ended, has written.

        Bounded: others may hold the pipe and still write to it, but the rank's own words
        are among what the pipe holds now.
        """
        held = fcntl.fcntl(self.fd, fcntl.F_GETPIPE_SZ)
        for _ in range(1 + held // _READ):
            if not self.pump():
                break
        if self._partial:
            self._partial += b"\n"
            self._pass_on()

    def _pass_on(self) -> None:
        *lines, rest = self._partial.split(b"\n")
        if len(rest) > _LINE_MAX:
            lines.append(rest)
            rest = bytearray()
        self._partial = bytearray(rest)
        if lines:
            for number, line in enumerate(lines):
                self._tail.append((bytes(line), Sink.written + number))
            self._sink.write([b"%s%s\n" % (self._prefix, line) for line in lines])

    def last_words(self) -> tuple[list[bytes], bool]:
        """(the last traceback with all its causes, or else the last lines, each with its
        prefix; whether other lines stand between or below them on the screen)"""
        lines = list(self._tail)
        start = _start_of_traceback([line for line, _ in lines])
        if start is None:
            start = max(0, len(lines) - _SHOWN_WITHOUT_TRACEBACK)
        lines = lines[start:]
        buried = bool(lines) and Sink.written - lines[0][1] > len(lines)
        return [b"%s%s\n" % (self._prefix, line) for line, _ in lines], buried


def _start_of_traceback(lines: list[bytes]) -> int | None:
    """Where the last traceback starts, with those of the exceptions that led to it."""
    start = None
    for number in range(len(lines) - 1, -1, -1):
        if start is not None and number == start - 1 and lines[number] == b"":
            # The blank line above a traceback: does a link stand above that?
            if number == 0 or lines[number - 1] not in _LINKS:
                return start
        elif lines[number].startswith(_HEADS):
            start = number
            if number == 0 or lines[number - 1] != b"":
                return start
    return start
