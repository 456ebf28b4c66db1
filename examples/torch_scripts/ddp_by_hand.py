"""Data-parallel training by hand: broadcast the weights, average the gradients.

    python -m devicemesh run -n 4 examples/torch_scripts/ddp_by_hand.py
    torchrun --nproc-per-node=4 examples/torch_scripts/ddp_by_hand.py torch.distributed

The argument names the module to use in the place of torch.distributed; nothing else differs.
"""

import importlib
import json
import sys

import numpy as np

MODULE = sys.argv[1] if len(sys.argv) > 1 else "devicemesh.distributed"
ARRAYS = sys.argv[2] if len(sys.argv) > 2 else "torch" if MODULE.startswith("torch") else "numpy"
dist = importlib.import_module(MODULE)

BATCH, STEPS, RATE = 64, 20, 0.2


def tensor(array):
    """What is handed to `dist`: the array, or a torch tensor over the same memory."""
    return importlib.import_module("torch").from_numpy(array) if ARRAYS == "torch" else array


def gradients(weights, bias, x, y):
    off = x @ weights + bias - y
    return x.T @ off / len(x), np.array([off.mean()])


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    data = np.random.default_rng(0)
    x = data.normal(size=(BATCH, 3))
    y = x @ np.array([1.0, -2.0, 3.0]) + 0.5
    mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)

    start = np.random.default_rng(rank)  # each rank its own; that of rank 0 counts
    weights, bias = start.normal(size=3), start.normal(size=1)
    for parameter in (weights, bias):
        dist.broadcast(tensor(parameter), src=0)

    for _ in range(STEPS):
        grads = gradients(weights, bias, x[mine], y[mine])
        works = [
            dist.all_reduce(tensor(each), op=dist.ReduceOp.SUM, async_op=True) for each in grads
        ]
        for work in works:
            work.wait()
        for parameter, grad in zip((weights, bias), grads, strict=True):
            parameter -= RATE * grad / size

    loss = np.array([np.square(x[mine] @ weights + bias - y[mine]).mean() / size])
    dist.all_reduce(tensor(loss))
    everywhere = [np.empty(3) for _ in range(size)]
    dist.all_gather([tensor(each) for each in everywhere], tensor(weights))
    assert all(np.array_equal(each, weights) for each in everywhere)
    dist.barrier()
    if rank == 0:
        print(json.dumps({"weights": [*weights, *bias], "loss": loss[0]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
