"""python -m devicemesh run: what the ranks get, what is shown, and that nothing is left."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from processes import is_gone, wait_until

from devicemesh.launch.output import Sink, Stream

DEADLINE = 60
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(autouse=True)
def tree_is_importable(monkeypatch):
    """The scripts find devicemesh where it is not installed, too."""
    monkeypatch.setenv("PYTHONPATH", ROOT, prepend=os.pathsep)


@pytest.fixture
def script(tmp_path):
    """Writes a script for the ranks; its path."""

    def write(text):
        path = tmp_path / "script.py"
        head = "import os, signal, subprocess, sys\nrank = int(os.environ['RANK'])\n"
        path.write_text(head + textwrap.dedent(text))
        return str(path)

    return write


@pytest.fixture
def start():
    """Starts the command line; what is still running at the end is ended."""
    started = []

    def popen(*arguments, code=None, **options):
        command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "devicemesh"]
        process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        started.append(process)
        return process

    yield popen
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def run(start):
    """Runs the command line to its end: (exit code, stdout, stderr)."""

    def to_end(*arguments, **options):
        process = start(*arguments, **options)
        out, err = process.communicate(timeout=DEADLINE)
        return process.returncode, out, err

    return to_end


def lines_of(process, count):
    """The next lines of a running launcher's stdout."""
    return [process.stdout.readline() for _ in range(count)]


def quick_end(grace):
    """A launcher with less patience than the command line's, as code for `python -c`."""
    return (
        "import sys; from devicemesh.launch import run; "
        f"run.GRACE = {grace}; sys.exit(run.main(sys.argv[1:]))"
    )


# --- bad arguments ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required"),
        (["-n", "2"], "required: SCRIPT"),
        (["x.py"], "required: -n"),
        (["-n", "0", "x.py"], "not a number of processes: '0'"),
        (["-n", "-3", "x.py"], "not a number of processes: '-3'"),
        (["-n", "two", "x.py"], "not a number of processes: 'two'"),
        (["-n", "2", "--timeout", "0", "x.py"], "not a number of seconds: '0'"),
        (["-n", "2", "--timeout", "nan", "x.py"], "not a number of seconds: 'nan'"),
        (["-n", "2", "--timeout", "soon", "x.py"], "not a number of seconds: 'soon'"),
    ],
)
def test_bad_arguments(run, arguments, words):
    code, out, err = run("run", *arguments)
    assert (code, out) == (2, "")
    assert words in err


def test_commands(run):
    code, out, err = run()
    assert (code, out) == (2, "")
    assert "usage: python -m devicemesh COMMAND" in err
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert "run a script on several processes" in out
    code, out, err = run("fly")
    assert (code, out) == (2, "")
    assert "no command 'fly'" in err


def test_missing_script(run):
    code, _, err = run("run", "-n", "2", "no_such_script.py")
    assert code == 2
    assert re.search(r"devicemesh run: rank \d \(pid \d+\) exited with code 2", err)


# --- what the ranks get ---------------------------------------------------------------------


def test_environment_is_torchruns(run, script):
    path = script(
        """
        names = ("RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR "
                 "TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_RESTART_COUNT").split()
        print(*[os.environ[name] for name in names], int(os.environ["MASTER_PORT"]) > 0)
        """
    )
    code, out, err = run("run", "-n", "3", path)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        f"[{r}] {r} {r} 0 3 3 127.0.0.1 True 0 True" for r in range(3)
    ]


@pytest.mark.parametrize(
    ("n", "given", "expected"), [("2", None, "1"), ("2", "3", "3"), ("1", None, "None")]
)
def test_omp_num_threads(run, script, monkeypatch, n, given, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    code, out, _ = run("run", "-n", n, script("print(os.environ.get('OMP_NUM_THREADS'))"))
    assert code == 0
    assert {line.split()[1] for line in out.splitlines()} == {expected}


def test_arguments_are_passed_on(run, script):
    code, out, _ = run("run", "-n", "1", script("print(sys.argv[1:])"), "-n", "5", "--x", "--", "y")
    assert code == 0
    assert out == "[0] ['-n', '5', '--x', '--', 'y']\n"


def test_modules_and_interpreter_flags(start, tmp_path):
    (tmp_path / "some_module.py").write_text(
        "import sys; print(__name__, sys.argv[1:], sys.flags.utf8_mode)"
    )
    process = subprocess.run(
        [
            sys.executable,
            "-X",
            "utf8",
            "-m",
            "devicemesh",
            "run",
            "-n",
            "1",
            "-m",
            "some_module",
            "a",
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert process.stdout == "[0] __main__ ['a'] 1\n"


def test_stdin_is_empty(run, script):
    code, out, _ = run("run", "-n", "2", script("print(repr(sys.stdin.read()))"))
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] ''", "[1] ''"]


# --- output ---------------------------------------------------------------------------------


def test_lines_are_whole_however_they_are_written(run, script):
    path = script(
        """
        for number in range(200):
            for piece in (f"{number} ", str(rank) * 3000, "\\n"):
                os.write(1, piece.encode())
        """
    )
    code, out, _ = run("run", "-n", "4", path)
    assert code == 0
    seen = {rank: [] for rank in range(4)}
    for line in out.splitlines():
        match = re.fullmatch(r"\[(\d)\] (\d+) (\d)\3{2999}", line)
        assert match, line[:80]
        assert match[1] == match[3]
        seen[int(match[1])].append(int(match[2]))
    assert seen == {rank: list(range(200)) for rank in range(4)}


def test_last_line_without_newline_and_bytes_that_are_no_text(run, script):
    process = run("run", "-n", "1", script(r"os.write(1, b'a\n\nb')"))
    assert process == (0, "[0] a\n[0] \n[0] b\n", "")


def test_stdout_and_stderr_stay_apart(run, script):
    code, out, err = run("run", "-n", "2", script("print('o'); print('e', file=sys.stderr)"))
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] o", "[1] o"]
    assert sorted(err.splitlines()) == ["[0] e", "[1] e"]


def test_output_comes_while_the_ranks_run(start, script):
    process = start("run", "-n", "2", script("print('here'); signal.pause()"))
    assert sorted(lines_of(process, 2)) == ["[0] here\n", "[1] here\n"]
    assert process.poll() is None


def test_a_reader_that_goes_away_ends_everything(start, script):
    process = start("run", "-n", "2", script("print(os.getpid())\nwhile True: print('more')"))
    pid = int(process.stdout.readline().split()[1])
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in err
    assert is_gone(pid)


class Lines(Sink):
    """Keeps what would be written."""

    def __init__(self):
        super().__init__(-1)
        self.lines = []

    def write(self, lines):
        Sink.written += len(lines)
        self.lines += lines


@pytest.fixture
def stream():
    """(feed bytes in, the Stream, its sink)"""
    out, into = os.pipe()
    sink = Lines()
    stream = Stream(out, b"[7] ", sink)

    def feed(data):
        os.write(into, data)
        stream.pump()

    yield feed, stream, sink
    os.close(out)
    os.close(into)


def test_stream_holds_incomplete_lines(stream):
    feed, reader, sink = stream
    feed(b"one\ntw")
    assert sink.lines == [b"[7] one\n"]
    assert not reader.pump()
    feed(b"o\n\nthree")
    assert sink.lines[1:] == [b"[7] two\n", b"[7] \n"]
    reader.finish()
    assert sink.lines[3:] == [b"[7] three\n"]


def test_last_words_are_the_chain_of_tracebacks(stream):
    feed, reader, sink = stream
    feed(b"warning\n\nTraceback (most recent call last):\nKeyError: handled and logged\n\n")
    chain = [
        b"Traceback (most recent call last):",
        b"  File 'x'",
        b"KeyError: 1",
        b"",
        b"During handling of the above exception, another exception occurred:",
        b"",
        b"Traceback (most recent call last):",
        b"ValueError: 2",
        b"",
        b"The above exception was the direct cause of the following exception:",
        b"",
        b"Traceback (most recent call last):",
        b"RuntimeError: 3",
    ]
    feed(b"\n".join(chain) + b"\n")
    lines, buried = reader.last_words()
    assert lines == [b"[7] %s\n" % line for line in chain]
    assert not buried
    sink.write([b"[8] something else\n"])
    assert reader.last_words() == (lines, True)


def test_last_words_without_a_traceback(stream):
    feed, reader, _ = stream
    assert reader.last_words() == ([], False)
    feed(b"".join(b"%d\n" % number for number in range(50)))
    lines, _ = reader.last_words()
    assert lines == [b"[7] %d\n" % number for number in range(30, 50)]


# --- failures -------------------------------------------------------------------------------


def test_first_failure_ends_the_others_and_is_shown_last(run, script, tmp_path):
    path = script(
        """
        print(os.getpid())
        if rank == 2:
            raise ValueError("on two")
        signal.pause()
        """
    )
    code, out, err = run("run", "-n", "4", path)
    assert code == 1
    assert re.search(r"devicemesh run: rank 2 \(pid \d+\) exited with code 1", err)
    assert "ValueError: on two" in "".join(err.splitlines()[-2:])
    assert all(is_gone(int(line.split()[1])) for line in out.splitlines())


def test_buried_traceback_is_repeated_last(run, script, tmp_path):
    flag = tmp_path / "flag"
    path = script(
        f"""
        flag = {str(flag)!r}
        if rank == 1:
            def bury(*exc_info):
                sys.__excepthook__(*exc_info)
                open(flag, "w").close()
                signal.pause()  # until the other rank has buried what was just written
            signal.signal(signal.SIGUSR1, lambda *_: None)
            open(flag + ".pid", "w").write(str(os.getpid()))
            sys.excepthook = bury
            raise ValueError("deep")
        while not os.path.exists(flag):
            pass
        for _ in range(4):  # more than a pipe holds: the launcher has to come twice for it
            print("on top " * 10_000, file=sys.stderr)
        os.kill(int(open(flag + ".pid").read()), signal.SIGUSR1)
        signal.pause()
        """
    )
    code, _, err = run("run", "-n", "2", path)
    assert code == 1
    assert err.splitlines()[-1] == "[1] ValueError: deep"
    assert "its last words again" in err
    assert err.count("[1] ValueError: deep") == 2


@pytest.mark.parametrize(
    ("death", "code"),
    [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137), ("os.abort()", 134)],
)
def test_exit_code_is_the_failing_ranks(run, script, death, code):
    got, _, err = run("run", "-n", "2", script(f"if rank: {death}\nsignal.pause()"))
    assert got == code
    assert "rank 1 (pid " in err


def test_crash_shows_the_python_stack(run, script):
    path = script("import ctypes\nif rank: ctypes.string_at(0)\nsignal.pause()")
    code, _, err = run("run", "-n", "2", path)
    assert code == 128 + signal.SIGSEGV
    assert "was killed by SIGSEGV" in err
    assert "[1] Fatal Python error: Segmentation fault" in err


def test_rank_that_ignores_sigterm_is_killed(run, script):
    path = script(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank:
            sys.exit(3)
        while True: signal.pause()
        """
    )
    code, _, _ = run("-n", "2", path, code=quick_end(0.2))
    assert code == 3


def test_what_a_rank_started_ends_with_it(run, script):
    path = script("print(subprocess.Popen(['sleep', '600']).pid)")
    code, out, _ = run("run", "-n", "1", path)
    assert code == 0
    wait_until(lambda: is_gone(int(out.split()[1])), "end of what the rank started")


# --- time-out and signals -------------------------------------------------------------------


def test_timeout_names_the_ranks_that_still_ran(run, script):
    path = script("if rank == 1: sys.exit()\ndef stuck(): signal.pause()\nstuck()")
    code, _, err = run("run", "-n", "3", "--timeout", "1", path)
    assert code == 124
    assert err.splitlines()[-1] == (
        "devicemesh run: not finished within 1 s; still running: ranks 0, 2"
    )
    assert re.search(r"\[2\]   File .* in stuck", err)


def test_timeout_that_is_not_reached(run, script):
    assert run("run", "-n", "2", "--timeout", "100", script("")) == (0, "", "")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_reaches_the_ranks_and_ends_everything(start, script, signum):
    path = script(
        f"""
        def leave(*_):
            print("leaving")
            sys.exit()
        signal.signal({int(signum)}, leave)
        print(os.getpid())
        while True: signal.pause()
        """
    )
    process = start("run", "-n", "3", path)
    pids = [int(line.split()[1]) for line in lines_of(process, 3)]
    process.send_signal(signum)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 128 + signum
    assert sorted(out.splitlines()) == ["[0] leaving", "[1] leaving", "[2] leaving"]
    assert err == ""
    assert all(map(is_gone, pids))


def test_second_ctrl_c_kills(start, script):
    path = script(
        """
        signal.signal(signal.SIGINT, lambda *_: print("not now"))
        print("ready")
        while True: signal.pause()
        """
    )
    process = start("run", "-n", "2", path)
    assert sorted(lines_of(process, 2)) == ["[0] ready\n", "[1] ready\n"]
    process.send_signal(signal.SIGINT)
    assert sorted(lines_of(process, 2)) == ["[0] not now\n", "[1] not now\n"]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == 128 + signal.SIGINT


def test_killed_launcher_leaves_no_rank(start, script):
    process = start("run", "-n", "3", script("print(os.getpid())\nwhile True: signal.pause()"))
    pids = [int(line.split()[1]) for line in lines_of(process, 3)]
    process.kill()
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid), f"end of rank with pid {pid}")


def test_ranks_meet_in_the_launchers_store(run, script):
    path = script(
        """
        import devicemesh
        with devicemesh.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])) as s:
            s.set(f"from {rank}", str(rank))
            print(s.get(f"from {1 - rank}").decode())
        """
    )
    code, out, err = run("run", "-n", "2", path)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] 1", "[1] 0"]
