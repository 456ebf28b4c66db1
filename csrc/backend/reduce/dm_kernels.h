/* The lists of reduce kernels and how a function is made of a line of them. Private to
 * reduce.
 *
 * A list is expanded into functions and into the tables of a dm_kernel_set, once for any
 * processor and once more for those that can do better. In a line x and y are the elements
 * of a and b, and the value is that of out.
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

/* --- the lists --------------------------------------------------------------------- */

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

/* Minimum and maximum of floats of 8 and 16 bits; their sums are made by DEFINE_NARROW. */
#define EXTREME_KERNELS(K, dtype, name, type, width, infinity)                         \
    K(dtype, MIN, min_##name, type, dm_min_##width(x, y, infinity))                    \
    K(dtype, MAX, max_##name, type, dm_max_##width(x, y, infinity))

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
    EXTREME_KERNELS(K, FLOAT16, float16, u16, 16, 0x7c00)                              \
    EXTREME_KERNELS(K, BFLOAT16, bfloat16, u16, 16, 0x7f80)                            \
    FLOAT_KERNELS(K, FLOAT32, float32, f32, MIN_FLOAT, MAX_FLOAT)                      \
    FLOAT_KERNELS(K, FLOAT64, float64, f64, MIN_DOUBLE, MAX_DOUBLE)                    \
    COMPLEX_KERNELS(K, COMPLEX64, complex64, c64)                                      \
    COMPLEX_KERNELS(K, COMPLEX128, complex128, c128)                                   \
    EXTREME_KERNELS(K, FLOAT8_E4M3, float8_e4m3, u8, 8, 0x7e)                          \
    EXTREME_KERNELS(K, FLOAT8_E5M2, float8_e5m2, u8, 8, 0x7c)

/* N(dtype, name of the format, element type): floats that compute in float32. */
#define NARROWS(N)                                                                     \
    N(FLOAT16, float16, u16)                                                           \
    N(BFLOAT16, bfloat16, u16)                                                         \
    N(FLOAT8_E4M3, float8_e4m3, u8)                                                    \
    N(FLOAT8_E5M2, float8_e5m2, u8)

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
    D(FLOAT32, divide_float32, f32, x / (float)n)                                      \
    D(FLOAT64, divide_float64, f64, x / n)                                             \
    D(COMPLEX64, divide_complex64, c64, ((c64){x.re / (float)n, x.im / (float)n}))     \
    D(COMPLEX128, divide_complex128, c128, ((c128){x.re / n, x.im / n}))

/* The beginning of a premul_sum: S(dtype, name of the function, element type, type of the
 * factor, value): x is the element, f the factor. */
#define SCALINGS(S)                                                                    \
    S(FLOAT32, scale_float32, f32, float, (x * f))                                     \
    S(FLOAT64, scale_float64, f64, double, (x * f))                                    \
    S(COMPLEX64, scale_complex64, c64, float, ((c64){x.re * f, x.im * f}))             \
    S(COMPLEX128, scale_complex128, c128, double, ((c128){x.re * f, x.im * f}))

/* --- what the lists become ----------------------------------------------------------- */

/* Many arrays of narrow floats with one rounding: sums = a op b, sums = sums op a ..., and
 * at last out = round(sums op a). Where in sums a result lies is a matter of the four
 * alone; they are called with the same count. */
typedef struct dm_accumulator {
    void (*start)(float *sums, const void *a, const void *b, size_t count);
    void (*add)(float *sums, const void *a, size_t count);
    void (*end)(void *out, const float *sums, const void *a, size_t count);
    void (*round)(void *out, const float *sums, size_t count);
} dm_accumulator;

typedef void (*dm_divide_fn)(void *data, size_t count, int n);
typedef void (*dm_scale_fn)(void *out, const void *in, size_t count, double factor);

/* All functions for one kind of processor; NULL where a pair makes no sense. */
typedef struct dm_kernel_set {
    dm_reduce_fn pairs[DM_DTYPE_COUNT][DM_REDUCE_OP_COUNT];
    dm_accumulator accumulators[DM_DTYPE_COUNT][DM_REDUCE_OP_COUNT];
    dm_divide_fn divisions[DM_DTYPE_COUNT];
    dm_scale_fn scalings[DM_DTYPE_COUNT];
} dm_kernel_set;

/* For processors with AVX2 and F16C. To be used only there. */
extern const dm_kernel_set dm_kernels_avx2;

/* The set for this processor. */
const dm_kernel_set *
dm_kernels(void);

#define PAIR_ENTRY(dtype, op, name, type, value) [DM_##dtype][DM_##op] = name,
#define DIVISION_ENTRY(dtype, name, type, value) [DM_##dtype] = name,
#define SCALING_ENTRY(dtype, name, type, factor_type, value) [DM_##dtype] = name,

#define NARROW_PAIR_ENTRIES(prefix, dtype, format)                                     \
    [DM_##dtype][DM_SUM] = prefix##sum_##format,                                       \
    [DM_##dtype][DM_PRODUCT] = prefix##product_##format,
#define NARROW_ACCUMULATOR_ENTRIES(prefix, dtype, format)                              \
    [DM_##dtype][DM_SUM] = {prefix##start_sum_##format, prefix##add_sum_##format,      \
                            prefix##end_sum_##format, prefix##round_##format},         \
    [DM_##dtype][DM_PRODUCT] = {prefix##start_product_##format,                        \
                                prefix##add_product_##format,                          \
                                prefix##end_product_##format, prefix##round_##format},
#define NARROW_DIVISION_ENTRY(prefix, dtype, format)                                   \
    [DM_##dtype] = prefix##divide_##format,
#define NARROW_SCALING_ENTRY(prefix, dtype, format)                                    \
    [DM_##dtype] = prefix##scale_##format,

/* --- functions ------------------------------------------------------------------------ */

#if defined(__clang__)
#    define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#    define INDEPENDENT _Pragma("GCC ivdep")
#endif

/* `attributes` say which processor a function is for. */
#define DEFINE_PAIR(attributes, name, type, value)                                     \
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

#define DEFINE_DIVISION(attributes, name, type, value)                                 \
    attributes static void name(void *data, size_t count, int n)                       \
    {                                                                                  \
        type *all = data;                                                              \
        for (size_t i = 0; i < count; i++) {                                           \
            type x = all[i];                                                           \
            all[i] = (value);                                                          \
        }                                                                              \
    }

#define DEFINE_SCALING(attributes, name, type, factor_type, value)                     \
    attributes static void name(void *out, const void *in, size_t count,               \
                                double factor)                                         \
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

#define DEFINE_NARROW_OP(attributes, op, format, type, operator)                       \
    attributes static void op##_##format(void *out, const void *a, const void *b,      \
                                         size_t count)                                 \
    {                                                                                  \
        type *to = out;                                                                \
        const type *from_a = a, *from_b = b;                                           \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                 \
        {                                                                              \
            float x = dm_widen_##format(from_a[i]), y = dm_widen_##format(from_b[i]);  \
            to[i] = dm_round_##format(x operator y);                                   \
        }                                                                              \
    }                                                                                  \
                                                                                       \
    attributes static void start_##op##_##format(float *sums, const void *a,           \
                                                 const void *b, size_t count)          \
    {                                                                                  \
        const type *from_a = a, *from_b = b;                                           \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                 \
        {                                                                              \
            float x = dm_widen_##format(from_a[i]), y = dm_widen_##format(from_b[i]);  \
            sums[i] = x operator y;                                                    \
        }                                                                              \
    }                                                                                  \
                                                                                       \
    attributes static void add_##op##_##format(float *sums, const void *a,             \
                                               size_t count)                           \
    {                                                                                  \
        const type *from = a;                                                          \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                 \
        {                                                                              \
            sums[i] = sums[i] operator dm_widen_##format(from[i]);                     \
        }                                                                              \
    }                                                                                  \
                                                                                       \
    attributes static void end_##op##_##format(void *out, const float *sums,           \
                                               const void *a, size_t count)            \
    {                                                                                  \
        type *to = out;                                                                \
        const type *from = a;                                                          \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                 \
        {                                                                              \
            to[i] = dm_round_##format(sums[i] operator dm_widen_##format(from[i]));    \
        }                                                                              \
    }

/* All that a format needs besides its extremes. */
#define DEFINE_NARROW(attributes, format, type)                                        \
    DEFINE_NARROW_OP(attributes, sum, format, type, +)                                 \
    DEFINE_NARROW_OP(attributes, product, format, type, *)                             \
    DEFINE_DIVISION(attributes, divide_##format, type,                                 \
                    dm_round_##format(dm_widen_##format(x) / (float)n))                \
    DEFINE_SCALING(attributes, scale_##format, type, float,                            \
                   dm_round_##format(dm_widen_##format(x) * f))                        \
                                                                                       \
    attributes static void round_##format(void *out, const float *sums, size_t count)  \
    {                                                                                  \
        type *to = out;                                                                \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                 \
        {                                                                              \
            to[i] = dm_round_##format(sums[i]);                                        \
        }                                                                              \
    }

#endif
