"""What it costs to call an operation that does nothing: the fake backend, a world of one.

Ours on a numpy array and on a torch tensor, by the group's method and by
devicemesh.distributed; torch's fake backend in the same process, likewise. The sides are
interleaved. `all_reduce` of four floats; `empty call` is a method call without an operation.

usage: python benchmarks/dispatch.py [--rounds 40] [--calls 5000] [--json FILE]
"""

import argparse
import time

import numpy as np
import report

import devicemesh.distributed as ours

try:
    import torch
    import torch.distributed as theirs
    from torch.testing._internal.distributed.fake_pg import FakeStore
except ImportError:
    torch = None


def our_sides():
    ours.init_process_group("fake", rank=0, world_size=1)
    group = ours.group.WORLD
    array = np.ones(4, "f4")
    yield "devicemesh: empty call (group.rank())", group.rank, ()
    yield "devicemesh: group.all_reduce(numpy)", group.all_reduce, (array,)
    yield "devicemesh: dist.all_reduce(numpy)", ours.all_reduce, (array,)
    if torch is not None:
        yield "devicemesh: group.all_reduce(tensor)", group.all_reduce, (torch.ones(4),)
        yield "devicemesh: dist.all_reduce(tensor)", ours.all_reduce, (torch.ones(4),)


def their_sides():
    theirs.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    group = theirs.group.WORLD
    yield "torch: empty call (group.rank())", group.rank, ()
    yield "torch: group.allreduce(tensor)", group.allreduce, (torch.ones(4),)
    yield "torch: dist.all_reduce(tensor)", theirs.all_reduce, (torch.ones(4),)


def once(call, arguments, calls):
    """Seconds for one call, of many."""
    start = time.perf_counter()
    for _ in range(calls):
        call(*arguments)
    return (time.perf_counter() - start) / calls


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--json")
    options = parser.parse_args()

    sides = {name: (call, arguments) for name, call, arguments in our_sides()}
    if torch is not None:
        sides |= {name: (call, arguments) for name, call, arguments in their_sides()}
    times = {name: [] for name in sides}
    for call, arguments in sides.values():
        once(call, arguments, 100)
    for _ in range(options.rounds):
        for name, (call, arguments) in sides.items():
            times[name].append(once(call, arguments, options.calls))
    results = {name: report.summary(values) for name, values in times.items()}
    for name, measured in results.items():
        report.show(name, report.summary([1e6 * each for each in measured["values"]]), "us")
    report.write(options.json, seconds=results)
    ours.destroy_process_group()
    if torch is not None:
        theirs.destroy_process_group()


if __name__ == "__main__":
    main()
