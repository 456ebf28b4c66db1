/* Element types and reduce operations: see dm_dtype.h. */
#include "base/dm_dtype.h"

#include <assert.h>
#include <string.h>

static const struct {
    const char *name;
    size_t size;
} dtypes[DM_DTYPE_COUNT] = {
    [DM_BOOL] = {"bool", 1},
    [DM_INT8] = {"int8", 1},
    [DM_INT16] = {"int16", 2},
    [DM_INT32] = {"int32", 4},
    [DM_INT64] = {"int64", 8},
    [DM_UINT8] = {"uint8", 1},
    [DM_UINT16] = {"uint16", 2},
    [DM_UINT32] = {"uint32", 4},
    [DM_UINT64] = {"uint64", 8},
    [DM_FLOAT16] = {"float16", 2},
    [DM_BFLOAT16] = {"bfloat16", 2},
    [DM_FLOAT32] = {"float32", 4},
    [DM_FLOAT64] = {"float64", 8},
    [DM_COMPLEX64] = {"complex64", 8},
    [DM_COMPLEX128] = {"complex128", 16},
    [DM_FLOAT8_E4M3] = {"float8_e4m3fn", 1},
    [DM_FLOAT8_E5M2] = {"float8_e5m2", 1},
};

static const char *const reduce_ops[DM_REDUCE_OP_COUNT] = {
    [DM_SUM] = "sum", [DM_PRODUCT] = "product", [DM_MIN] = "min",
    [DM_MAX] = "max", [DM_AVG] = "avg",         [DM_BAND] = "band",
    [DM_BOR] = "bor", [DM_BXOR] = "bxor",       [DM_PREMUL_SUM] = "premul_sum",
};

size_t
dm_dtype_size(dm_dtype dtype)
{
    assert((unsigned)dtype < DM_DTYPE_COUNT);
    return dtypes[dtype].size;
}

const char *
dm_dtype_name(dm_dtype dtype)
{
    assert((unsigned)dtype < DM_DTYPE_COUNT);
    return dtypes[dtype].name;
}

bool
dm_dtype_parse(const char *name, dm_dtype *dtype)
{
    for (int i = 0; i < DM_DTYPE_COUNT; i++) {
        if (strcmp(dtypes[i].name, name) == 0) {
            *dtype = (dm_dtype)i;
            return true;
        }
    }
    return false;
}

const char *
dm_reduce_op_name(dm_reduce_op op)
{
    assert((unsigned)op < DM_REDUCE_OP_COUNT);
    return reduce_ops[op];
}

bool
dm_reduce_op_parse(const char *name, dm_reduce_op *op)
{
    for (int i = 0; i < DM_REDUCE_OP_COUNT; i++) {
        if (strcmp(reduce_ops[i], name) == 0) {
            *op = (dm_reduce_op)i;
            return true;
        }
    }
    return false;
}
