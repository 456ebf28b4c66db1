/* The operations of the gloo backend, on the calling thread.
 *
 * gloo's own algorithms where it has one; reduce and reduce_scatter, which it lacks
 * for elements of any type, are ours, on the same buffers. Reductions use our kernels
 * everywhere, so that what can be reduced does not depend on gloo's age.
 */
#ifndef GLOO_COLLECTIVES_H
#define GLOO_COLLECTIVES_H

#include "backend/gloo/gloo_core.h"
#include "backend/gloo/gloo_links.h"

namespace dm_gloo {

/* Runs one operation over open links; `turn` counts the collectives of the group, the
 * same on all members. Throws. */
void
run_operation(Links &links, const dm_op &op, uint64_t turn);

/* The whole operation in a group of one: copies. */
void
run_alone(const dm_op &op);

bool
supports(dm_op_kind kind, dm_dtype dtype, dm_reduce_op reduce) noexcept;

} // namespace dm_gloo

#endif
