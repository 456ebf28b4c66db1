/* The collectives, by family. Each file has up to three ways for one operation: inside
 * cells, through small slots, in chunks through large slots. All members take the same
 * way: it depends only on what they all know. Results have the same bits everywhere,
 * since operands are combined in rank order, or once and then copied.
 */
#ifndef DM_SHM_COLLECTIVES_H
#define DM_SHM_COLLECTIVES_H

#include "backend/shm/dm_shm_comm.h"

/* dm_shm_reduce.c */
dm_status
dm_shm_all_reduce(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err);

dm_status
dm_shm_reduce(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err);

dm_status
dm_shm_reduce_scatter(dm_comm *comm, const dm_op *op, const dm_wait *wait,
                      dm_error *err);

/* dm_shm_gather.c */
dm_status
dm_shm_all_gather(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err);

dm_status
dm_shm_gather(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err);

dm_status
dm_shm_barrier(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err);

/* dm_shm_spread.c */
dm_status
dm_shm_broadcast(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err);

dm_status
dm_shm_scatter(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err);

/* dm_shm_all_to_all.c */
dm_status
dm_shm_all_to_all(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err);

#endif
