/* How members leave, and what is said about it.
 *
 * `state` of a member goes from 0 to DM_SHM_JOINED, written by itself, and at most once
 * on to a record of why it left: the reason and up to two members whom it is about.
 * A member that leaves because of another's record leaves a copy of that one, so that
 * everybody names the root of the trouble.
 */
#ifndef DM_SHM_PEERS_H
#define DM_SHM_PEERS_H

#include <sys/types.h>

#include "backend/shm/dm_shm_comm.h"
#include "backend/shm/dm_shm_wait.h"

typedef enum dm_shm_reason {
    DM_SHM_HERE = 1,    /* has joined and not left: the value of `state` */
    DM_SHM_LEFT,        /* a closed its group between two operations */
    DM_SHM_ABORTED,     /* a aborted or closed its group during an operation */
    DM_SHM_INTERRUPTED, /* a was interrupted */
    DM_SHM_TIMED_OUT,   /* a timed out waiting for b */
    DM_SHM_DIED,        /* a's process ended */
    DM_SHM_MISMATCHED,  /* a and b called different operations */
    DM_SHM_MISFIT,      /* a's data did not fit what b had asked for */
    DM_SHM_FAILED,      /* a failed for a reason of its own */
} dm_shm_reason;

/* The state of a member that has joined; records are larger, before that it is 0. */
#define DM_SHM_JOINED UINT64_C(1)

static inline uint64_t
dm_shm_record(dm_shm_reason reason, int32_t a, int32_t b)
{
    return (uint64_t)reason | (uint64_t)(uint32_t)a << 8 | (uint64_t)(uint32_t)b << 36;
}

/* Leaves with that record, if I have not left yet, and wakes everybody who sleeps. Any
 * thread; never blocks. */
void
dm_shm_leave(dm_comm *comm, uint64_t record);

/* The checks below say why an operation cannot go on and keep the record that is fit
 * for it in comm->parting; the end of the operation leaves with it. None of them
 * touches anything else, so a caller may also ignore the answer. */

/* DM_OK, or why some member left if it was for more than to close its group: after that
 * the group is of no use to anybody. DM_ERR_PEER or DM_ERR_MISMATCH. */
dm_status
dm_shm_check_trouble(dm_comm *comm, dm_error *err);

/* DM_OK while that member is there. `look_hard` also asks the kernel whether it lives. */
dm_status
dm_shm_check_member(dm_comm *comm, int32_t member, bool look_hard, dm_error *err);

/* For who waits for anybody: fails when somebody has died or when all have left. */
dm_status
dm_shm_check_any(dm_comm *comm, bool look_hard, dm_error *err);

/* DM_OK, or DM_ERR_MISMATCH when `member` has begun another collective in the place of
 * my current one. */
dm_status
dm_shm_check_history(dm_comm *comm, int32_t member, dm_error *err);

/* DM_ERR_MISMATCH: my current collective and that of `member` differ. */
dm_status
dm_shm_say_mismatch(dm_comm *comm, int32_t member, dm_error *err);

/* Rewrites a bare "timed out": names the members of the goal that have not come. */
void
dm_shm_say_timeout(dm_comm *comm, const dm_shm_goal *goal, int32_t missing,
                   dm_error *err);

/* Writes "rank 3 (pid 812)". Returns `text`. */
enum { DM_SHM_WHO_SIZE = 48 };
const char *
dm_shm_who(const dm_comm *comm, int32_t member, char text[DM_SHM_WHO_SIZE]);

/* Whether the process `pid` of this pid namespace ends within `patience_ms`, reaped or
 * not. (A process that ends closes its descriptors a little earlier.) */
bool
dm_shm_process_ended(pid_t pid, int patience_ms);

#endif
