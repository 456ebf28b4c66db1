"""How long `import devicemesh` takes beside `import socket`: whole interpreters, interleaved.

usage: python benchmarks/import_time.py [--rounds 40] [--json FILE]
"""

import argparse
import subprocess
import sys
import time

import report

SIDES = {"devicemesh": "import devicemesh", "socket": "import socket", "nothing": "pass"}


def once(code):
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json")
    options = parser.parse_args()

    times = {name: [] for name in SIDES}
    for code in SIDES.values():
        once(code)  # compiles and warms the file cache
    for _ in range(options.rounds):
        for name, code in SIDES.items():
            times[name].append(once(code))
    results = {name: report.summary(values) for name, values in times.items()}
    for name, measured in results.items():
        report.show(f"python -c {SIDES[name]!r}", measured)
    ratio = results["devicemesh"]["median"] / results["socket"]["median"]
    print(f"ratio devicemesh / socket: {ratio:.2f}")
    report.write(options.json, seconds=results, ratio=ratio)


if __name__ == "__main__":
    main()
