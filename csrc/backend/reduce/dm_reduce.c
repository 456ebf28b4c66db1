/* Reduce kernels: see dm_reduce.h.
 *
 * One list, KERNELS, says what there is; it is expanded twice, into the functions and
 * into the table. In it x and y are the elements of a and b, and the value is that of
 * out. A second list, DIVISIONS, does the same for the end of an average.
 *
 * The loops have no aliasing promise to give (out may be a or b), but no iteration
 * reads what another one writes: that is what ivdep says, and the loops vectorise.
 * The element types may lie anywhere and alias anything, as bytes do.
 */
#include "backend/reduce/dm_reduce.h"

#include <assert.h>
#include <stdint.h>
#include <string.h>

#include "backend/reduce/dm_narrow.h"

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
double_bits(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline double
double_from_bits(uint64_t bits)
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
    double_from_bits(MIN_BITS(x, y, double_bits(x), double_bits(y)))
#define MAX_DOUBLE(x, y)                                                               \
    double_from_bits(MAX_BITS(x, y, double_bits(x), double_bits(y)))

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

/* D(dtype, name of the function, element type, value): x is the element, n the number
 * of members. Integers divide towards zero. */
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

/* --- functions and tables ------------------------------------------------------------ */

#define DEFINE_KERNEL(dtype, op, name, type, value)                                    \
    static void name(void *out, const void *a, const void *b, size_t count)            \
    {                                                                                  \
        type *to = out;                                                                \
        const type *from_a = a, *from_b = b;                                           \
        _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++)                        \
        {                                                                              \
            type x = from_a[i], y = from_b[i];                                         \
            to[i] = (value);                                                           \
        }                                                                              \
    }

#define DEFINE_DIVISION(dtype, name, type, value)                                      \
    static void name(void *data, size_t count, int n)                                  \
    {                                                                                  \
        type *all = data;                                                              \
        for (size_t i = 0; i < count; i++) {                                           \
            type x = all[i];                                                           \
            all[i] = (value);                                                          \
        }                                                                              \
    }

KERNELS(DEFINE_KERNEL)
DIVISIONS(DEFINE_DIVISION)

typedef void (*divide_fn)(void *data, size_t count, int n);

#define KERNEL_ENTRY(dtype, op, name, type, value) [DM_##dtype][DM_##op] = name,
#define DIVISION_ENTRY(dtype, name, type, value) [DM_##dtype] = name,

static const dm_reduce_fn kernels[DM_DTYPE_COUNT][DM_REDUCE_OP_COUNT] = {
    KERNELS(KERNEL_ENTRY)};
static const divide_fn divisions[DM_DTYPE_COUNT] = {DIVISIONS(DIVISION_ENTRY)};

dm_reduce_fn
dm_reduce_lookup(dm_dtype dtype, dm_reduce_op op)
{
    assert((unsigned)dtype < DM_DTYPE_COUNT && (unsigned)op < DM_REDUCE_OP_COUNT);
    if (op == DM_AVG) {
        return divisions[dtype] != NULL ? kernels[dtype][DM_SUM] : NULL;
    }
    return kernels[dtype][op];
}

void
dm_reduce_finish(void *data, size_t count, dm_dtype dtype, dm_reduce_op op, int size)
{
    assert(size >= 1 && dm_reduce_lookup(dtype, op) != NULL);
    if (op == DM_AVG && size > 1) {
        divisions[dtype](data, count, size);
    }
}
