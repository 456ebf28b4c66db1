/* Waiting for words in the segment to advance, and waking those who wait.
 *
 * A word only ever counts up (modulo 2^64): flags have the round in their upper half,
 * so one comparison serves for them and for plain counters. A waiter looks at the
 * words with a few pauses, then with yields, then sleeps on its own `bell` in slices:
 *
 *     waiter                              publisher
 *     s = bell                            word = new value         (A)
 *     waiting = whom                      if sleepers != 0:        (B)
 *     sleepers++                    (C)     for each q with waiting[q] == me or any:
 *     if the word is still old:     (D)       bell[q]++, futex_wake(bell[q])
 *         futex_wait(bell, s, slice)
 *     sleepers--, waiting = 0
 *
 * No wake-up is lost: A, B, C and D are sequentially consistent, so that either B sees
 * C or D sees A; in the first case the bell moves after s was read, and the kernel
 * refuses to sleep or is woken. tests/c/shm_model_test.c walks through every
 * interleaving of this, and finds the lost wake-up when one of the four is weakened.
 * Waiters look for dead members and at the caller's poll function between slices only.
 */
#ifndef DM_SHM_WAIT_H
#define DM_SHM_WAIT_H

#include "backend/shm/dm_shm_comm.h"

/* `waiting`: a wait that anybody's word can end. */
#define DM_SHM_ANYBODY UINT32_MAX

/* Words of the members first..end-1 (mine is left out), equally far apart, that must
 * all reach `want`. */
typedef struct dm_shm_goal {
    const _Atomic uint64_t *first_word;
    size_t stride; /* bytes */
    int32_t first;
    int32_t end;
    uint64_t want;
    bool collective; /* all members come here: what they have begun is compared */
    /* Where the words are not enough: whether the goal is reached. The words then say
     * nothing, and any member can bring it about. */
    bool (*reached)(dm_comm *comm, void *arg);
    void *arg;
} dm_shm_goal;

static inline bool
dm_shm_reached(uint64_t value, uint64_t want)
{
    return (int64_t)(value - want) >= 0;
}

/* Waits until the goal is reached. DM_ERR_PEER (a member that is waited for has gone, or
 * any member left in trouble), DM_ERR_MISMATCH (somebody does something else), DM_ERR_TIMEOUT, DM_ERR_ABORTED and what the
 * poll function says; texts name the members. */
dm_status
dm_shm_wait(dm_comm *comm, const dm_shm_goal *goal, const dm_wait *wait, dm_error *err);

/* The first member of the goal, `from` or behind, that has not reached it; -1 when there
 * is none. */
int32_t
dm_shm_first_missing(dm_comm *comm, const dm_shm_goal *goal, int32_t from);

/* Wakes the members that wait for me: call after the word was stored with
 * memory_order_seq_cst. */
void
dm_shm_wake_waiters(dm_comm *comm);

static inline void
dm_shm_wake(dm_comm *comm)
{
    /* Sequentially consistent: B above. */
    if (atomic_load(&comm->head->sleepers) != 0) {
        dm_shm_wake_waiters(comm);
    }
}

/* Wakes one member, whatever it waits for. */
void
dm_shm_ring(dm_comm *comm, int32_t member);

/* Wakes everybody who sleeps, my own thread too. */
void
dm_shm_ring_all(dm_comm *comm);

#endif
