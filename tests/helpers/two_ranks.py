"""Two ranks in one process: each a world of its own, over one store in memory."""

import threading

from devicemesh import HashStore, World


def run_two(body, timeout=60):
    """`body(world)` on both ranks at once, rank 0 on this thread. The two results; an
    exception of either is raised."""
    store = HashStore()
    results, errors = [None, None], []

    def play(rank):
        with World(store, rank, 2, timeout) as world:
            try:
                results[rank] = body(world)
            except BaseException as error:
                errors.append(error)

    other = threading.Thread(target=play, args=(1,))
    other.start()
    play(0)
    other.join()
    store.close()
    if errors:
        raise errors[0]
    return results
