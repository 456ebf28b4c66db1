/* The list of reduce kernels and how one is made of a line of it. Private to reduce.
 *
 * KERNELS is expanded into functions and into tables, once for any processor and once
 * more for those that can do better. In a line x and y are the elements of a and b, and
 * the value is that of out.
 *
 * The loops have no aliasing promise to give (out may be a or b), but no iteration
 * reads what another one writes: that is what INDEPENDENT says, and the loops
 * vectorise. The element types may lie anywhere and alias anything, as bytes do.
 */
#ifndef DM_KERNELS_H
#define DM_KERNELS_H

#include <stdint.h>
#include <string.h>

#include "backend/reduce/dm_narrow.h"
#include "backend/reduce/dm_reduce.h"

#define ANYWHERE __attribute__((aligned(1), may_alias))

typedef uint8_t u8 ANYWHERE;
typedef uint16_t u16 ANYWHERE;
typedef uint32_t u32 ANYWHERE;
typedef uint64_t u64 ANYWHERE;
typedef int8_t i8 ANYWHERE;
typedef int16_t i16 ANYWHERE;
typedef int32_t i32 ANYWHERE;
typedef int64_t i64 ANYWHERE;
typedef float f32 ANYWHERE;
typedef double f64 ANYWHERE;
typedef struct c64 {
    float re, im;
} __attribute__((packed, may_alias)) c64;
typedef struct c128 {
    double re, im;
} __attribute__((packed, may_alias)) c128;

/* --- elements -------------------------------------------------------------------- */

static inline uint64_t
dm_double_bits(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline double
dm_double_from_bits(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* The smaller of x and y, given as values and as bits. Symmetric to the bit, so that
 * ranks which combine the same values in another order agree: of two zeros it is -0
 * (equal values have equal bits else), and a NaN's bits stay a NaN's with others
 * or'ed in. */
#define MIN_BITS(x, y, xbits, ybits)                                                   \
    ((x) < (y) ? (xbits) : (x) > (y) ? (ybits) : ((xbits) | (ybits)))

#define MAX_BITS(x, y, xbits, ybits)                                                   \
    ((x) > (y)   ? (xbits)                                                             \
     : (x) < (y) ? (ybits)                                                             \
                 : ((x) == (y) ? ((xbits) & (ybits)) : ((xbits) | (ybits))))

#define MIN_FLOAT(x, y)                                                                \
    dm_float_from_bits(MIN_BITS(x, y, dm_float_bits(x), dm_float_bits(y)))
#define MAX_FLOAT(x, y)                                                                \
    dm_float_from_bits(MAX_BITS(x, y, dm_float_bits(x), dm_float_bits(y)))
#define MIN_DOUBLE(x, y)                                                               \
    dm_double_from_bits(MIN_BITS(x, y, dm_double_bits(x), dm_double_bits(y)))
#define MAX_DOUBLE(x, y)                                                               \
    dm_double_from_bits(MAX_BITS(x, y, dm_double_bits(x), dm_double_bits(y)))

/* --- the list ---------------------------------------------------------------------- */

/* K(dtype, op, name of the function, element type, value) */

/* Any byte but 0 is true, and results are 0 or 1. */
#define BOOL_KERNELS(K)                                                                \
    K(BOOL, SUM, sum_bool, u8, (x | y) != 0)                                           \
    K(BOOL, PRODUCT, product_bool, u8, (x != 0) & (y != 0))                            \
    K(BOOL, MIN, min_bool, u8, (x != 0) & (y != 0))                                    \
    K(BOOL, MAX, max_bool, u8, (x | y) != 0)                                           \
    K(BOOL, BAND, band_bool, u8, (x != 0) & (y != 0))                                  \
    K(BOOL, BOR, bor_bool, u8, (x | y) != 0)                                           \
    K(BOOL, BXOR, bxor_bool, u8, (x != 0) ^ (y != 0))

/* Sums and products wrap: they are computed unsigned, in int's width at least (so that
 * two uint16_t do not become int). */
#define INTEGER_KERNELS(K, dtype, name, type, unsigned_type)                           \
    K(dtype, SUM, sum_##name, type, (type)((unsigned_type)x + (unsigned_type)y))       \
    K(dtype, PRODUCT, product_##name, type,                                            \
      (type)(1u * (unsigned_type)x * (unsigned_type)y))                                \
    K(dtype, MIN, min_##name, type, x < y ? x : y)                                     \
    K(dtype, MAX, max_##name, type, x > y ? x : y)                                     \
    K(dtype, BAND, band_##name, type, (type)(x & y))                                   \
    K(dtype, BOR, bor_##name, type, (type)(x | y))                                     \
    K(dtype, BXOR, bxor_##name, type, (type)(x ^ y))

#define FLOAT_KERNELS(K, dtype, name, type, min, max)                                  \
    K(dtype, SUM, sum_##name, type, (x + y))                                           \
    K(dtype, PRODUCT, product_##name, type, (x * y))                                   \
    K(dtype, MIN, min_##name, type, min(x, y))                                         \
    K(dtype, MAX, max_##name, type, max(x, y))

#define NARROW_KERNELS(K, dtype, name, type)                                           \
    K(dtype, SUM, sum_##name, type,                                                    \
      dm_round_##name(dm_widen_##name(x) + dm_widen_##name(y)))                        \
    K(dtype, PRODUCT, product_##name, type,                                            \
      dm_round_##name(dm_widen_##name(x) * dm_widen_##name(y)))                        \
    K(dtype, MIN, min_##name, type,                                                    \
      (type)MIN_BITS(dm_widen_##name(x), dm_widen_##name(y), x, y))                    \
    K(dtype, MAX, max_##name, type,                                                    \
      (type)MAX_BITS(dm_widen_##name(x), dm_widen_##name(y), x, y))

/* The plain product, as numpy's: C's own repairs infinities and does not vectorise. */
#define COMPLEX_KERNELS(K, dtype, name, type)                                          \
    K(dtype, SUM, sum_##name, type, ((type){x.re + y.re, x.im + y.im}))                \
    K(dtype, PRODUCT, product_##name, type,                                            \
      ((type){x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re}))

#define KERNELS(K)                                                                     \
    BOOL_KERNELS(K)                                                                    \
    INTEGER_KERNELS(K, INT8, int8, i8, u8)                                             \
    INTEGER_KERNELS(K, INT16, int16, i16, u16)                                         \
    INTEGER_KERNELS(K, INT32, int32, i32, u32)                                         \
    INTEGER_KERNELS(K, INT64, int64, i64, u64)                                         \
    INTEGER_KERNELS(K, UINT8, uint8, u8, u8)                                           \
    INTEGER_KERNELS(K, UINT16, uint16, u16, u16)                                       \
    INTEGER_KERNELS(K, UINT32, uint32, u32, u32)                                       \
    INTEGER_KERNELS(K, UINT64, uint64, u64, u64)                                       \
    NARROW_KERNELS(K, FLOAT16, float16, u16)                                           \
    NARROW_KERNELS(K, BFLOAT16, bfloat16, u16)                                         \
    FLOAT_KERNELS(K, FLOAT32, float32, f32, MIN_FLOAT, MAX_FLOAT)                      \
    FLOAT_KERNELS(K, FLOAT64, float64, f64, MIN_DOUBLE, MAX_DOUBLE)                    \
    COMPLEX_KERNELS(K, COMPLEX64, complex64, c64)                                      \
    COMPLEX_KERNELS(K, COMPLEX128, complex128, c128)                                   \
    NARROW_KERNELS(K, FLOAT8_E4M3, float8_e4m3, u8)                                    \
    NARROW_KERNELS(K, FLOAT8_E5M2, float8_e5m2, u8)

/* A(dtype, op, name, element type, operator): what accumulates in float32. */
#define ACCUMULATORS(A)                                                                \
    A(FLOAT16, SUM, sum_float16, u16, float16, +)                                      \
    A(FLOAT16, PRODUCT, product_float16, u16, float16, *)                              \
    A(BFLOAT16, SUM, sum_bfloat16, u16, bfloat16, +)                                   \
    A(BFLOAT16, PRODUCT, product_bfloat16, u16, bfloat16, *)                           \
    A(FLOAT8_E4M3, SUM, sum_float8_e4m3, u8, float8_e4m3, +)                           \
    A(FLOAT8_E4M3, PRODUCT, product_float8_e4m3, u8, float8_e4m3, *)                   \
    A(FLOAT8_E5M2, SUM, sum_float8_e5m2, u8, float8_e5m2, +)                           \
    A(FLOAT8_E5M2, PRODUCT, product_float8_e5m2, u8, float8_e5m2, *)

/* --- functions and tables ------------------------------------------------------------ */

#if defined(__clang__)
#    define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#    define INDEPENDENT _Pragma("GCC ivdep")
#endif

typedef dm_reduce_fn dm_kernel_table[DM_DTYPE_COUNT][DM_REDUCE_OP_COUNT];

/* `attributes` say which processor the function is for. */
#define DEFINE_KERNEL(attributes, name, type, value)                                   \
    attributes static void name(void *out, const void *a, const void *b, size_t count) \
    {                                                                                  \
        type *to = out;                                                                \
        const type *from_a = a, *from_b = b;                                           \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                 \
        {                                                                              \
            type x = from_a[i], y = from_b[i];                                         \
            to[i] = (value);                                                           \
        }                                                                              \
    }

#define KERNEL_ENTRY(dtype, op, name, type, value) [DM_##dtype][DM_##op] = name,

/* Many arrays of narrow floats with one rounding: sums = a op b, sums = sums op a ..., and
 * at last out = round(sums op a). */
typedef struct dm_accumulator {
    void (*start)(float *sums, const void *a, const void *b, size_t count);
    void (*add)(float *sums, const void *a, size_t count);
    void (*end)(void *out, const float *sums, const void *a, size_t count);
    void (*round)(void *out, const float *sums, size_t count);
} dm_accumulator;

typedef dm_accumulator dm_accumulator_table[DM_DTYPE_COUNT][DM_REDUCE_OP_COUNT];

#define DEFINE_ACCUMULATOR(attributes, name, type, format, operator)                   \
    attributes static void start_##name(float *sums, const void *a, const void *b,     \
                                        size_t count)                                  \
    {                                                                                  \
        const type *from_a = a, *from_b = b;                                           \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                 \
        {                                                                              \
            sums[i] =                                                                  \
                dm_widen_##format(from_a[i]) operator dm_widen_##format(from_b[i]);    \
        }                                                                              \
    }                                                                                  \
                                                                                       \
    attributes static void add_##name(float *sums, const void *a, size_t count)        \
    {                                                                                  \
        const type *from = a;                                                          \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                 \
        {                                                                              \
            sums[i] = sums[i] operator dm_widen_##format(from[i]);                     \
        }                                                                              \
    }                                                                                  \
                                                                                       \
    attributes static void end_##name(void *out, const float *sums, const void *a,     \
                                      size_t count)                                    \
    {                                                                                  \
        type *to = out;                                                                \
        const type *from = a;                                                          \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                 \
        {                                                                              \
            to[i] = dm_round_##format(sums[i] operator dm_widen_##format(from[i]));    \
        }                                                                              \
    }                                                                                  \
                                                                                       \
    attributes static void round_##name(void *out, const float *sums, size_t count)    \
    {                                                                                  \
        type *to = out;                                                                \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                 \
        {                                                                              \
            to[i] = dm_round_##format(sums[i]);                                        \
        }                                                                              \
    }

#define ACCUMULATOR_ENTRY(dtype, op, name, type, format, operator)                     \
    [DM_##dtype][DM_##op] = {start_##name, add_##name, end_##name, round_##name},

/* The kernel for this very processor, or NULL where the one for any is as good. */
dm_reduce_fn
dm_reduce_lookup_x86(dm_dtype dtype, dm_reduce_op op);

/* As dm_reduce_lookup_x86; the pair must have an accumulator. */
const dm_accumulator *
dm_accumulator_x86(dm_dtype dtype, dm_reduce_op op);

/* The accumulator of the pair, or NULL where elements combine without rounding or in
 * their own width. */
const dm_accumulator *
dm_accumulator_lookup(dm_dtype dtype, dm_reduce_op op);

/* Divides each element by n; the dtype must have averages. */
void
dm_reduce_divide(void *data, size_t count, dm_dtype dtype, int n);

#endif
