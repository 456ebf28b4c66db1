/* What the files of shm/ share: the communicator and its rounds.
 *
 * Everything in a dm_comm belongs to the thread that runs an operation, except the
 * atomics, which comm_abort touches from other threads.
 */
#ifndef DM_SHM_COMM_H
#define DM_SHM_COMM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "backend/dm_backend.h"
#include "backend/shm/dm_shm_segment.h"

typedef struct dm_shm_inbox dm_shm_inbox;

typedef enum dm_shm_tristate { DM_SHM_UNKNOWN, DM_SHM_NO, DM_SHM_YES } dm_shm_tristate;

struct dm_comm {
    int32_t rank;
    int32_t size;
    const int32_t *ranks; /* these three: borrowed from the group */
    const char *name;
    dm_store *store;

    dm_shm_segment *segment; /* NULL until the members have met */
    dm_shm_head *head;
    dm_shm_member *members; /* of the segment, by group rank */
    dm_shm_member *self;
    bool broken; /* an operation has failed half way */
    int pauses;  /* before the first yield; 0 where members share processors */

    /* Set once by comm_abort, from any thread. */
    atomic_bool aborted;
    /* The segment is there: comm_abort may ring its bells. */
    atomic_bool attached;
    /* An operation is being run: leaving now is no clean farewell. */
    atomic_bool running;

    /* Collectives: all members count and compute these alike. */
    uint64_t begun;      /* collectives */
    uint64_t chain;      /* fingerprint of all of them, see dm_shm_op.h */
    uint64_t round;      /* the last one that has begun */
    uint64_t next_small; /* small slots used so far */
    uint64_t next_large;
    uint64_t small_round[DM_SHM_SMALL_SLOTS]; /* the round that used a slot last */
    uint64_t large_round[DM_SHM_LARGE_SLOTS];

    uint64_t cleared;    /* every member has finished the rounds up to here */
    uint64_t cells_free; /* my cells are free for the rounds before this one */
    int64_t next_poll;   /* when a long operation asks its caller again; 0 at first */
    uint64_t parting;    /* the record to leave with if the operation fails */
    dm_shm_tristate direct; /* whether members may read each other's memory */

    dm_shm_inbox *inbox; /* of messages; NULL until the first one */
};

/* --- where things are --------------------------------------------------------------- */

static inline dm_shm_cell *
dm_shm_cell_of(const dm_comm *comm, int32_t member, uint64_t round)
{
    return &comm->members[member].cells[round % DM_SHM_CELLS];
}

static inline unsigned char *
dm_shm_small_slot(const dm_comm *comm, int32_t member, uint64_t slot)
{
    size_t index = (size_t)member * DM_SHM_SMALL_SLOTS + slot % DM_SHM_SMALL_SLOTS;
    return comm->segment->base + comm->segment->plan.small +
           index * DM_SHM_SMALL_STRIDE;
}

static inline unsigned char *
dm_shm_large_slot(const dm_comm *comm, int32_t member, uint64_t slot)
{
    const dm_shm_plan *plan = &comm->segment->plan;
    size_t index = (size_t)member * DM_SHM_LARGE_SLOTS + slot % DM_SHM_LARGE_SLOTS;
    return comm->segment->base + plan->large + index * plan->chunk;
}

#endif
