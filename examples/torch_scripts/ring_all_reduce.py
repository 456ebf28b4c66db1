"""All-reduce as a ring of isend and irecv: pieces travel round twice.

    python -m devicemesh run -n 4 examples/torch_scripts/ring_all_reduce.py
    torchrun --nproc-per-node=4 examples/torch_scripts/ring_all_reduce.py torch.distributed

The argument names the module to use in the place of torch.distributed; nothing else differs.
"""

import importlib
import json
import sys

import numpy as np

MODULE = sys.argv[1] if len(sys.argv) > 1 else "devicemesh.distributed"
ARRAYS = sys.argv[2] if len(sys.argv) > 2 else "torch" if MODULE.startswith("torch") else "numpy"
dist = importlib.import_module(MODULE)

ELEMENTS = 100_003  # pieces are not equal


def tensor(array):
    """What is handed to `dist`: the array, or a torch tensor over the same memory."""
    return importlib.import_module("torch").from_numpy(array) if ARRAYS == "torch" else array


def exchange(out, into, left, right):
    """Sends to the right while it receives from the left."""
    sending = dist.isend(tensor(out), dst=right)
    receiving = dist.irecv(tensor(into), src=left)
    sending.wait()
    receiving.wait()


def ring_all_reduce(array):
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    pieces = np.array_split(array, size)
    for step in range(size - 1):  # afterwards piece rank + 1 is complete here
        into = np.empty_like(pieces[(rank - step - 1) % size])
        exchange(pieces[(rank - step) % size], into, left, right)
        pieces[(rank - step - 1) % size] += into
    for step in range(size - 1):
        exchange(pieces[(rank - step + 1) % size], pieces[(rank - step) % size], left, right)


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = np.arange(ELEMENTS, dtype="f8")
    array = numbers * (rank + 1)
    ring_all_reduce(array)
    assert np.array_equal(array, numbers * (size * (size + 1) // 2))

    # The same exchange as one batch.
    got = np.empty(1)
    batch = [
        dist.P2POp(dist.irecv, tensor(got), (rank - 1) % size),
        dist.P2POp(dist.isend, tensor(np.array([float(rank)])), (rank + 1) % size),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert got[0] == (rank - 1) % size
    dist.barrier()
    if rank == 0:
        print(json.dumps({"sum": array.sum(), "last": array[-1]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
