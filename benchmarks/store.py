"""A store's client and server beside torch's TCPStore, on loopback.

usage: python benchmarks/store.py [--rounds 30] [--calls 200] [--json FILE]   (a python with torch)

Four pairs of client and server, devicemesh's and torch's, take turns in every round; each
server runs in a process of its own. Figures are seconds for one call:

- connect: TCPStore(host, port) until it is usable (median of 20).
- set, get, add: one call; the key that get reads is there.
- wake: between two processes that wait for each other's key by turns, from the set of the
  one to the end of the other's wait.
"""

import argparse
import statistics
import subprocess
import sys
import time

import report

SIDES = ("devicemesh", "torch")
PAIRS = [(client, server) for server in SIDES for client in SIDES]
OPERATIONS = ("connect", "set", "get", "add", "wake")

CONNECT = {
    "devicemesh": """
import devicemesh
def connect(port):
    return devicemesh.TCPStore("127.0.0.1", port)
""",
    "torch": """
import torch.distributed
def connect(port):
    return torch.distributed.TCPStore("127.0.0.1", port)
""",
}
SERVE = {
    "devicemesh": "server = devicemesh.StoreServer()",
    "torch": "server = torch.distributed.TCPStore('127.0.0.1', 0, None, True)",
}
SERVER = """
import sys
{serve}
print(server.port, flush=True)
sys.stdin.read()
"""
# Answers "ping/<i>" by "pong/<i>".
PARTNER = """
import sys
store = connect(int(sys.argv[1]))
for line in sys.stdin:
    first, calls = map(int, line.split())
    print("ready", flush=True)
    for i in range(first, first + calls):
        store.wait([f"ping/{i}"])
        store.set(f"pong/{i}", "1")
    print("done", flush=True)
"""


class Child:
    """A process that runs `code` and is told what to do by lines."""

    def __init__(self, code, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # torch's server comments on connections that end
            text=True,
        )

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"process {self.process.pid} has ended early")
        return line.strip()

    def tell(self, line):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def end(self):
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Pair:
    """One kind of client at one kind of server."""

    def __init__(self, client, server):
        self.children = []
        self.count = 0
        scope = {}
        exec(CONNECT[client], scope)
        self.connect = scope["connect"]
        self.port = int(self.start(CONNECT[server] + SERVER.format(serve=SERVE[server])).read())
        self.store = self.connect(self.port)
        self.store.set("there", b"x" * 100)
        self.partner = self.start(CONNECT[client] + PARTNER, self.port)

    def start(self, code, *arguments):
        child = Child(code, *arguments)
        self.children.append(child)
        return child

    def measure(self, operation, calls):
        """Seconds for one call: the mean of `calls`, or of connecting the median."""
        return getattr(self, f"measure_{operation}")(calls) / calls

    def measure_connect(self, calls):
        # Torch's client sometimes stands still for seconds (it asks the name service), which
        # a mean would be all about.
        times, stores = [], []
        for _ in range(calls):
            start = time.perf_counter()
            stores.append(self.connect(self.port))
            times.append(time.perf_counter() - start)
        return statistics.median(times) * calls

    def measure_set(self, calls):
        set_value, value = self.store.set, b"x" * 100
        start = time.perf_counter()
        for _ in range(calls):
            set_value("key", value)
        self.store.add("n", 0)  # the last of them has arrived
        return time.perf_counter() - start

    def measure_get(self, calls):
        get = self.store.get
        start = time.perf_counter()
        for _ in range(calls):
            get("there")
        return time.perf_counter() - start

    def measure_add(self, calls):
        add = self.store.add
        start = time.perf_counter()
        for _ in range(calls):
            add("n", 1)
        return time.perf_counter() - start

    def measure_wake(self, calls):
        first = self.count
        self.count += calls
        store = self.store
        self.partner.tell(f"{first} {calls}")
        self.partner.read()
        start = time.perf_counter()
        for i in range(first, first + calls):
            store.set(f"ping/{i}", "1")
            store.wait([f"pong/{i}"])
        taken = time.perf_counter() - start
        self.partner.read()
        return taken / 2  # there and back

    def end(self):
        del self.store
        for child in reversed(self.children):
            child.end()


def rotated(items, n):
    """Nobody comes always first, or always behind the same one."""
    n %= len(items)
    items = items[n:] + items[:n]
    return items if n % 2 else items[::-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--json")
    options = parser.parse_args()

    pairs = {f"{client} at {server}": Pair(client, server) for client, server in PAIRS}
    times = {operation: {name: [] for name in pairs} for operation in OPERATIONS}
    try:
        for i in range(options.rounds + 1):
            for operation in OPERATIONS:
                calls = min(options.calls, 20) if operation == "connect" else options.calls
                for name in rotated(list(pairs), i):
                    seconds = pairs[name].measure(operation, calls)
                    if i > 0:  # the first round warms up
                        times[operation][name].append(seconds)
    finally:
        for pair in pairs.values():
            pair.end()

    results, ratios = {}, {}
    for operation in OPERATIONS:
        results[operation] = {
            name: report.summary(values) for name, values in times[operation].items()
        }
        for name, measured in results[operation].items():
            scaled = {
                key: [1e6 * each for each in value] if isinstance(value, list) else 1e6 * value
                for key, value in measured.items()
            }
            report.show(f"{operation}, {name}", {**scaled, "n": measured["n"]}, "us")
        medians = {name: measured["median"] for name, measured in results[operation].items()}
        ratios[operation] = medians["torch at torch"] / medians["devicemesh at devicemesh"]
        print(f"{operation}: {ratios[operation]:.1f} times as fast as torch", flush=True)
    report.write(options.json, calls=options.calls, seconds=results, ratios=ratios)


if __name__ == "__main__":
    main()
