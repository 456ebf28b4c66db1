/* Reduce kernels: see dm_reduce.h. What there is stands in dm_kernels.h; here are the
 * functions for any processor, what averages and scaled sums do besides, and the choice.
 */
#include "backend/reduce/dm_reduce.h"

#include <assert.h>

#include "backend/reduce/dm_kernels.h"

#define DEFINE_ANY(dtype, op, name, type, value) DEFINE_KERNEL(, name, type, value)

KERNELS(DEFINE_ANY)

static const dm_kernel_table kernels = {KERNELS(KERNEL_ENTRY)};

#define DEFINE_ANY_ACCUMULATOR(dtype, op, name, type, format, operator)                \
    DEFINE_ACCUMULATOR(, name, type, format, operator)

ACCUMULATORS(DEFINE_ANY_ACCUMULATOR)

static const dm_accumulator_table accumulators = {ACCUMULATORS(ACCUMULATOR_ENTRY)};

/* The end of an average: D(dtype, name of the function, element type, value): x is the
 * element, n the number of members. Integers divide towards zero. */
#define DIVISIONS(D)                                                                   \
    D(INT8, divide_int8, i8, (i8)(x / n))                                              \
    D(INT16, divide_int16, i16, (i16)(x / n))                                          \
    D(INT32, divide_int32, i32, x / n)                                                 \
    D(INT64, divide_int64, i64, x / n)                                                 \
    D(UINT8, divide_uint8, u8, (u8)(x / n))                                            \
    D(UINT16, divide_uint16, u16, (u16)(x / n))                                        \
    D(UINT32, divide_uint32, u32, x / (uint32_t)n)                                     \
    D(UINT64, divide_uint64, u64, x / (uint64_t)n)                                     \
    D(FLOAT16, divide_float16, u16, dm_round_float16(dm_widen_float16(x) / (float)n))  \
    D(BFLOAT16, divide_bfloat16, u16,                                                  \
      dm_round_bfloat16(dm_widen_bfloat16(x) / (float)n))                              \
    D(FLOAT32, divide_float32, f32, x / (float)n)                                      \
    D(FLOAT64, divide_float64, f64, x / n)                                             \
    D(COMPLEX64, divide_complex64, c64, ((c64){x.re / (float)n, x.im / (float)n}))     \
    D(COMPLEX128, divide_complex128, c128, ((c128){x.re / n, x.im / n}))               \
    D(FLOAT8_E4M3, divide_float8_e4m3, u8,                                             \
      dm_round_float8_e4m3(dm_widen_float8_e4m3(x) / (float)n))                        \
    D(FLOAT8_E5M2, divide_float8_e5m2, u8,                                             \
      dm_round_float8_e5m2(dm_widen_float8_e5m2(x) / (float)n))

#define DEFINE_DIVISION(dtype, name, type, value)                                      \
    static void name(void *data, size_t count, int n)                                  \
    {                                                                                  \
        type *all = data;                                                              \
        for (size_t i = 0; i < count; i++) {                                           \
            type x = all[i];                                                           \
            all[i] = (value);                                                          \
        }                                                                              \
    }

DIVISIONS(DEFINE_DIVISION)

typedef void (*divide_fn)(void *data, size_t count, int n);

#define DIVISION_ENTRY(dtype, name, type, value) [DM_##dtype] = name,

static const divide_fn divisions[DM_DTYPE_COUNT] = {DIVISIONS(DIVISION_ENTRY)};

/* The beginning of a premul_sum: S(dtype, name of the function, element type, type of the
 * factor, value): x is the element, f the factor. */
#define SCALINGS(S)                                                                    \
    S(FLOAT16, scale_float16, u16, float, dm_round_float16(dm_widen_float16(x) * f))   \
    S(BFLOAT16, scale_bfloat16, u16, float,                                            \
      dm_round_bfloat16(dm_widen_bfloat16(x) * f))                                     \
    S(FLOAT32, scale_float32, f32, float, (x * f))                                     \
    S(FLOAT64, scale_float64, f64, double, (x * f))                                    \
    S(COMPLEX64, scale_complex64, c64, float, ((c64){x.re * f, x.im * f}))             \
    S(COMPLEX128, scale_complex128, c128, double, ((c128){x.re * f, x.im * f}))        \
    S(FLOAT8_E4M3, scale_float8_e4m3, u8, float,                                       \
      dm_round_float8_e4m3(dm_widen_float8_e4m3(x) * f))                               \
    S(FLOAT8_E5M2, scale_float8_e5m2, u8, float,                                       \
      dm_round_float8_e5m2(dm_widen_float8_e5m2(x) * f))

#define DEFINE_SCALING(dtype, name, type, factor_type, value)                          \
    static void name(void *out, const void *in, size_t count, double factor)           \
    {                                                                                  \
        type *to = out;                                                                \
        const type *from = in;                                                         \
        factor_type f = (factor_type)factor;                                           \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                 \
        {                                                                              \
            type x = from[i];                                                          \
            to[i] = (value);                                                           \
        }                                                                              \
    }

SCALINGS(DEFINE_SCALING)

typedef void (*scale_fn)(void *out, const void *in, size_t count, double factor);

#define SCALING_ENTRY(dtype, name, type, factor_type, value) [DM_##dtype] = name,

static const scale_fn scalings[DM_DTYPE_COUNT] = {SCALINGS(SCALING_ENTRY)};

/* --- the choice -------------------------------------------------------------------- */

/* The op whose kernel combines: averages and scaled sums differ at their ends. */
static dm_reduce_op
combines_as(dm_reduce_op op)
{
    return op == DM_AVG || op == DM_PREMUL_SUM ? DM_SUM : op;
}

dm_reduce_fn
dm_reduce_lookup(dm_dtype dtype, dm_reduce_op op)
{
    assert((unsigned)dtype < DM_DTYPE_COUNT && (unsigned)op < DM_REDUCE_OP_COUNT);
    if ((op == DM_AVG && divisions[dtype] == NULL) ||
        (op == DM_PREMUL_SUM && scalings[dtype] == NULL)) {
        return NULL;
    }
    op = combines_as(op);
#if defined(__x86_64__) && !defined(DM_REDUCE_PORTABLE)
    dm_reduce_fn better = dm_reduce_lookup_x86(dtype, op);
    if (better != NULL) {
        return better;
    }
#endif
    return kernels[dtype][op];
}

const dm_accumulator *
dm_accumulator_lookup(dm_dtype dtype, dm_reduce_op op)
{
    op = combines_as(op);
    const dm_accumulator *any = &accumulators[dtype][op];
    if (any->start == NULL) {
        return NULL;
    }
#if defined(__x86_64__) && !defined(DM_REDUCE_PORTABLE)
    const dm_accumulator *better = dm_accumulator_x86(dtype, op);
    if (better != NULL) {
        return better;
    }
#endif
    return any;
}

void
dm_reduce_divide(void *data, size_t count, dm_dtype dtype, int n)
{
    divisions[dtype](data, count, n);
}

void
dm_reduce_scale(void *out, const void *in, size_t count, dm_dtype dtype, double factor)
{
    assert(scalings[dtype] != NULL);
    scalings[dtype](out, in, count, factor);
}

void
dm_reduce_finish(void *data, size_t count, dm_dtype dtype, dm_reduce_op op, int size)
{
    assert(size >= 1 && dm_reduce_lookup(dtype, op) != NULL);
    if (op == DM_AVG && size > 1) {
        dm_reduce_divide(data, count, dtype, size);
    }
}
