/* What a collective was asked to do: fingerprints and words.
 *
 * Every collective is mixed into a chain, so that a flag with the chain's upper half in
 * it stands for everything that its writer has called so far. Members that have
 * called the same collectives with the same arguments have equal chains; all of them
 * are compared with every flag, at no cost. What each member asked for last is kept in
 * its history, to tell people what differed.
 */
#ifndef DM_SHM_OP_H
#define DM_SHM_OP_H

#include "backend/shm/dm_shm_comm.h"

/* One entry of a history, as plain numbers. */
typedef struct dm_shm_request {
    uint64_t what;
    uint64_t count;
    uint64_t counts;
} dm_shm_request;

/* Begins a collective: counts it, chains it, records it in my history. */
void
dm_shm_begin(dm_comm *comm, const dm_op *op);

/* Writes "all_reduce(sum) of 4 float32", "broadcast of 8 int64 from rank 0". */
void
dm_shm_describe(const dm_comm *comm, const dm_shm_request *request, char *text,
                size_t size);

#endif
