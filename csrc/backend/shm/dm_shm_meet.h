/* How members find out whether they share a host, and how they get their segment.
 *
 * Each member puts one card into the store (one set) and reads all of them (one
 * multi-get). The cards say on which host a member is, in which namespaces, and what
 * DEVICEMESH_TRANSPORT wants. If all agree, group rank 0 passes the segment over a unix
 * socket whose abstract name is on its card; both ends check who the other is.
 */
#ifndef DM_SHM_MEET_H
#define DM_SHM_MEET_H

#include "backend/shm/dm_shm_comm.h"

/* Meets the other members. `*together` false: they do not share a host, or somebody
 * wants tcp; all members find the same. Else the communicator is attached to the
 * segment and has joined. DM_ERR_TIMEOUT names the ranks that have not come,
 * DM_ERR_MISMATCH: one wants shm and another tcp. DM_ERR_CONNECTION: shm is wanted and
 * the members are on different hosts. */
dm_status
dm_shm_meet(dm_comm *comm, const dm_wait *wait, bool *together, dm_error *err);

/* Joins through this segment, which the communicator takes over. `pids` may be NULL. */
dm_status
dm_shm_attach(dm_comm *comm, dm_shm_segment *segment, const int32_t *pids,
              dm_error *err);

/* Waits until everybody has joined. */
dm_status
dm_shm_await_joined(dm_comm *comm, const dm_wait *wait, dm_error *err);

#endif
