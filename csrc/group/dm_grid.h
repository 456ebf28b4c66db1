/* The grid of ranks that several groups span: from one group per dim on each member to
 * the ranks of the whole mesh.
 *
 * A member knows its own lines only. The members tell each other theirs through the
 * groups themselves, so this is a collective call: every member makes it, with its groups
 * in the order of the dims.
 */
#ifndef DM_GRID_H
#define DM_GRID_H

#include <stdint.h>

#include "base/dm_clock.h"
#include "base/dm_status.h"
#include "group/dm_group.h"

enum { DM_GRID_MAX_NDIM = 64 };

/* `groups[d]` is this rank's group along dim d; 1 to DM_GRID_MAX_NDIM of one world. The
 * ranks come row-major in memory of their own (dm_free). Blocks for the other members,
 * each operation for the group's time-out at most; in a simulated world the lines are
 * continued by arithmetic where they are regular.
 *
 * DM_ERR_MISMATCH, on every member: groups in another order on some rank, of other sizes,
 * that share more than one rank, or that do not close to a grid; the text shows both
 * sides. DM_ERR_VALUE in a simulated world: the same, or lines without a regular step.
 * DM_ERR_UNSUPPORTED: groups whose backend moves no host memory. Also whatever an
 * operation of the groups fails with. */
dm_status
dm_grid_of_groups(dm_group *const *groups, int ndim, const dm_wait *wait,
                  int32_t **ranks, dm_error *err);

#endif
