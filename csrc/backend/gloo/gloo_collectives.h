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

/* What all members must agree on; `turn` counts the group's collectives. Point-to-point
 * messages match by tag alone: the connection keeps their order. */
uint64_t
key_of(const dm_op &op, uint64_t turn) noexcept;

/* Runs one operation over open links. Throws. */
void
run_operation(Links &links, const dm_op &op, uint64_t key);

bool
is_point_to_point(dm_op_kind kind) noexcept;

/* The whole operation in a group of one: copies. */
void
run_alone(const dm_op &op);

bool
supports(dm_op_kind kind, dm_dtype dtype, dm_reduce_op reduce) noexcept;

} // namespace dm_gloo

#endif
