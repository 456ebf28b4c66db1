/* Reduce kernels: out[i] = a[i] op b[i], for every dtype and reduce op.
 *
 * Pure C, no state; used by every CPU backend (gloo gets them as its reduce
 * function). out may be a or b; the three do not overlap otherwise, and no alignment
 * is assumed. Integers wrap as numpy's do. Floats below 32 bits compute in float32
 * and round once (to nearest even). min and max let NaN through as
 * numpy.minimum/maximum do, put -0 below 0, and give the same bits whichever of a
 * and b comes first. Bools: any byte but 0 is true, sum is or, product is and.
 */
#ifndef DM_REDUCE_H
#define DM_REDUCE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/dm_dtype.h"

typedef void (*dm_reduce_fn)(void *out, const void *a, const void *b, size_t count);

/* The kernel, or NULL where the pair makes no sense (min of complex, band of
 * floats, avg of bool). DM_AVG's kernel is DM_SUM's; the caller ends with
 * dm_reduce_finish. So is DM_PREMUL_SUM's, for floats and complex: the caller begins
 * with dm_reduce_scale. */
dm_reduce_fn
dm_reduce_lookup(dm_dtype dtype, dm_reduce_op op);

/* out[i] = in[i] * factor: what DM_PREMUL_SUM does before it sums. In double for float64
 * and complex128, else in float32, rounded once. The dtype must be float or complex; out
 * may be in. */
void
dm_reduce_scale(void *out, const void *in, size_t count, dm_dtype dtype, double factor);

/* What is left to do once all `size` members are combined: DM_AVG divides (integers
 * towards zero, as torch does); nothing for the other ops. The pair must have a
 * kernel. */
void
dm_reduce_finish(void *data, size_t count, dm_dtype dtype, dm_reduce_op op, int size);

/* out = inputs[0] op inputs[1] op ... op inputs[n - 1], in that order, n >= 1 arrays of
 * `count` elements: as n - 1 calls of the kernel, with the traffic of reading each input
 * once and writing out once. Sums and products of floats below 32 bits accumulate in
 * float32 and round once, at the end. With DM_AVG the sum is divided by `size` (before
 * that rounding; 1 leaves the sum to a later dm_reduce_finish), which the other ops
 * ignore. out may be any of the inputs, which may repeat; nothing overlaps otherwise.
 * The pair must have a kernel. */
void
dm_reduce_many(void *out, const void *const *inputs, int n, size_t count,
               dm_dtype dtype, dm_reduce_op op, int size);

#endif
