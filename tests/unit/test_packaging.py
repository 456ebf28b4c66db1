"""What `import devicemesh` brings along, and what the distributions contain."""

import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import devicemesh

ROOT = Path(__file__).parents[2]

# What an import may load beyond what a bare interpreter has. Small modules of the standard
# library only: the rest of it, numpy, torch and gloo wait until somebody needs them.
ALLOWED = {"atexit"}


def python(code):
    """Runs code in a fresh interpreter; its stdout."""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_import_loads_little():
    code = "import sys; a = set(sys.modules); import devicemesh; print(*set(sys.modules) - a)"
    loaded = set(python(code).split())
    ours = {name for name in loaded if name.split(".")[0] == "devicemesh"}
    assert loaded - ours <= ALLOWED
    assert not any(name.startswith(("devicemesh.launch", "devicemesh.testing")) for name in ours)


def test_import_maps_no_library_but_the_core():
    code = "import devicemesh; print(open('/proc/self/maps').read())"
    maps = python(code)
    assert "_core" in maps
    for library in ("gloo", "stdc++", "cuda", "nccl", "torch"):
        assert library not in maps


def test_import_starts_no_thread_and_opens_no_descriptor():
    code = (
        "import os; fds = lambda: len(os.listdir('/proc/self/fd')); a = fds(); import devicemesh; "
        "print(fds() - a, len(os.listdir('/proc/self/task')))"
    )
    assert python(code).split() == ["0", "1"]


def test_all_names_exist():
    for name in devicemesh.__all__:
        assert hasattr(devicemesh, name), name


def test_version_is_the_distributions():
    from importlib import metadata

    try:
        version = metadata.version("devicemesh")
    except metadata.PackageNotFoundError:
        pytest.skip("not installed: running from the tree")
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()


def test_plugin_is_announced_to_pytest():
    from importlib import metadata

    plugins = metadata.entry_points(group="pytest11")
    if "devicemesh.testing.plugin" not in plugins.names:
        pytest.skip("not installed: running from the tree")
    assert plugins["devicemesh.testing.plugin"].load().__name__ == "devicemesh.testing.plugin"


def test_source_distribution_is_complete(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path)]
    command += ["sdist", "-d", str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = {"README.md", "LICENSE", "Makefile", "setup.py", "pyproject.toml", "MANIFEST.in"}
    wanted |= {"devicemesh/py.typed", "scripts/system_packages.sh"}
    for folder in ("csrc", "devicemesh", "tests", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".c", ".h", ".cc", ".map", ".md", ".py", ".pyi"}:
                wanted.add(str(path.relative_to(ROOT)))
    assert wanted - names == set()
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]


def test_version_is_that_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert devicemesh.__version__ == project["version"]
