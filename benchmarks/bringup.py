"""From nothing to a usable (2, 4) mesh on 8 local processes: devicemesh beside torch.

usage: python benchmarks/bringup.py [--rounds 5] [--json FILE]    (a python with torch)

Both sides run the same script but for the imports, started the same way: 8 interpreters with
torchrun's variables set, MASTER_ADDR=127.0.0.1, rank 0 serving the store. A mesh is usable
when an all_reduce of one number has gone through on both of its dims. Rounds are interleaved.

- whole: from before the first process is started until the last rank's mesh is usable.
- after imports: ranks wait until all have done their imports; from then on.
"""

import argparse
import os
import socket
import subprocess
import sys
import time

import report

SHAPE, DIMS = (2, 4), ("replicate", "model_parallel")
RANKS = 8

IMPORTS = {
    "devicemesh": """
from array import array
from devicemesh import init_device_mesh
def all_reduce(group):
    group.all_reduce(array("d", [1.0]))
""",
    "torch": """
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
def all_reduce(group):
    torch.distributed.all_reduce(torch.ones(1, dtype=torch.float64), group=group)
""",
}
BODY = f"""
import sys
if sys.argv[1] == "wait":
    print("imported", flush=True)
    sys.stdin.readline()
mesh = init_device_mesh("cpu", {SHAPE}, mesh_dim_names={DIMS})
for name in {DIMS}:
    all_reduce(mesh.get_group(name))
print("usable", flush=True)
sys.stdin.read()  # nobody leaves while others may still need it
import os
os._exit(0)
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def expect(processes, word):
    """Waits until each process has said `word`."""
    for process in processes:
        line = process.stdout.readline().strip()
        if line != word:
            raise SystemExit(f"a rank said {line!r} where {word!r} was due")


def once(side, wait):
    """Seconds until the mesh was usable on all ranks."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    world = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    base = {name: value for name, value in os.environ.items() if "TORCHELASTIC" not in name}
    processes = []
    try:
        start = time.perf_counter()
        for rank in range(RANKS):
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", IMPORTS[side] + BODY, "wait" if wait else "go"],
                    env={**base, **address, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        if wait:
            expect(processes, "imported")
            start = time.perf_counter()
            for process in processes:
                process.stdin.write("\n")
                process.stdin.flush()
        expect(processes, "usable")
        return time.perf_counter() - start
    finally:
        for process in processes:
            process.stdin.close()
        for process in processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()

    results, ratios = {}, {}
    for phase, wait in (("whole", False), ("after imports", True)):
        times = {side: [] for side in IMPORTS}
        for side in IMPORTS:
            once(side, wait)  # warms the file cache
        for _ in range(options.rounds):
            for side in IMPORTS:
                times[side].append(once(side, wait))
        results[phase] = {side: report.summary(values) for side, values in times.items()}
        for side, measured in results[phase].items():
            report.show(f"{phase}, {side}", measured)
        medians = {side: measured["median"] for side, measured in results[phase].items()}
        ratios[phase] = medians["torch"] / medians["devicemesh"]
        print(f"{phase}: {ratios[phase]:.1f} times as fast as torch", flush=True)
    report.write(options.json, ranks=RANKS, shape=SHAPE, seconds=results, ratios=ratios)


if __name__ == "__main__":
    main()
