/* Reduce kernels: see dm_reduce.h. What there is stands in dm_kernels.h; here are the
 * functions for any processor, and the choice.
 */
#include "backend/reduce/dm_reduce.h"

#include <assert.h>

#include "backend/reduce/dm_kernels.h"

/* --- for any processor --------------------------------------------------------------- */

#define ANY_PAIR(dtype, op, name, type, value) DEFINE_PAIR(, name, type, value)
#define ANY_NARROW(dtype, format, type) DEFINE_NARROW(, format, type)
#define ANY_DIVISION(dtype, name, type, value) DEFINE_DIVISION(, name, type, value)
#define ANY_SCALING(dtype, name, type, factor_type, value)                             \
    DEFINE_SCALING(, name, type, factor_type, value)

KERNELS(ANY_PAIR)
NARROWS(ANY_NARROW)
DIVISIONS(ANY_DIVISION)
SCALINGS(ANY_SCALING)

#define ANY_PAIR_ENTRIES(dtype, format, type) NARROW_PAIR_ENTRIES(, dtype, format)
#define ANY_ACCUMULATOR_ENTRIES(dtype, format, type)                                   \
    NARROW_ACCUMULATOR_ENTRIES(, dtype, format)
#define ANY_DIVISION_ENTRY(dtype, format, type) NARROW_DIVISION_ENTRY(, dtype, format)
#define ANY_SCALING_ENTRY(dtype, format, type) NARROW_SCALING_ENTRY(, dtype, format)

static const dm_kernel_set for_any = {
    .pairs = {KERNELS(PAIR_ENTRY) NARROWS(ANY_PAIR_ENTRIES)},
    .accumulators = {NARROWS(ANY_ACCUMULATOR_ENTRIES)},
    .divisions = {DIVISIONS(DIVISION_ENTRY) NARROWS(ANY_DIVISION_ENTRY)},
    .scalings = {SCALINGS(SCALING_ENTRY) NARROWS(ANY_SCALING_ENTRY)},
};

/* --- the choice -------------------------------------------------------------------- */

/* clang asks for F16C since version 18 only; no processor has AVX2 and FMA without it. */
#if defined(__clang__) && __clang_major__ < 18
#    define F16C "fma"
#else
#    define F16C "f16c"
#endif

const dm_kernel_set *
dm_kernels(void)
{
#if defined(__x86_64__) && !defined(DM_REDUCE_PORTABLE)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports(F16C)) {
        return &dm_kernels_avx2;
    }
#endif
    return &for_any;
}

dm_reduce_fn
dm_reduce_lookup(dm_dtype dtype, dm_reduce_op op)
{
    assert((unsigned)dtype < DM_DTYPE_COUNT && (unsigned)op < DM_REDUCE_OP_COUNT);
    const dm_kernel_set *set = dm_kernels();
    if ((op == DM_AVG && set->divisions[dtype] == NULL) ||
        (op == DM_PREMUL_SUM && set->scalings[dtype] == NULL)) {
        return NULL;
    }
    return set->pairs[dtype][op == DM_AVG || op == DM_PREMUL_SUM ? DM_SUM : op];
}

void
dm_reduce_scale(void *out, const void *in, size_t count, dm_dtype dtype, double factor)
{
    assert(dm_reduce_lookup(dtype, DM_PREMUL_SUM) != NULL);
    dm_kernels()->scalings[dtype](out, in, count, factor);
}

void
dm_reduce_finish(void *data, size_t count, dm_dtype dtype, dm_reduce_op op, int size)
{
    assert(size >= 1 && dm_reduce_lookup(dtype, op) != NULL);
    if (op == DM_AVG && size > 1) {
        dm_kernels()->divisions[dtype](data, count, size);
    }
}
