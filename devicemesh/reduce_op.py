"""Names of the reduce operations."""


class ReduceOp:
    """How reductions combine elements. The members are the names themselves, so
    `op="max"` and `op=ReduceOp.MAX` are the same.

    Example:
        >>> from devicemesh import ReduceOp
        >>> ReduceOp.MAX
        'max'
    """

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AVG = "avg"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
