/* Many arrays into one: see dm_reduce.h.
 *
 * Block by block, each small enough that what has been combined of it stays in the
 * nearest cache:
 *
 *     for each block:
 *         sums = inputs[0] op inputs[1]
 *         sums = sums op inputs[k]            for k = 2 .. n - 2
 *         out = round(sums op inputs[n - 1])
 *
 * Only the last step writes to out, so out may be any of the inputs.
 */
#include <assert.h>

#include "backend/reduce/dm_kernels.h"

/* In the nearest cache together with the same stretch of every input: those often lie
 * pages apart and compete for the same places in it. */
enum { BLOCK_BYTES = 2048 };

/* n >= 2. */
static void
combine_narrow(const dm_accumulator *narrow, char *out, const void *const *inputs,
               int n, size_t count, dm_dtype dtype, int divisor)
{
    enum { BLOCK = BLOCK_BYTES / sizeof(float) };
    float sums[BLOCK];
    size_t width = dm_dtype_size(dtype);
    for (size_t at = 0; at < count; at += BLOCK) {
        size_t length = count - at < BLOCK ? count - at : BLOCK;
        size_t offset = at * width;
        narrow->start(sums, (const char *)inputs[0] + offset,
                      (const char *)inputs[1] + offset, length);
        int last = divisor > 1 ? n : n - 1;
        for (int k = 2; k < last; k++) {
            narrow->add(sums, (const char *)inputs[k] + offset, length);
        }
        if (divisor > 1) {
            dm_kernels()->divisions[DM_FLOAT32](sums, length, divisor);
            narrow->round(out + offset, sums, length);
        }
        else {
            narrow->end(out + offset, sums, (const char *)inputs[n - 1] + offset,
                        length);
        }
    }
}

/* n >= 2. */
static void
combine_wide(dm_reduce_fn kernel, char *out, const void *const *inputs, int n,
             size_t count, dm_dtype dtype, int divisor)
{
    _Alignas(64) char sums[BLOCK_BYTES];
    size_t width = dm_dtype_size(dtype);
    size_t block = BLOCK_BYTES / width;
    for (size_t at = 0; at < count; at += block) {
        size_t length = count - at < block ? count - at : block;
        size_t offset = at * width;
        const char *left = (const char *)inputs[0] + offset;
        for (int k = 1; k < n; k++) {
            char *to = k == n - 1 ? out + offset : sums;
            kernel(to, left, (const char *)inputs[k] + offset, length);
            left = to;
        }
        if (divisor > 1) {
            dm_reduce_finish(out + offset, length, dtype, DM_AVG, divisor);
        }
    }
}

void
dm_reduce_many(void *out, const void *const *inputs, int n, size_t count,
               dm_dtype dtype, dm_reduce_op op, int size)
{
    dm_reduce_fn kernel = dm_reduce_lookup(dtype, op);
    dm_reduce_op plain = op == DM_AVG || op == DM_PREMUL_SUM ? DM_SUM : op;
    const dm_accumulator *narrow = &dm_kernels()->accumulators[dtype][plain];
    int divisor = op == DM_AVG ? size : 1;
    assert(n >= 1 && size >= 1 && kernel != NULL);

    if (n == 1) {
        if (count > 0) {
            memmove(out, inputs[0], count * dm_dtype_size(dtype));
        }
        dm_reduce_finish(out, count, dtype, op, size);
    }
    else if (narrow->start != NULL && (n > 2 || divisor > 1)) {
        combine_narrow(narrow, out, inputs, n, count, dtype, divisor);
    }
    else {
        combine_wide(kernel, out, inputs, n, count, dtype, divisor);
    }
}
