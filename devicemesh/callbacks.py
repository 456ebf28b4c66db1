"""Works that call back, and that asyncio can wait for: methods of Work, written in Python.

The threads that end operations never hold the GIL, so they leave a token, and one thread here
calls what the tokens stand for. It lives while there is something to wait for.
"""

import asyncio
import contextlib
import itertools
import os
import sys
import threading

from devicemesh import _core


class Dispatcher:
    """The callbacks that have not been called yet, and their thread."""

    def __init__(self):
        self.lock = threading.Lock()
        self.tokens = itertools.count(1)
        self.waiting = {}  # token: (work, fn)
        self.running = False

    def add(self, work, fn):
        with self.lock:
            token = next(self.tokens)
            self.waiting[token] = work, fn
        if _core._notify(work, token):
            self.start()
        else:
            with self.lock:
                del self.waiting[token]
            call(fn, work)

    def start(self):
        with self.lock:
            if self.running or not self.waiting:
                return
            self.running = True
        thread = threading.Thread(target=self.run, name="devicemesh-callbacks", daemon=True)
        thread.start()

    def run(self):
        while True:
            with self.lock:
                if not self.waiting:
                    self.running = False
                    return
            token = _core._next_notice()
            if token is not None:
                with self.lock:
                    work, fn = self.waiting.pop(token)
                call(fn, work)
                del work, fn


dispatcher = Dispatcher()


def forget():
    """In a forked child: its parent's works never end here."""
    global dispatcher
    dispatcher = Dispatcher()


os.register_at_fork(after_in_child=forget)


def call(fn, work):
    try:
        fn(work)
    except Exception:
        threading.excepthook(
            threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
        )


def add_done_callback(work, fn):
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {fn!r}")
    dispatcher.add(work, fn)


def wait(work):
    """The iterator behind `await work`: gives what work.result() gives. A task that is
    cancelled stops waiting; the operation goes on."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle():
        if future.done():
            return
        error = work.exception()
        if error is None:
            future.set_result(work.result())
        else:
            future.set_exception(error)

    def ended(_):
        with contextlib.suppress(RuntimeError):  # a closed loop: nobody waits any more
            loop.call_soon_threadsafe(settle)

    add_done_callback(work, ended)
    return future.__await__()
