"""The pytest plugin: tests that run on several processes.

    @pytest.mark.ranks(4)
    def test_sum(rank, world_size):
        mesh = devicemesh.init_device_mesh("cpu", (world_size,))
        ...

A marked test runs whole on each of N processes forked from pytest: its fixtures are set up
and torn down there, and torchrun's variables are set (RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; the store is served by pytest itself).

- `ranks(1, 2, 4)` runs the test once for each size; `timeout=` is the test's deadline in
  seconds (default: the ini option `ranks_timeout`, 60).
- Fixtures: `rank` and `world_size`; `shared_path` is one folder for all ranks of the test.
  `tmp_path` is each rank's own.
- The test fails if it fails on any rank: the rank that failed first is shown first. A rank
  that dies fails the test, which names the rank and the signal. At the deadline all ranks
  write down where they stand and are ended.
- It is skipped (or fails as expected) if that is so on any rank and no rank fails.
"""

import contextlib
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest._code.code import TerminalRepr
from _pytest.capture import MultiCapture
from _pytest.runner import runtestprotocol

import devicemesh
from devicemesh.testing import ranks as engine
from devicemesh.testing.ranks import Rank, run_ranks

_DEFAULT_TIMEOUT = "60"
_PHASES = ("setup", "call", "teardown")
# Lines of a stack that say nothing about the test.
_MACHINERY = re.compile(
    r'  File ".*/(_pytest|pluggy|pytest|devicemesh/testing)/|  File "<frozen runpy>'
).match
_USAGE = "ranks(n, ..., timeout=seconds): each n a whole number of processes from 1 upwards"


class _Here:
    """What a child knows about itself."""

    def __init__(self, rank: int, world_size: int, shared_path: Path, send: Any) -> None:
        self.rank = rank
        self.world_size = world_size
        self.shared_path = shared_path
        self.send = send


_here_key = pytest.StashKey[_Here]()
_inherited_key = pytest.StashKey[Any]()


# --- options, marker, fixtures --------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "ranks_timeout",
        "Deadline in seconds of tests marked with `ranks`.",
        default=_DEFAULT_TIMEOUT,
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(n, ..., timeout=60): run the test on n local processes (once for each n).",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    sizes = marker.args
    timeout = marker.kwargs.get("timeout", 1)
    if (
        not sizes
        or not all(type(size) is int and size >= 1 for size in sizes)
        or set(marker.kwargs) - {"timeout"}
        or not (isinstance(timeout, int | float) and timeout > 0)
    ):
        pytest.fail(f"{metafunc.function.__name__}: {_USAGE}", pytrace=False)
    if len(sizes) > 1:
        if "world_size" not in metafunc.fixturenames:
            metafunc.fixturenames.append("world_size")
        metafunc.parametrize("world_size", sizes, ids=[f"{size}ranks" for size in sizes])


def _size_of(item: pytest.Item, marker: pytest.Mark) -> int:
    if len(marker.args) > 1:
        return item.callspec.params["world_size"]  # type: ignore[attr-defined]
    return marker.args[0]


def _here(request: pytest.FixtureRequest) -> _Here:
    here = request.node.stash.get(_here_key, None)
    if here is None:
        pytest.fail(f"fixture {request.fixturename!r} is for tests marked with {_USAGE}")
    return here


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """This process's rank."""
    return _here(request).rank


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """Number of processes that run this test."""
    return _here(request).world_size


@pytest.fixture
def shared_path(request: pytest.FixtureRequest) -> Path:
    """A folder that all ranks of the test share, gone afterwards."""
    return _here(request).shared_path


# --- the parent -----------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    marker = item.get_closest_marker("ranks")
    if marker is None or _here_key in item.stash:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _run(item, marker):
        item.ihook.pytest_runtest_logreport(report=report)
    # The ranks have torn down what they set up. Here it is what earlier tests left set up
    # for this one and the next does not need.
    setup_state = item.session._setupstate
    call = pytest.CallInfo.from_call(lambda: setup_state.teardown_exact(nextitem), "teardown")
    if call.excinfo is not None:
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _run(item: pytest.Item, marker: pytest.Mark) -> list[pytest.TestReport]:
    """Runs the test on its ranks. Reports for the test as a whole, a phase each."""
    world_size = _size_of(item, marker)
    timeout = float(marker.kwargs.get("timeout", item.config.getini("ranks_timeout")))
    shared_path = Path(tempfile.mkdtemp(prefix="ranks-"))
    base = _base_temp(item)
    start = time.time()
    clock = time.monotonic()

    def body(rank: int, send: Any) -> None:
        _be_rank(item, _Here(rank, world_size, shared_path, send), base)

    try:
        ranks = run_ranks(body, world_size, timeout=timeout, grace=engine.GRACE)
    finally:
        shutil.rmtree(shared_path, ignore_errors=True)
    duration = time.monotonic() - clock
    reports = _merge(item, ranks, timeout)
    for report in reports:
        if report.when == "call" or len(reports) == 1:
            report.start, report.stop, report.duration = start, start + duration, duration
    return reports


def _base_temp(item: pytest.Item) -> Path | None:
    """Where the ranks' tmp_path folders go: made once, here, as several processes that
    look for a free name at the same time get in each other's way."""
    if not {"tmp_path", "tmp_path_factory", "tmpdir"} & set(item.fixturenames):  # type: ignore[attr-defined]
        return None
    factory = item.config._tmp_path_factory  # type: ignore[attr-defined]
    return factory.mktemp("ranks")


def _merge(item: pytest.Item, ranks: list[Rank], timeout: float) -> list[pytest.TestReport]:
    """One report a phase, up to the first that has not passed, from those of the ranks."""
    by_phase: dict[str, list[tuple[Rank, pytest.TestReport]]] = {when: [] for when in _PHASES}
    for each in ranks:
        for kind, data in each.messages:
            if kind == "report":
                report = item.config.hook.pytest_report_from_serializable(
                    config=item.config, data=data
                )
                by_phase[report.when].append((each, report))
            else:
                with contextlib.suppress(Warning):
                    warnings.warn_explicit(**data)
    died = [each for each in ranks if each.stopped or not each.done]
    merged = []
    for when in _PHASES:
        reports = by_phase[when]
        failed = sorted(
            ((each, report) for each, report in reports if report.failed),
            key=lambda pair: pair[1].stop,
        )
        expected = [pair for pair in reports if hasattr(pair[1], "wasxfail") and pair[1].skipped]
        if expected:  # strict, and some ranks passed: as a whole it failed as expected
            failed = [pair for pair in failed if not _is_strict_pass(pair[1])]
        if failed:
            merged.append(_failure(failed, [each for each in died if each is not failed[0][0]]))
            return merged
        skipped = expected or [pair for pair in reports if pair[1].skipped]
        if skipped and not died:
            merged.append(skipped[0][1])
            if when == "call":
                merged += _passed(by_phase["teardown"][:1], [])
            return merged
        if when == "call" and died:
            merged.append(_death(item, died, timeout))
            return merged
        merged += _passed(reports[:1], ranks if when == "call" else [])
    return merged


def _is_strict_pass(report: pytest.TestReport) -> bool:
    return isinstance(report.longrepr, str) and report.longrepr.startswith("[XPASS(strict)]")


def _passed(
    reports: list[tuple[Rank, pytest.TestReport]], ranks: list[Rank]
) -> list[pytest.TestReport]:
    for _, report in reports:
        report.sections = [section for each in ranks for section in _output(each)]
    return [report for _, report in reports]


def _failure(failed: list[tuple[Rank, pytest.TestReport]], died: list[Rank]) -> pytest.TestReport:
    """The first failing rank's report, with what else there is to know below it."""
    first, report = failed[0]
    sections = [(f"{title} (rank {first.rank})", text) for title, text in report.sections]
    sections += _output(first)
    for each, other in failed[1:]:
        sections.append((f"rank {each.rank} failed too", other.longreprtext))
        sections += _output(each)
    for each in died:
        if all(each is not other for other, _ in failed):
            sections.append((f"rank {each.rank}", each.how_it_ended()))
            sections += _output(each)
    report.longrepr = _RankRepr(first.rank, report.longrepr)
    report.sections = sections
    return report


def _death(item: pytest.Item, died: list[Rank], timeout: float) -> pytest.TestReport:
    """The report of a test in which ranks ended without a result."""
    died = sorted(died, key=lambda each: (each.stopped, each.order or 0))
    lines = [each.how_it_ended() for each in died]
    if all(each.stopped for each in died):
        lines.insert(0, f"not finished within {timeout:g} s")
    sections = [section for each in died for section in _output(each)]
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=_TextRepr(item, "\n".join(lines)),  # type: ignore[arg-type]
        when="call",
        sections=sections,
    )


def _output(each: Rank) -> list[tuple[str, str]]:
    sections = []
    if each.output:
        sections.append((f"Captured output (rank {each.rank})", each.output))
    if each.stacks:
        stacks = "".join(line for line in each.stacks.splitlines(True) if not _MACHINERY(line))
        sections.append((f"Stacks when it was ended (rank {each.rank})", stacks))
    return sections


class _Crash:
    """What the summary's one line is made of."""

    def __init__(self, path: str, lineno: int, message: str) -> None:
        self.path = path
        self.lineno = lineno
        self.message = message

    def __str__(self) -> str:
        return f"{self.path}:{self.lineno}: {self.message}"


class _RankRepr(TerminalRepr):
    """A rank's failure as pytest shows it, under a line that names the rank."""

    def __init__(self, rank: int, longrepr: Any) -> None:
        self.rank = rank
        self.longrepr = longrepr
        crash = getattr(longrepr, "reprcrash", None)
        if crash is not None:
            self.reprcrash = _Crash(crash.path, crash.lineno, f"rank {rank}: {crash.message}")

    def toterminal(self, tw: Any) -> None:
        tw.line(f"rank {self.rank} failed first:", bold=True)
        if hasattr(self.longrepr, "toterminal"):
            self.longrepr.toterminal(tw)
        else:
            tw.line(str(self.longrepr))


class _TextRepr(TerminalRepr):
    """A failure with no traceback."""

    def __init__(self, item: pytest.Item, text: str) -> None:
        self.text = text
        path, lineno, _ = item.location
        self.reprcrash = _Crash(path, lineno or 0, text)

    def toterminal(self, tw: Any) -> None:
        tw.line(self.text, red=True)


# --- the child ------------------------------------------------------------------------


def _be_rank(item: pytest.Item, here: _Here, base: Path | None) -> None:
    """The test, whole, in this forked process."""
    item.stash[_here_key] = here
    _detach(item)
    if base is not None:
        own = base / f"rank{here.rank}"
        own.mkdir()
        item.config._tmp_path_factory._basetemp = own  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as caught:
        runtestprotocol(item, log=False, nextitem=None)
    for warning in caught:
        data = {
            "message": str(warning.message),
            "category": warning.category,
            "filename": warning.filename,
            "lineno": warning.lineno,
        }
        with contextlib.suppress(Exception):  # a category of the test's own may not travel
            here.send(("warning", data))


def _detach(item: pytest.Item) -> None:
    """Parts this process from what it inherited from pytest's."""
    manager = item.config.pluginmanager
    capture = manager.getplugin("capturemanager")
    if capture is not None:
        # The parent's capture files are shared by all ranks. A rank's output goes where its
        # descriptors 1 and 2 lead, so nothing is left to capture.
        item.stash[_inherited_key] = capture._global_capturing  # closing it is the parent's
        capture._global_capturing = MultiCapture(in_=None, out=None, err=None)
    debugger = manager.getplugin("pdbinvoke")
    if debugger is not None:  # there is no terminal to debug at
        manager.unregister(debugger)
    # A world that an earlier test left open is the parent's; this rank will make its own.
    devicemesh.close_world()
    # Fixtures that earlier tests set up are the parent's to tear down.
    for finalizers, _ in item.session._setupstate.stack.values():
        finalizers.clear()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """In a rank, each phase's report goes to the parent as soon as it is made."""
    report = yield
    here = item.stash.get(_here_key, None)
    if here is not None:
        data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
        here.send(("report", data), failed=report.failed)
    return report
