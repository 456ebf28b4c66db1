/* The shm backend: collectives of the processes of one host through shared memory. */
#ifndef DM_SHM_H
#define DM_SHM_H

#include "backend/dm_backend.h"
#include "backend/shm/dm_shm_segment.h"

extern const dm_backend dm_backend_shm;

/* As comm_connect of dm_backend_shm, but it is no error when the members cannot share
 * memory: then `*together` is false, on all of them, and the communicator is good for
 * nothing but to be freed. */
dm_status
dm_shm_connect(dm_comm *comm, const dm_wait *wait, bool *together, dm_error *err);

/* Connects through a segment that the caller has, instead of meeting: for ranks that are
 * threads of one process. Holds the segment. */
dm_status
dm_shm_connect_to(dm_comm *comm, dm_shm_segment *segment, const dm_wait *wait,
                  dm_error *err);

#endif
