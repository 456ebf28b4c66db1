"""Operations that are given together: methods of ProcessGroup, written in Python."""


class Coalescing:
    """What ProcessGroup.coalesce returns."""

    def __init__(self, group, async_op):
        self.group = group
        self.async_op = async_op
        self.works = []

    def __enter__(self):
        self.group._begin_batch()
        return self.works

    def __exit__(self, kind, error, traceback):
        if kind is not None:
            self.group._drop_batch()
            return
        self.works += self.group._end_batch()
        if not self.async_op:
            for work in self.works:
                work.wait()


def coalesce(group, async_op=False):
    return Coalescing(group, bool(async_op))


def batch_isend_irecv(group, ops):
    with coalesce(group, async_op=True) as works:
        for i, op in enumerate(ops):
            kind, *arguments = op
            if kind not in ("isend", "irecv"):
                raise ValueError(f"ops[{i}] must begin with 'isend' or 'irecv', got {kind!r}")
            if len(arguments) not in (2, 3):
                raise ValueError(
                    f"ops[{i}] must be (kind, array, peer) or (kind, array, peer, tag), "
                    f"it has {len(op)} entries"
                )
            getattr(group, kind)(*arguments)
    return works
