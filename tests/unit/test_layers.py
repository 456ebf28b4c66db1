"""Holds the #include lines of csrc against the order of the layers.

base -> layout, store -> backend -> group -> python: a file includes its own layer and those
below. Python.h belongs to python, C++ and gloo to backend/gloo, sockets to what talks.
"""

import re
from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"
LEVELS = {"base": 0, "layout": 1, "store": 1, "backend": 2, "group": 3, "python": 4}
C_SUFFIXES = {".c", ".h"}
CXX_SUFFIXES = {".cc", ".cpp", ".cxx", ".hh", ".hpp"}
FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in C_SUFFIXES | CXX_SUFFIXES)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
SOCKETS = re.compile(r"(sys/(socket|un|epoll)|netinet/.*|arpa/.*|net/.*|netdb|ifaddrs)\.h")
LIBRARIES = re.compile(
    r"(nccl|cuda|cuda_runtime|cuda_runtime_api|driver_types|numpy/.*|torch/.*)\.h"
)


def includes(path):
    """The quoted and the angled includes of a file."""
    found = INCLUDE.findall(path.read_text())
    return [quoted for quoted, _ in found if quoted], [angled for _, angled in found if angled]


def layer_of(name):
    return name.split("/")[0]


def part_of(name):
    """backend/gloo of backend/gloo/dm_x.h, but backend of backend/dm_backend.h."""
    return name.rsplit("/", 1)[0]


def may_include(name, included):
    layer, other = layer_of(name), layer_of(included)
    if layer != other:
        return LEVELS[other] < LEVELS[layer]
    if layer == "backend":
        # Backends know the table and the kernels, not each other; files of backend/ itself
        # put them together.
        known = (part_of(name), "backend", "backend/reduce")
        return part_of(included) in known or part_of(name) == "backend"
    return True


def named(path):
    return path.relative_to(CSRC).as_posix()


def violations(wrong):
    """What `wrong(file, include)` picks, as texts that name both."""
    for path in FILES:
        quoted, angled = includes(path)
        for included in [*quoted, *angled]:
            if wrong(named(path), included):
                yield f"{named(path)}: {included}"


def test_there_are_files():
    assert {layer_of(named(path)) for path in FILES} == set(LEVELS)


def test_the_rule_itself():
    assert may_include("layout/dm_layout.c", "base/dm_status.h")
    assert not may_include("layout/dm_layout.c", "store/dm_store.h")
    assert not may_include("store/dm_store.c", "backend/dm_backend.h")
    assert may_include("backend/gloo/dm_gloo.cc", "backend/reduce/dm_reduce.h")
    assert not may_include("backend/gloo/dm_gloo.cc", "backend/fake/dm_fake.h")
    assert not may_include("group/dm_group.c", "python/py_state.h")
    found = INCLUDE.findall('#include <a.h>\n  # include "b.h"\n// #include <c.h>\n')
    assert found == [("", "a.h"), ("b.h", "")]


def test_quoted_includes_are_paths_from_csrc():
    for path in FILES:
        for included in includes(path)[0]:
            assert (CSRC / included).is_file(), f"{named(path)}: {included}"


def test_includes_go_down():
    def wrong(name, included):
        return (CSRC / included).is_file() and not may_include(name, included)

    assert list(violations(wrong)) == []


def test_only_python_knows_python():
    def wrong(name, included):
        return included in ("Python.h", "structmember.h") and layer_of(name) != "python"

    assert list(violations(wrong)) == []


def test_only_gloo_is_cxx():
    def wrong(name, included):
        cxx = not included.endswith(".h") or included.startswith("gloo/")
        return cxx and part_of(name) != "backend/gloo"

    assert list(violations(wrong)) == []
    cxx = [named(path) for path in FILES if path.suffix in CXX_SUFFIXES]
    assert [name for name in cxx if part_of(name) != "backend/gloo"] == []


def test_sockets_belong_to_store_and_backends():
    def wrong(name, included):
        return SOCKETS.fullmatch(included) and layer_of(name) not in ("store", "backend")

    assert list(violations(wrong)) == []


def test_nothing_is_built_against_what_is_loaded():
    """CUDA, NCCL, numpy and torch are met at run time; no header of theirs is needed."""
    assert list(violations(lambda _, included: LIBRARIES.fullmatch(included))) == []


def test_headers_are_guarded_by_their_name():
    for path in FILES:
        if path.suffix in (".h", ".hh", ".hpp"):
            guard = re.sub(r"\W", "_", path.name).upper()
            text = path.read_text()
            start = re.search(rf"^#ifndef {guard}\n#define {guard}$", text, re.MULTILINE)
            assert start, f"{named(path)} is not guarded by {guard}"
            assert text.rstrip().endswith("#endif")
