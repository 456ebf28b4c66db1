/* Floats of 8 and 16 bits: exact conversion from and to float32.
 *
 * Without branches and without tables, so that loops over them vectorise; no
 * compiler or processor support for the types is needed. To float32 is exact; from
 * float32 rounds to nearest even (the processor's rounding mode is assumed to be the
 * usual one, as in every float addition), overflows to infinity (NaN in e4m3fn, which
 * has none) and keeps a NaN's sign and the upper bits of its payload. Denormals are
 * exact even where the processor flushes those of float32 to zero. Private to reduce.
 */
#ifndef DM_NARROW_H
#define DM_NARROW_H

#include <stdint.h>
#include <string.h>

enum { DM_FLOAT32_SIGN_SHIFT = 31, DM_FLOAT32_MANTISSA = 23, DM_FLOAT32_BIAS = 127 };

#define DM_FLOAT32_MAGNITUDE UINT32_C(0x7fffffff)
#define DM_FLOAT32_INFINITY UINT32_C(0x7f800000)

static inline uint32_t
dm_float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float
dm_float_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* condition ? yes : no, with both computed: a plain conditional lets the compiler
 * branch around float arithmetic (which might trap), and then it cannot vectorise. */
static inline uint32_t
dm_select(int condition, uint32_t yes, uint32_t no)
{
    uint32_t mask = 0 - (uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

/* An IEEE-like format of 1 sign bit, exponent and mantissa. All are compile-time
 * constants where the functions below are inlined. */
typedef struct dm_narrow {
    int width;         /* bits altogether */
    int mantissa;      /* bits */
    int bias;          /* of the exponent */
    uint32_t special;  /* magnitudes from here on are infinity and NaN */
    uint32_t nan;      /* the quiet NaN without payload */
    uint32_t limit;    /* float32 bits: magnitudes from here on overflow... */
    uint32_t overflow; /* ...to this */
} dm_narrow;

#define DM_NARROW_FLOAT16 ((dm_narrow){16, 10, 15, 0x7c00, 0x7e00, 0x47800000, 0x7c00})
#define DM_NARROW_E5M2 ((dm_narrow){8, 2, 15, 0x7c, 0x7e, 0x47800000, 0x7c})
#define DM_NARROW_E4M3 ((dm_narrow){8, 3, 7, 0x7f, 0x7f, 0x43f00000, 0x7f})

static inline float
dm_narrow_widen(uint32_t bits, dm_narrow format)
{
    int shift = DM_FLOAT32_MANTISSA - format.mantissa;
    uint32_t rebias = (uint32_t)(DM_FLOAT32_BIAS - format.bias) << DM_FLOAT32_MANTISSA;
    uint32_t sign = bits >> (format.width - 1) << DM_FLOAT32_SIGN_SHIFT;
    uint32_t magnitude = bits & ((UINT32_C(1) << (format.width - 1)) - 1);

    uint32_t normal = (magnitude << shift) + rebias;
    uint32_t special = (magnitude << shift) | DM_FLOAT32_INFINITY;
    /* The mantissa as a whole number times the smallest denormal. */
    uint32_t unit = (uint32_t)(DM_FLOAT32_BIAS + 1 - format.bias - format.mantissa)
                    << DM_FLOAT32_MANTISSA;
    uint32_t denormal =
        dm_float_bits((float)(int32_t)magnitude * dm_float_from_bits(unit));

    uint32_t result = dm_select(magnitude >> format.mantissa == 0, denormal, normal);
    result = dm_select(magnitude >= format.special, special, result);
    return dm_float_from_bits(sign | result);
}

static inline uint32_t
dm_narrow_round(float value, dm_narrow format)
{
    int shift = DM_FLOAT32_MANTISSA - format.mantissa;
    uint32_t rebias = (uint32_t)(DM_FLOAT32_BIAS - format.bias) << DM_FLOAT32_MANTISSA;
    uint32_t bits = dm_float_bits(value);
    uint32_t sign = bits >> DM_FLOAT32_SIGN_SHIFT << (format.width - 1);
    uint32_t magnitude = bits & DM_FLOAT32_MAGNITUDE;

    /* Half a unit in the last place less one, plus one where it is odd: a carry out
     * of the mantissa goes into the exponent, as it should. */
    uint32_t odd = magnitude >> shift & 1;
    uint32_t half = (UINT32_C(1) << (shift - 1)) - 1;
    uint32_t normal = (magnitude - rebias + half + odd) >> shift;
    /* Adding a number whose last place is the smallest denormal rounds to that. */
    uint32_t anchor = (uint32_t)(DM_FLOAT32_BIAS + 1 - format.bias +
                                 DM_FLOAT32_MANTISSA - format.mantissa)
                      << DM_FLOAT32_MANTISSA;
    uint32_t denormal =
        dm_float_bits(dm_float_from_bits(magnitude) + dm_float_from_bits(anchor)) -
        anchor;
    uint32_t smallest_normal = rebias + (UINT32_C(1) << DM_FLOAT32_MANTISSA);
    uint32_t payload = magnitude >> shift & ((UINT32_C(1) << format.mantissa) - 1);

    uint32_t result = dm_select(magnitude < smallest_normal, denormal, normal);
    result = dm_select(magnitude >= format.limit, format.overflow, result);
    result = dm_select(magnitude > DM_FLOAT32_INFINITY, format.nan | payload, result);
    return sign | result;
}

static inline float
dm_widen_float16(uint16_t bits)
{
    return dm_narrow_widen(bits, DM_NARROW_FLOAT16);
}

static inline uint16_t
dm_round_float16(float value)
{
    return (uint16_t)dm_narrow_round(value, DM_NARROW_FLOAT16);
}

static inline float
dm_widen_float8_e4m3(uint8_t bits)
{
    return dm_narrow_widen(bits, DM_NARROW_E4M3);
}

static inline uint8_t
dm_round_float8_e4m3(float value)
{
    return (uint8_t)dm_narrow_round(value, DM_NARROW_E4M3);
}

static inline float
dm_widen_float8_e5m2(uint8_t bits)
{
    return dm_narrow_widen(bits, DM_NARROW_E5M2);
}

static inline uint8_t
dm_round_float8_e5m2(float value)
{
    return (uint8_t)dm_narrow_round(value, DM_NARROW_E5M2);
}

/* bfloat16 is the upper half of a float32. */
static inline float
dm_widen_bfloat16(uint16_t bits)
{
    return dm_float_from_bits((uint32_t)bits << 16);
}

static inline uint16_t
dm_round_bfloat16(float value)
{
    uint32_t bits = dm_float_bits(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    uint32_t nan = bits >> 16 | 0x40;
    uint32_t magnitude = bits & DM_FLOAT32_MAGNITUDE;
    return (uint16_t)(magnitude > DM_FLOAT32_INFINITY ? nan : rounded);
}

/* --- minimum and maximum --------------------------------------------------------------- */

/* By whole numbers of the floats' own width, so that a vector holds as many as it can: a
 * float's sign and magnitude make a number that is ordered as the float is. `infinity`
 * (or the largest number, where there is none) is the largest magnitude that is no NaN.
 * Symmetric to the bit: of two zeros the smaller is -0, and a NaN's bits stay a NaN's
 * with others or'ed in. */
#define DM_DEFINE_EXTREMES(width)                                                      \
    static inline int##width##_t dm_order_##width(uint##width##_t bits)                \
    {                                                                                  \
        int##width##_t sign = (int##width##_t)((int##width##_t)bits >> (width - 1));   \
        int##width##_t magnitude = (int##width##_t)(bits & (UINT##width##_MAX >> 1));  \
        return (int##width##_t)((magnitude ^ sign) - sign);                            \
    }                                                                                  \
                                                                                       \
    static inline uint##width##_t dm_unordered_##width(                                \
        uint##width##_t x, uint##width##_t y, int##width##_t infinity)                 \
    {                                                                                  \
        int##width##_t a = (int##width##_t)(x & (UINT##width##_MAX >> 1));             \
        int##width##_t b = (int##width##_t)(y & (UINT##width##_MAX >> 1));             \
        return (uint##width##_t) - (int##width##_t)((a > infinity) | (b > infinity));  \
    }                                                                                  \
                                                                                       \
    static inline uint##width##_t dm_min_##width(uint##width##_t x, uint##width##_t y, \
                                                 int##width##_t infinity)              \
    {                                                                                  \
        int##width##_t a = dm_order_##width(x), b = dm_order_##width(y);               \
        uint##width##_t nan = dm_unordered_##width(x, y, infinity);                    \
        uint##width##_t below = (uint##width##_t) - (int##width##_t)(a < b);           \
        uint##width##_t above = (uint##width##_t) - (int##width##_t)(a > b);           \
        uint##width##_t both = (uint##width##_t)(~(below | above) | nan);              \
        return (uint##width##_t)((x & (below | both)) | (y & (above | both)));         \
    }                                                                                  \
                                                                                       \
    static inline uint##width##_t dm_max_##width(uint##width##_t x, uint##width##_t y, \
                                                 int##width##_t infinity)              \
    {                                                                                  \
        int##width##_t a = dm_order_##width(x), b = dm_order_##width(y);               \
        uint##width##_t nan = dm_unordered_##width(x, y, infinity);                    \
        uint##width##_t below = (uint##width##_t) - (int##width##_t)(a < b);           \
        uint##width##_t above = (uint##width##_t) - (int##width##_t)(a > b);           \
        uint##width##_t one = (uint##width##_t)((x & above) | (y & below));            \
        uint##width##_t equal = (uint##width##_t)((x & y) & ~(below | above));         \
        return (uint##width##_t)(one | equal | ((x | y) & nan));                       \
    }

DM_DEFINE_EXTREMES(8)
DM_DEFINE_EXTREMES(16)

#endif
