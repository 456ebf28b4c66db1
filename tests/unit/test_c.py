"""Compiles and runs tests/c/*_test.c: each file one executable, under sanitizers.

The head comment of a test file says what it needs (see tests/c/dm_test.h).
"""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
TESTS = sorted((ROOT / "tests" / "c").glob("*_test.c"))
CC = shlex.split(os.environ.get("CC", "gcc"))
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wmissing-prototypes"]
FLAGS = ["-std=c11", "-O1", "-g", "-pthread", "-D_GNU_SOURCE", *WARNINGS, "-Werror"]
SANITIZER_FLAGS = ["-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
SANITIZERS = {"address,undefined", "thread", "none"}
RUN_TIMEOUT_S = 120

pytestmark = pytest.mark.skipif(shutil.which(CC[0]) is None, reason=f"no C compiler ({CC[0]})")


def head_words(text, key):
    """The words behind ` * key:` in the comment at the head of a test file."""
    head = text[: text.index("*/")]
    found = re.search(rf"^ \* {key}:(.*)$", head, re.MULTILINE)
    return found.group(1).split() if found else []


def sources_of(words):
    """The C files that `sources:` names: files, or all files of a folder."""
    files = []
    for word in words:
        path = CSRC / word
        found = sorted(path.glob("*.c")) if path.is_dir() else [path]
        assert found, f"csrc/{word} holds no C files"
        files += found
    return files


def builds():
    for path in TESTS:
        text = path.read_text()
        for sanitizer in head_words(text, "sanitize") or ["address,undefined"]:
            yield pytest.param(path, sanitizer, id=f"{path.stem}-{sanitizer}")


@pytest.mark.parametrize(("path", "sanitizer"), [*builds()])
def test_c(path, sanitizer, tmp_path):
    assert sanitizer in SANITIZERS
    sources = sources_of(head_words(path.read_text(), "sources"))
    assert sources, "the head comment has no ` * sources:` line"
    program = tmp_path / path.stem
    sanitize = [] if sanitizer == "none" else [f"-fsanitize={sanitizer}", *SANITIZER_FLAGS]
    include = [f"-I{CSRC}", f"-I{path.parent}"]
    compiled = subprocess.run(
        [*CC, *FLAGS, *sanitize, *include, path, *sources, "-o", program, "-ldl", "-lm"],
        capture_output=True,
        text=True,
    )
    assert compiled.returncode == 0, compiled.stderr
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    ran = subprocess.run(
        [program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=RUN_TIMEOUT_S,
    )
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}{ran.stderr}"
    print(ran.stderr)
