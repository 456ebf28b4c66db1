"""Looks at a built wheel, installs it alone into a fresh environment, and lets four ranks
meet there. usage: check_wheel.py WHEEL"""

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RANK = """
from array import array
from devicemesh import init_device_mesh
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
value = array("d", [mesh.get_rank()])
mesh.get_group("a").all_reduce(value)
mesh.get_group("b").all_reduce(value)
assert value[0] == 6, value
"""


def check_contents(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {str(path.relative_to(ROOT)) for path in ROOT.glob("devicemesh/**/*.py*")}
    wanted = {name for name in wanted if "__pycache__" not in name} | {"devicemesh/_gloo.so"}
    missing = sorted(wanted - names)
    extra = sorted(name for name in names if name.split("/")[0] in ("tests", "csrc", "benchmarks"))
    core = [name for name in names if name.startswith("devicemesh/_core.cpython")]
    if missing or extra or len(core) != 1:
        sys.exit(f"{wheel}: missing {missing}, should not be there {extra}, core {core}")


def check_use(wheel):
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheel], check=True)
        script = Path(folder, "rank.py")
        script.write_text(RANK)
        command = [python, "-m", "devicemesh", "run", "-n", "4", "--timeout", "60", str(script)]
        subprocess.run(command, check=True, cwd=folder)


if __name__ == "__main__":
    check_contents(sys.argv[1])
    check_use(sys.argv[1])
    print(f"{Path(sys.argv[1]).name}: complete, and it works on its own")
