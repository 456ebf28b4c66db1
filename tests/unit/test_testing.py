"""The test harness: what it reports, and that it leaves no process behind."""

import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest
from processes import is_gone, wait_until

from devicemesh.testing.ranks import run_ranks


@pytest.fixture(autouse=True)
def nothing_left():
    """Every process that a test here starts has ended and has been waited for."""
    yield
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs the text of a test module with the plugin (and no other); its result."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run_text(text, *args):
        pytester.makepyfile("import os, signal, pytest\n" + textwrap.dedent(text))
        return pytester.runpytest("-p", "devicemesh.testing.plugin", "--strict-markers", *args)

    return run_text


# --- bad arguments --------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", ["", "0", "-1", "'2'", "2.0", "True", "2, 0", "2, timeout=0", "2, time=3"]
)
def test_bad_marker_is_a_collection_error(run, arguments):
    result = run(f"@pytest.mark.ranks({arguments})\ndef test_it(): pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_it: ranks(n, ..., timeout=seconds): each n a whole*"])


@pytest.mark.parametrize("name", ["rank", "world_size", "shared_path"])
def test_fixtures_need_the_marker(run, name):
    result = run(f"def test_it({name}): pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*fixture '{name}' is for tests marked with ranks(*"])


# --- passing --------------------------------------------------------------------------


def test_each_rank_runs_the_test(run):
    result = run(
        """
        @pytest.mark.ranks(4)
        def test_it(rank, world_size, shared_path):
            assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
            assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "4"
            assert os.environ["MASTER_ADDR"] == "127.0.0.1"
            assert int(os.environ["MASTER_PORT"]) > 0
            assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
            (shared_path / str(rank)).touch()
            while len(list(shared_path.iterdir())) < world_size:
                pass
        """
    )
    result.assert_outcomes(passed=1)


def test_several_sizes(run):
    result = run("@pytest.mark.ranks(1, 2, 3)\ndef test_it(rank): assert rank >= 0", "-v")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*test_it[[]1ranks]*", "*[[]2ranks]*", "*[[]3ranks]*"])


def test_parametrize(run):
    result = run(
        """
        @pytest.mark.parametrize("n", [2, 5])
        @pytest.mark.ranks(2)
        def test_it(rank, n):
            assert n in (2, 5)
        """
    )
    result.assert_outcomes(passed=2)


def test_marker_on_class_and_module(run):
    result = run(
        """
        pytestmark = pytest.mark.ranks(2)
        def test_module(world_size): assert world_size == 2
        @pytest.mark.ranks(3)
        class TestThree:
            def test_class(self, world_size): assert world_size == 3
        """
    )
    result.assert_outcomes(passed=2)


def test_fixtures_run_in_the_ranks(run):
    result = run(
        """
        @pytest.fixture(scope="module")
        def here(): return os.getpid()
        @pytest.fixture
        def both(here, rank): return here, rank
        @pytest.mark.ranks(3)
        def test_it(both, rank, tmp_path):
            assert both == (os.getpid(), rank)
            (tmp_path / "mine").mkdir()
        """
    )
    result.assert_outcomes(passed=1)


def test_wider_fixtures_of_the_parent_are_torn_down_once(run):
    result = run(
        """
        @pytest.fixture(scope="module")
        def log(tmp_path_factory):
            path = tmp_path_factory.getbasetemp() / "log"
            yield path
            with path.open("a") as file:
                file.write("torn down\\n")
        def test_first(log): pass
        @pytest.mark.ranks(3)
        def test_ranks(log, rank): assert log.parent.exists()
        def test_last(log): pass
        """
    )
    result.assert_outcomes(passed=3)


def test_last_rank_test_of_a_module_lets_go_of_its_fixtures(pytester):
    pytester.makepyfile(
        test_a="""
        import pytest
        @pytest.fixture(scope="module")
        def printed():
            yield
            print("module fixture gone")
        def test_one(printed): pass
        @pytest.mark.ranks(2)
        def test_two(printed): pass
        """,
        test_b="def test_three(): pass",
    )
    result = pytester.runpytest("-p", "devicemesh.testing.plugin", "-s")
    result.assert_outcomes(passed=3)
    assert result.stdout.str().count("module fixture gone") == 1


def test_world_of_the_parent_is_not_the_ranks(run):
    result = run(
        """
        import devicemesh
        def test_leaves_a_world_open():
            devicemesh.init_world(rank=0, world_size=1)
        @pytest.mark.ranks(2)
        def test_it(rank):
            assert not devicemesh.is_initialized()
            devicemesh.init_world(rank=0, world_size=1)
        def test_parent_still_has_it():
            assert devicemesh.is_initialized()
            devicemesh.close_world()
        """
    )
    result.assert_outcomes(passed=3)


def test_output_is_kept_apart_and_shown_on_request(run):
    text = "@pytest.mark.ranks(2)\ndef test_it(rank):\n  print('from', rank); os.system('echo sub')"
    result = run(text)
    result.stdout.no_fnmatch_line("*from*")
    result = run(text, "-rP")
    result.stdout.fnmatch_lines(
        ["*output (rank 0)*", "from 0", "sub", "*output (rank 1)*", "from 1", "sub"]
    )


def test_capsys_works_in_ranks(run):
    result = run(
        """
        @pytest.mark.ranks(2)
        def test_it(rank, capsys):
            print(rank)
            assert capsys.readouterr().out == f"{rank}\\n"
        """
    )
    result.assert_outcomes(passed=1)


def test_warnings_come_through(run):
    text = "import warnings\n@pytest.mark.ranks(2)\ndef test_it(): warnings.warn('careful')"
    result = run(text, "-W", "default")
    result.assert_outcomes(passed=1, warnings=2)
    result.stdout.fnmatch_lines(["*UserWarning: careful*"])
    result = run(text, "-W", "error")
    result.assert_outcomes(failed=1)


# --- skipping and expected failures ------------------------------------------------------


def test_skip(run):
    result = run("@pytest.mark.ranks(2)\ndef test_it(): pytest.skip('no reason')", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED *no reason"])


def test_skip_marker(run):
    result = run("@pytest.mark.skip\n@pytest.mark.ranks(2)\ndef test_it(): os._exit(1)")
    result.assert_outcomes(skipped=1)


def test_failure_on_one_rank_beats_skip_on_another(run):
    result = run(
        """
        @pytest.mark.ranks(2)
        def test_it(rank):
            if rank: pytest.skip("no")
            assert False
        """
    )
    result.assert_outcomes(failed=1)


@pytest.mark.parametrize("strict", [True, False])
def test_xfail_when_one_rank_fails(run, strict):
    result = run(
        f"""
        @pytest.mark.xfail(strict={strict})
        @pytest.mark.ranks(2)
        def test_it(rank): assert rank
        """
    )
    result.assert_outcomes(xfailed=1)


def test_imperative_xfail(run):
    result = run("@pytest.mark.ranks(2)\ndef test_it(): pytest.xfail('known')")
    result.assert_outcomes(xfailed=1)


def test_strict_xfail_that_passes_fails(run):
    text = "@pytest.mark.xfail(strict=True)\n@pytest.mark.ranks(2)\ndef test_it(): pass"
    run(text).assert_outcomes(failed=1)


# --- failing ----------------------------------------------------------------------------


def test_first_failure_first_with_rewritten_assertion(run):
    result = run(
        """
        @pytest.mark.ranks(3)
        def test_it(rank, shared_path):
            print("words of", rank)
            if rank != 2:
                while not (shared_path / "two").exists():
                    pass
                raise ValueError(f"later, on {rank}")
            assert [1, 2] == [1, 3]
        @pytest.fixture(autouse=True)
        def let_the_others_fail(shared_path):
            yield
            (shared_path / "two").touch()
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "rank 2 failed first:",
            "*assert [[]1, 2] == [[]1, 3]*",
            "*Captured output (rank 2)*",
            "words of 2",
            "*rank ? failed too*",
            "*ValueError: later, on ?",
            "*rank ? failed too*",
            "*ValueError: later, on ?",
            "FAILED * - rank 2*",
        ]
    )


def test_failing_fixture(run):
    result = run(
        """
        @pytest.fixture
        def broken(rank): assert rank != 1, "no fixture here"
        @pytest.mark.ranks(2)
        def test_it(broken): pass
        """
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["rank 1 failed first:", "*no fixture here*"])


def test_failing_teardown(run):
    result = run(
        """
        @pytest.fixture
        def broken(rank):
            yield
            assert rank != 1, "no way out"
        @pytest.mark.ranks(2)
        def test_it(broken): pass
        """
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["rank 1 failed first:", "*no way out*"])


@pytest.mark.parametrize(
    ("death", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("os._exit(3)", "exited with code 3"),
        ("os._exit(0)", "exited with code 0"),
    ],
)
def test_death_names_rank_and_signal(run, death, words):
    result = run(
        f"""
        @pytest.mark.ranks(3)
        def test_it(rank):
            os.write(1, b"last words")
            if rank == 1: {death}
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines([rf"rank 1 \(pid \d+\) {re.escape(words)}", r".*rank 1.*", "last"])


def test_crash_shows_the_python_stack(run):
    result = run(
        """
        import ctypes
        def crash(): ctypes.string_at(0)
        @pytest.mark.ranks(2)
        def test_it(rank):
            if rank: crash()
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines([r"rank 1 .* SIGSEGV", r"Fatal Python error.*", r".*in crash"])


def test_death_ends_the_ranks_that_wait_for_it(run):
    result = run(
        """
        from devicemesh.testing import ranks
        ranks.GRACE = 0.2
        @pytest.mark.ranks(2)
        def test_it(rank):
            if rank: os._exit(5)
            while True: signal.pause()
        """,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["rank 1 * exited with code 5", "rank 0 * was still running and was ended"]
    )


def test_deadline_shows_where_each_rank_stands(run):
    result = run(
        """
        def stuck():
            while True: signal.pause()
        @pytest.mark.ranks(2, timeout=0.3)
        def test_it(rank):
            print("before")
            if rank: stuck()
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "not finished within 0.3 s",
            "rank 1 * was still running and was ended",
            "*Captured output (rank 1)*",
            "before",
            "*Stacks when it was ended (rank 1)*",
            "*in stuck",
            "*in test_it",
        ]
    )
    result.stdout.no_fnmatch_line("*_pytest/runner.py*")


def test_deadline_from_ini(run, pytester):
    pytester.makeini("[pytest]\nranks_timeout = 0.2")
    result = run("@pytest.mark.ranks(1)\ndef test_it():\n  while True: signal.pause()")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["not finished within 0.2 s"])


def test_ranks_that_ignore_signals_are_ended(run):
    result = run(
        """
        @pytest.mark.ranks(2, timeout=0.2)
        def test_it(rank):
            for each in (signal.SIGTERM, signal.SIGINT):
                signal.signal(each, signal.SIG_IGN)
            if rank: os.kill(os.getpid(), signal.SIGSTOP)
            while True: signal.pause()
        """
    )
    result.assert_outcomes(failed=1)


def test_what_a_rank_started_ends_with_it(run, tmp_path):
    note = tmp_path / "pid"
    result = run(
        f"""
        import subprocess
        @pytest.mark.ranks(1)
        def test_it():
            global child
            child = subprocess.Popen(["sleep", "600"])
            with open({str(note)!r}, "w") as file: file.write(str(child.pid))
        """
    )
    result.assert_outcomes(passed=1)
    pid = int(note.read_text())
    wait_until(lambda: is_gone(pid), "end of what the rank started")


# --- pytest itself ends -----------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_pytest(pytester, signum):
    pytester.makepyfile(
        """
        import os, signal, pytest
        @pytest.mark.ranks(2)
        def test_it(rank, pytestconfig):
            (pytestconfig.rootpath / f"pid{rank}.part").write_text(str(os.getpid()))
            os.rename(f"pid{rank}.part", f"pid{rank}")
            while True: signal.pause()
        """
    )
    command = [sys.executable, "-m", "pytest", "-p", "devicemesh.testing.plugin"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    notes = [pytester.path / f"pid{rank}" for rank in range(2)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        try:
            wait_until(lambda: all(note.exists() for note in notes), "start of the ranks")
            process.send_signal(signum)
            process.wait(timeout=60)
        finally:
            process.kill()
    pids = [note.read_text() for note in notes]
    wait_until(lambda: all(map(is_gone, pids)), "end of the ranks")


# --- the function beneath -----------------------------------------------------------------


def test_run_ranks_returns_messages_by_rank():
    def body(rank, send):
        send(rank * 10)
        send({"second": rank})

    ranks = run_ranks(body, 3, timeout=30)
    assert [each.messages for each in ranks] == [[r * 10, {"second": r}] for r in range(3)]
    assert all(each.done and each.code == 0 and each.order is None for each in ranks)


def test_run_ranks_reports_an_exception():
    def body(rank, send):
        if rank == 1:
            raise RuntimeError("told you")

    ranks = run_ranks(body, 2, timeout=30)
    assert [each.done for each in ranks] == [True, False]
    assert ranks[1].order == 0
    assert "RuntimeError: told you" in ranks[1].output


def test_run_ranks_leaks_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    run_ranks(lambda rank, send: None, 4, timeout=30)
    assert len(os.listdir("/proc/self/fd")) == before


def test_children_have_no_descriptor_of_a_sibling():
    def body(rank, send):
        send(len(os.listdir("/proc/self/fd")))

    counts = [each.messages[0] for each in run_ranks(body, 4, timeout=30)]
    assert len(set(counts)) == 1
