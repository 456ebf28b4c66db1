/* Reduce kernels for x86-64 processors with AVX2 and F16C.
 *
 * The lists compiled once more for wider registers, and floats of 8 and 16 bits by hand.
 * To the bit the same results as the functions for any processor (but for which payload a
 * sum of two NaNs keeps), so ranks on different machines agree: nothing is fused (no
 * FMA). AVX512_BF16 is of no use: it takes denormals for zero.
 */
#include "backend/reduce/dm_kernels.h"

#if defined(__x86_64__) && !defined(DM_REDUCE_PORTABLE)

#    include "backend/reduce/dm_lanes_avx2.h"

/* --- by the compiler ------------------------------------------------------------------ */

#    define AVX2_PAIR(dtype, op, name, type, value)                                    \
        DEFINE_PAIR(FOR_AVX2, name, type, value)
#    define AVX2_NARROW(dtype, format, type) DEFINE_NARROW(FOR_AVX2, format, type)
#    define AVX2_DIVISION(dtype, name, type, value)                                    \
        DEFINE_DIVISION(FOR_AVX2, name, type, value)
#    define AVX2_SCALING(dtype, name, type, factor_type, value)                        \
        DEFINE_SCALING(FOR_AVX2, name, type, factor_type, value)

KERNELS(AVX2_PAIR)
NARROWS(AVX2_NARROW) /* for what is left over below */
DIVISIONS(AVX2_DIVISION)
SCALINGS(AVX2_SCALING)

/* --- by hand, sixteen at a time -------------------------------------------------------- */

/* For each whole group of lanes, at i; behind the last of them afterwards. */
#    define FOR_LANES                                                                  \
        size_t i = 0;                                                                  \
        for (; count - i >= LANE_COUNT; i += LANE_COUNT)

LANES lanes
load_sums(const float *sums)
{
    return (lanes){_mm256_loadu_ps(sums), _mm256_loadu_ps(sums + 8)};
}

LANES void
store_sums(float *sums, lanes values)
{
    _mm256_storeu_ps(sums, values.a);
    _mm256_storeu_ps(sums + 8, values.b);
}

LANES lanes
combine_sum(lanes x, lanes y)
{
    return (lanes){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}

LANES lanes
combine_product(lanes x, lanes y)
{
    return (lanes){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}

#    define DEFINE_LANES_OP(op, format, type)                                          \
        FOR_AVX2 static void lanes_##op##_##format(void *out, const void *a,           \
                                                   const void *b, size_t count)        \
        {                                                                              \
            type *to = out;                                                            \
            const type *from_a = a, *from_b = b;                                       \
            FOR_LANES                                                                  \
            {                                                                          \
                lanes x = widen_##format(from_a + i), y = widen_##format(from_b + i);  \
                round_##format##_lanes(to + i, combine_##op(x, y));                    \
            }                                                                          \
            op##_##format(to + i, from_a + i, from_b + i, count - i);                  \
        }                                                                              \
                                                                                       \
        FOR_AVX2 static void lanes_start_##op##_##format(float *sums, const void *a,   \
                                                         const void *b, size_t count)  \
        {                                                                              \
            const type *from_a = a, *from_b = b;                                       \
            FOR_LANES                                                                  \
            {                                                                          \
                lanes x = widen_##format(from_a + i), y = widen_##format(from_b + i);  \
                store_sums(sums + i, combine_##op(x, y));                              \
            }                                                                          \
            start_##op##_##format(sums + i, from_a + i, from_b + i, count - i);        \
        }                                                                              \
                                                                                       \
        FOR_AVX2 static void lanes_add_##op##_##format(float *sums, const void *a,     \
                                                       size_t count)                   \
        {                                                                              \
            const type *from = a;                                                      \
            FOR_LANES                                                                  \
            {                                                                          \
                lanes x = load_sums(sums + i), y = widen_##format(from + i);           \
                store_sums(sums + i, combine_##op(x, y));                              \
            }                                                                          \
            add_##op##_##format(sums + i, from + i, count - i);                        \
        }                                                                              \
                                                                                       \
        FOR_AVX2 static void lanes_end_##op##_##format(void *out, const float *sums,   \
                                                       const void *a, size_t count)    \
        {                                                                              \
            type *to = out;                                                            \
            const type *from = a;                                                      \
            FOR_LANES                                                                  \
            {                                                                          \
                lanes x = load_sums(sums + i), y = widen_##format(from + i);           \
                round_##format##_lanes(to + i, combine_##op(x, y));                    \
            }                                                                          \
            end_##op##_##format(to + i, sums + i, from + i, count - i);                \
        }

#    define DEFINE_LANES(dtype, format, type)                                          \
        DEFINE_LANES_OP(sum, format, type)                                             \
        DEFINE_LANES_OP(product, format, type)                                         \
                                                                                       \
        FOR_AVX2 static void lanes_round_##format(void *out, const float *sums,        \
                                                  size_t count)                        \
        {                                                                              \
            type *to = out;                                                            \
            FOR_LANES                                                                  \
            {                                                                          \
                round_##format##_lanes(to + i, load_sums(sums + i));                   \
            }                                                                          \
            round_##format(to + i, sums + i, count - i);                               \
        }                                                                              \
                                                                                       \
        FOR_AVX2 static void lanes_divide_##format(void *data, size_t count, int n)    \
        {                                                                              \
            type *all = data;                                                          \
            __m256 by = _mm256_set1_ps((float)n);                                      \
            FOR_LANES                                                                  \
            {                                                                          \
                lanes x = widen_##format(all + i);                                     \
                x = (lanes){_mm256_div_ps(x.a, by), _mm256_div_ps(x.b, by)};           \
                round_##format##_lanes(all + i, x);                                    \
            }                                                                          \
            divide_##format(all + i, count - i, n);                                    \
        }                                                                              \
                                                                                       \
        FOR_AVX2 static void lanes_scale_##format(void *out, const void *in,           \
                                                  size_t count, double factor)         \
        {                                                                              \
            type *to = out;                                                            \
            const type *from = in;                                                     \
            __m256 by = _mm256_set1_ps((float)factor);                                 \
            FOR_LANES                                                                  \
            {                                                                          \
                lanes x = widen_##format(from + i);                                    \
                round_##format##_lanes(to + i, combine_product(x, (lanes){by, by}));   \
            }                                                                          \
            scale_##format(to + i, from + i, count - i, factor);                       \
        }

NARROWS(DEFINE_LANES)

#    define AVX2_PAIR_ENTRIES(dtype, format, type)                                     \
        NARROW_PAIR_ENTRIES(lanes_, dtype, format)
#    define AVX2_ACCUMULATOR_ENTRIES(dtype, format, type)                              \
        NARROW_ACCUMULATOR_ENTRIES(lanes_, dtype, format)
#    define AVX2_DIVISION_ENTRY(dtype, format, type)                                   \
        NARROW_DIVISION_ENTRY(lanes_, dtype, format)
#    define AVX2_SCALING_ENTRY(dtype, format, type)                                    \
        NARROW_SCALING_ENTRY(lanes_, dtype, format)

const dm_kernel_set dm_kernels_avx2 = {
    .pairs = {KERNELS(PAIR_ENTRY) NARROWS(AVX2_PAIR_ENTRIES)},
    .accumulators = {NARROWS(AVX2_ACCUMULATOR_ENTRIES)},
    .divisions = {DIVISIONS(DIVISION_ENTRY) NARROWS(AVX2_DIVISION_ENTRY)},
    .scalings = {SCALINGS(SCALING_ENTRY) NARROWS(AVX2_SCALING_ENTRY)},
};

#endif
