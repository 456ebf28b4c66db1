/* Reduce kernels for x86-64 processors with AVX2, chosen at run time.
 *
 * The same list compiled once more for wider registers, and float16 by the processor's
 * own conversions (F16C). To the bit the same results as the functions for any
 * processor (but for which payload a sum of two NaNs keeps), so ranks on different
 * machines agree: nothing is fused (no FMA).
 */
#include "backend/reduce/dm_kernels.h"

#if defined(__x86_64__) && !defined(DM_REDUCE_PORTABLE)

#    include <immintrin.h>

#    define FOR_AVX2 __attribute__((target("avx2")))
#    define FOR_F16C __attribute__((target("avx2,f16c")))

#    define DEFINE_AVX2(dtype, op, name, type, value)                                  \
        DEFINE_KERNEL(FOR_AVX2, name, type, value)

KERNELS(DEFINE_AVX2)

static const dm_kernel_table kernels = {KERNELS(KERNEL_ENTRY)};

#    define DEFINE_AVX2_ACCUMULATOR(dtype, op, name, type, format, operator)           \
        DEFINE_ACCUMULATOR(FOR_AVX2, name, type, format, operator)

ACCUMULATORS(DEFINE_AVX2_ACCUMULATOR)

static const dm_accumulator_table accumulators = {ACCUMULATORS(ACCUMULATOR_ENTRY)};

/* Eight at a time; `rest` is the kernel for what is left over. */
#    define DEFINE_F16C(name, combine, rest)                                           \
        FOR_F16C static void name(void *out, const void *a, const void *b,             \
                                  size_t count)                                        \
        {                                                                              \
            u16 *to = out;                                                             \
            const u16 *from_a = a, *from_b = b;                                        \
            size_t i = 0;                                                              \
            for (; count - i >= 8; i += 8) {                                           \
                __m128i x = _mm_loadu_si128((const __m128i_u *)(from_a + i));          \
                __m128i y = _mm_loadu_si128((const __m128i_u *)(from_b + i));          \
                __m256 z = combine(_mm256_cvtph_ps(x), _mm256_cvtph_ps(y));            \
                _mm_storeu_si128((__m128i_u *)(to + i),                                \
                                 _mm256_cvtps_ph(z, _MM_FROUND_TO_NEAREST_INT));       \
            }                                                                          \
            rest(to + i, from_a + i, from_b + i, count - i);                           \
        }

DEFINE_F16C(sum_float16_f16c, _mm256_add_ps, sum_float16)
DEFINE_F16C(product_float16_f16c, _mm256_mul_ps, product_float16)

#    define WIDEN_F16C(from) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u *)(from)))
#    define ROUND_F16C(to, value)                                                      \
        _mm_storeu_si128((__m128i_u *)(to),                                            \
                         _mm256_cvtps_ph((value), _MM_FROUND_TO_NEAREST_INT))

#    define DEFINE_F16C_ACCUMULATOR(name, combine, rest)                               \
        FOR_F16C static void start_##name(float *sums, const void *a, const void *b,   \
                                          size_t count)                                \
        {                                                                              \
            const u16 *from_a = a, *from_b = b;                                        \
            size_t i = 0;                                                              \
            for (; count - i >= 8; i += 8) {                                           \
                _mm256_storeu_ps(sums + i, combine(WIDEN_F16C(from_a + i),             \
                                                   WIDEN_F16C(from_b + i)));           \
            }                                                                          \
            start_##rest(sums + i, from_a + i, from_b + i, count - i);                 \
        }                                                                              \
                                                                                       \
        FOR_F16C static void add_##name(float *sums, const void *a, size_t count)      \
        {                                                                              \
            const u16 *from = a;                                                       \
            size_t i = 0;                                                              \
            for (; count - i >= 8; i += 8) {                                           \
                __m256 sum = _mm256_loadu_ps(sums + i);                                \
                _mm256_storeu_ps(sums + i, combine(sum, WIDEN_F16C(from + i)));        \
            }                                                                          \
            add_##rest(sums + i, from + i, count - i);                                 \
        }                                                                              \
                                                                                       \
        FOR_F16C static void end_##name(void *out, const float *sums, const void *a,   \
                                        size_t count)                                  \
        {                                                                              \
            u16 *to = out;                                                             \
            const u16 *from = a;                                                       \
            size_t i = 0;                                                              \
            for (; count - i >= 8; i += 8) {                                           \
                __m256 sum = _mm256_loadu_ps(sums + i);                                \
                ROUND_F16C(to + i, combine(sum, WIDEN_F16C(from + i)));                \
            }                                                                          \
            end_##rest(to + i, sums + i, from + i, count - i);                         \
        }

DEFINE_F16C_ACCUMULATOR(sum_float16_f16c, _mm256_add_ps, sum_float16)
DEFINE_F16C_ACCUMULATOR(product_float16_f16c, _mm256_mul_ps, product_float16)

static const dm_accumulator f16c_sum = {start_sum_float16_f16c, add_sum_float16_f16c,
                                        end_sum_float16_f16c, round_sum_float16};
static const dm_accumulator f16c_product = {
    start_product_float16_f16c, add_product_float16_f16c, end_product_float16_f16c,
    round_product_float16};

dm_reduce_fn
dm_reduce_lookup_x86(dm_dtype dtype, dm_reduce_op op)
{
    if (!__builtin_cpu_supports("avx2")) {
        return NULL;
    }
    if (dtype == DM_FLOAT16 && __builtin_cpu_supports("f16c")) {
        if (op == DM_SUM) {
            return sum_float16_f16c;
        }
        if (op == DM_PRODUCT) {
            return product_float16_f16c;
        }
    }
    return kernels[dtype][op];
}

const dm_accumulator *
dm_accumulator_x86(dm_dtype dtype, dm_reduce_op op)
{
    if (!__builtin_cpu_supports("avx2")) {
        return NULL;
    }
    if (dtype == DM_FLOAT16 && __builtin_cpu_supports("f16c")) {
        return op == DM_SUM ? &f16c_sum : &f16c_product;
    }
    return &accumulators[dtype][op];
}

#endif
