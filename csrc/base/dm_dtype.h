/* Element types and reduce operations: the vocabulary shared by all layers. */
#ifndef DM_DTYPE_H
#define DM_DTYPE_H

#include <stdbool.h>
#include <stddef.h>

typedef enum dm_dtype {
    DM_BOOL,
    DM_INT8,
    DM_INT16,
    DM_INT32,
    DM_INT64,
    DM_UINT8,
    DM_UINT16,
    DM_UINT32,
    DM_UINT64,
    DM_FLOAT16,
    DM_BFLOAT16,
    DM_FLOAT32,
    DM_FLOAT64,
    DM_COMPLEX64,
    DM_COMPLEX128,
    DM_FLOAT8_E4M3,
    DM_FLOAT8_E5M2,
    DM_DTYPE_COUNT,
} dm_dtype;

typedef enum dm_reduce_op {
    DM_SUM,
    DM_PRODUCT,
    DM_MIN,
    DM_MAX,
    DM_AVG,
    DM_BAND,
    DM_BOR,
    DM_BXOR,
    DM_PREMUL_SUM,
    DM_REDUCE_OP_COUNT,
} dm_reduce_op;

/* Bytes of one element. */
size_t
dm_dtype_size(dm_dtype dtype);

/* numpy's name: "float32", "bfloat16", ... */
const char *
dm_dtype_name(dm_dtype dtype);

/* The dtype of that name; false when there is none. */
bool
dm_dtype_parse(const char *name, dm_dtype *dtype);

/* torch.distributed's name in lower case: "sum", "product", "avg", ... */
const char *
dm_reduce_op_name(dm_reduce_op op);

bool
dm_reduce_op_parse(const char *name, dm_reduce_op *op);

#endif
