"""Names of the reduce operations."""


class PremulSum(str):
    """The op of `ReduceOp.premul_sum`: the name, with the factor beside it."""

    __slots__ = ("factor",)

    factor: float

    def __new__(cls, factor: float) -> "PremulSum":
        """Args: factor: What this rank's elements are multiplied with, a float."""
        op = super().__new__(cls, ReduceOp.PREMUL_SUM)
        op.factor = float(factor)
        return op

    def __repr__(self) -> str:
        return f"ReduceOp.premul_sum({self.factor!r})"

    def __reduce__(self) -> tuple[type, tuple[float]]:
        return PremulSum, (self.factor,)


class ReduceOp:
    """How reductions combine elements. The members are the names themselves, so
    `op="max"` and `op=ReduceOp.MAX` are the same.

    SUM, PRODUCT: of all types. Integers wrap, as numpy's do; of bools they are or and and.
    MIN, MAX: of all but complex. NaN if there is one; -0 is below 0.
    AVG: of all but bool. The sum divided by the number of ranks; integers are summed in their
        own width and divided towards zero.
    BAND, BOR, BXOR: of integers and bool, bit by bit.
    PREMUL_SUM: of floats and complex. Each rank's elements times its own factor, summed; made
        by `ReduceOp.premul_sum(factor)`.

    Floats follow IEEE 754: sums past the largest value are infinite (NaN in float8_e4m3fn,
    which has no infinity), infinity minus infinity is NaN, denormals count in full. float16,
    bfloat16 and float8 are added and multiplied in float32 and rounded to nearest even when
    a result is stored: once per element where one rank sees the values of all, else once per
    step between ranks. The order in which ranks are combined is not promised, but all ranks
    of an all_reduce get the same bits. The payload of a NaN is not promised.

    The names are torch.distributed's; PREMUL_SUM is NCCL's.

    Example:
        >>> from devicemesh import ReduceOp
        >>> ReduceOp.MAX
        'max'
        >>> ReduceOp.premul_sum(0.5)
        ReduceOp.premul_sum(0.5)
    """

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AVG = "avg"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    PREMUL_SUM = "premul_sum"

    @staticmethod
    def premul_sum(factor: float) -> PremulSum:
        """A sum of what each rank has multiplied with its factor first.

        The product is rounded to the elements' type, then summed.

        Args:
            factor: This rank's factor, a float; ranks may have different ones.

        Returns:
            An op: a string that carries the factor.

        Example:
            >>> import array, devicemesh
            >>> group = devicemesh.World(None, 0, 1).new_group([0])
            >>> values = array.array("f", [1, 2])
            >>> group.all_reduce(values, devicemesh.ReduceOp.premul_sum(0.5))
            >>> values.tolist()
            [0.5, 1.0]
        """
        return PremulSum(factor)
