/* Sixteen floats of 8 or 16 bits as float32 and back, by AVX2 and F16C. Private to reduce.
 *
 * To the bit what dm_narrow.h computes, payloads of NaN aside, and as exact under a
 * processor mode that flushes denormals of float32. Which lane an element is in differs
 * by format; rounding puts it back where it was.
 */
#ifndef DM_LANES_AVX2_H
#define DM_LANES_AVX2_H

#include <immintrin.h>

#define FOR_AVX2 __attribute__((target("avx2,f16c")))
#define LANES FOR_AVX2 static inline

enum { LANE_COUNT = 16 };

typedef struct lanes {
    __m256 a, b;
} lanes;

/* --- bfloat16 ------------------------------------------------------------------------ */

/* Elements are the halves of 32 bits: a has the even ones, b the odd ones, which are
 * float32 already but for what is below. */
LANES lanes
widen_bfloat16(const void *from)
{
    __m256i bits = _mm256_loadu_si256((const __m256i_u *)from);
    __m256i odd = _mm256_and_si256(bits, _mm256_set1_epi32((int)0xffff0000));
    return (lanes){_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)),
                   _mm256_castsi256_ps(odd)};
}

/* The results are in the upper halves; what is below is left over. */
LANES __m256i
round_upper(__m256 value)
{
    __m256i bits = _mm256_castps_si256(value);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    return _mm256_add_epi32(bits, half);
}

LANES __m256i
round_upper_or_nan(__m256 value)
{
    __m256i nan =
        _mm256_or_si256(_mm256_castps_si256(value), _mm256_set1_epi32(0x400000));
    __m256 is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    return _mm256_blendv_epi8(round_upper(value), nan, _mm256_castps_si256(is_nan));
}

LANES void
round_bfloat16_lanes(void *to, lanes values)
{
    __m256i even, odd;
    if (__builtin_expect(
            _mm256_movemask_ps(_mm256_cmp_ps(values.a, values.b, _CMP_UNORD_Q)) == 0,
            1)) {
        even = round_upper(values.a);
        odd = round_upper(values.b);
    }
    else {
        even = round_upper_or_nan(values.a);
        odd = round_upper_or_nan(values.b);
    }
    _mm256_storeu_si256((__m256i_u *)to,
                        _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa));
}

/* --- float16 -------------------------------------------------------------------------- */

LANES lanes
lanes_of_halves(__m256i halves)
{
    return (lanes){_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                   _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}

LANES lanes
widen_float16(const void *from)
{
    return lanes_of_halves(_mm256_loadu_si256((const __m256i_u *)from));
}

LANES void
round_float16_lanes(void *to, lanes values)
{
    __m128i *place = to;
    _mm_storeu_si128((__m128i_u *)place,
                     _mm256_cvtps_ph(values.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i_u *)(place + 1),
                     _mm256_cvtps_ph(values.b, _MM_FROUND_TO_NEAREST_INT));
}

/* --- float8 --------------------------------------------------------------------------- */

/* To float16 towards zero, and the last bit set where that is not exact ("to odd"): what
 * rounds this to fewer bits rounds as if it had seen the float32. */
LANES __m256i
halves_to_odd(lanes values)
{
    __m128i a = _mm256_cvtps_ph(values.a, _MM_FROUND_TO_ZERO);
    __m128i b = _mm256_cvtps_ph(values.b, _MM_FROUND_TO_ZERO);
    __m256 a_off = _mm256_cmp_ps(_mm256_cvtph_ps(a), values.a, _CMP_NEQ_UQ);
    __m256 b_off = _mm256_cmp_ps(_mm256_cvtph_ps(b), values.b, _CMP_NEQ_UQ);
    __m256i off =
        _mm256_packs_epi32(_mm256_castps_si256(a_off), _mm256_castps_si256(b_off));
    off = _mm256_permute4x64_epi64(off, 0xd8); /* packs works within 128 bits */
    __m256i halves = _mm256_set_m128i(b, a);
    return _mm256_or_si256(halves, _mm256_and_si256(off, _mm256_set1_epi16(1)));
}

/* magnitude / 2**shift to nearest even; `shift` is a constant. */
#define ROUND_SHIFT(magnitude, shift)                                                  \
    _mm256_srli_epi16(                                                                 \
        _mm256_add_epi16(_mm256_add_epi16((magnitude), _mm256_set1_epi16(              \
                                                           (1 << ((shift) - 1)) - 1)), \
                         _mm256_and_si256(_mm256_srli_epi16((magnitude), (shift)),     \
                                          _mm256_set1_epi16(1))),                      \
        (shift))

/* Stores the magnitudes (below 0x80) with the signs of the halves. */
LANES void
store_bytes(void *to, __m256i magnitudes, __m256i halves)
{
    __m256i sign =
        _mm256_and_si256(_mm256_srli_epi16(halves, 8), _mm256_set1_epi16(0x80));
    __m256i bytes = _mm256_or_si256(magnitudes, sign);
    _mm_storeu_si128((__m128i_u *)to,
                     _mm_packus_epi16(_mm256_castsi256_si128(bytes),
                                      _mm256_extracti128_si256(bytes, 1)));
}

/* The bytes in the upper halves of 16 bits. */
LANES __m256i
load_upper(const void *from)
{
    __m128i bytes = _mm_loadu_si128((const __m128i_u *)from);
    return _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
}

/* e5m2 is the upper half of a float16. */
LANES lanes
widen_float8_e5m2(const void *from)
{
    return lanes_of_halves(load_upper(from));
}

LANES void
round_float8_e5m2_lanes(void *to, lanes values)
{
    __m256i halves = halves_to_odd(values);
    __m256i magnitude = _mm256_and_si256(halves, _mm256_set1_epi16(0x7fff));
    __m256i rounded = ROUND_SHIFT(magnitude, 8);
    __m256i nan =
        _mm256_or_si256(_mm256_srli_epi16(magnitude, 8), _mm256_set1_epi16(2));
    __m256i is_nan = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(0x7c00));
    store_bytes(to, _mm256_blendv_epi8(rounded, nan, is_nan), halves);
}

/* e4m3's bits at the place of float16's mean 2**-8 of its value there, denormals too. Its
 * one NaN looks like 480. */
LANES __m256
widen_scaled(__m256 value)
{
    __m256 scaled = _mm256_mul_ps(value, _mm256_set1_ps(256.0F));
    __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0F), scaled);
    __m256 is_nan = _mm256_cmp_ps(magnitude, _mm256_set1_ps(480.0F), _CMP_EQ_OQ);
    __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_or_ps(scaled, _mm256_and_ps(is_nan, quiet));
}

LANES lanes
widen_float8_e4m3(const void *from)
{
    /* The arithmetic shift doubles the sign, and the copy is cleared. */
    __m256i shifted = _mm256_srai_epi16(load_upper(from), 1);
    __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi16((short)0xbf80));
    lanes values = lanes_of_halves(halves);
    return (lanes){widen_scaled(values.a), widen_scaled(values.b)};
}

LANES void
round_float8_e4m3_lanes(void *to, lanes values)
{
    __m256 scale = _mm256_set1_ps(1.0F / 256.0F);
    lanes scaled = {_mm256_mul_ps(values.a, scale), _mm256_mul_ps(values.b, scale)};
    __m256i halves = halves_to_odd(scaled);
    __m256i magnitude = _mm256_and_si256(halves, _mm256_set1_epi16(0x7fff));
    __m256i rounded = ROUND_SHIFT(magnitude, 7);
    /* All that is too large is NaN, as is NaN. */
    store_bytes(to, _mm256_min_epu16(rounded, _mm256_set1_epi16(0x7f)), halves);
}

#endif
