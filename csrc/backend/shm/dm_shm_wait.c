/* Waiting and waking: see dm_shm_wait.h.
 *
 * Everything here is the slow path: callers have looked at the words once.
 */
#include "backend/shm/dm_shm_wait.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "backend/shm/dm_shm_message.h"
#include "backend/shm/dm_shm_peers.h"

static inline void
pause_once(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

/* --- waking ------------------------------------------------------------------------- */

/* Not private: the waiter may be another process. */
static void
futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void
futex_wait(_Atomic uint32_t *word, uint32_t value, int64_t ns)
{
    struct timespec ts = {.tv_sec = ns / DM_NS_PER_S, .tv_nsec = ns % DM_NS_PER_S};
    /* Woken, changed before it slept, timed out, interrupted: the caller looks again. */
    syscall(SYS_futex, word, FUTEX_WAIT, value, &ts, NULL, 0);
}

static void
ring(dm_shm_member *member)
{
    /* Sequentially consistent, as everything about sleep: the order "word, then bell"
     * must be seen by a waiter that reads "bell, then word". */
    atomic_fetch_add(&member->bell, 1);
    futex_wake(&member->bell);
}

void
dm_shm_wake_waiters(dm_comm *comm)
{
    uint32_t me = (uint32_t)comm->rank + 1;
    for (int32_t i = 0; i < comm->size; i++) {
        uint32_t waiting = atomic_load(&comm->members[i].waiting);
        if (waiting == me || waiting == DM_SHM_ANYBODY) {
            ring(&comm->members[i]);
        }
    }
}

void
dm_shm_ring(dm_comm *comm, int32_t member)
{
    if (atomic_load(&comm->members[member].waiting) != 0) {
        ring(&comm->members[member]);
    }
}

void
dm_shm_ring_all(dm_comm *comm)
{
    for (int32_t i = 0; i < comm->size; i++) {
        dm_shm_ring(comm, i);
    }
    /* Mine without a look: it may just be on its way to sleep. */
    ring(comm->self);
}

/* --- waiting ------------------------------------------------------------------------ */

int32_t
dm_shm_first_missing(dm_comm *comm, const dm_shm_goal *goal, int32_t from)
{
    if (goal->reached != NULL) {
        return goal->reached(comm, goal->arg) ? -1 : goal->first;
    }
    for (int32_t i = from; i < goal->end; i++) {
        const _Atomic uint64_t *word =
            (const void *)((const char *)goal->first_word +
                           (size_t)(i - goal->first) * goal->stride);
        /* Sequentially consistent: D in the header. Costs no more than acquire here,
         * which is what it takes to see the data that the word announces. */
        if (i != comm->rank && !dm_shm_reached(atomic_load(word), goal->want)) {
            return i;
        }
    }
    return -1;
}

/* Sleeps for at most a slice, unless the goal is reached. `missing` is a member that
 * was missing just now. */
static void
sleep_once(dm_comm *comm, const dm_shm_goal *goal, int32_t missing, const dm_wait *wait)
{
    dm_shm_member *self = comm->self;
    uint32_t whom = goal->reached != NULL ? DM_SHM_ANYBODY : (uint32_t)missing + 1;
    int64_t slice = dm_wait_slice(wait);

    uint32_t bell = atomic_load(&self->bell);
    atomic_store(&self->waiting, whom);
    atomic_fetch_add(&comm->head->sleepers, 1);
    bool still = dm_shm_first_missing(comm, goal, missing) == missing;
    if (still && !atomic_load(&comm->aborted) && !dm_shm_take_in(comm)) {
        futex_wait(&self->bell, bell, slice);
    }
    atomic_fetch_sub(&comm->head->sleepers, 1);
    atomic_store(&self->waiting, 0);
}

/* DM_OK while nobody is in trouble or does something else, and nobody who is missing
 * has gone. */
static dm_status
look_at_peers(dm_comm *comm, const dm_shm_goal *goal, int32_t missing, bool look_hard,
              dm_error *err)
{
    DM_TRY(dm_shm_check_trouble(comm, err));
    if (goal->reached != NULL) {
        return dm_shm_check_any(comm, look_hard, err);
    }
    for (int32_t i = missing; i >= 0; i = dm_shm_first_missing(comm, goal, i + 1)) {
        DM_TRY(dm_shm_check_member(comm, i, look_hard, err));
    }
    for (int32_t i = 0; goal->collective && i < comm->size; i++) {
        DM_TRY(dm_shm_check_history(comm, i, err));
    }
    return DM_OK;
}

dm_status
dm_shm_wait(dm_comm *comm, const dm_shm_goal *goal, const dm_wait *wait, dm_error *err)
{
    int32_t missing = goal->first;
    for (int i = 0; i < comm->pauses; i++) {
        missing = dm_shm_first_missing(comm, goal, missing);
        if (missing < 0) {
            return DM_OK;
        }
        pause_once();
    }
    for (int i = 0; i < DM_SHM_YIELDS; i++) {
        missing = dm_shm_first_missing(comm, goal, missing);
        if (missing < 0) {
            return DM_OK;
        }
        sched_yield();
    }
    bool look_hard = false;
    for (;;) {
        missing = dm_shm_first_missing(comm, goal, missing);
        if (missing < 0) {
            return DM_OK;
        }
        if (atomic_load(&comm->aborted)) {
            return dm_error_set(err, DM_ERR_ABORTED, "the group was aborted");
        }
        dm_status status = look_at_peers(comm, goal, missing, look_hard, err);
        if (status != DM_OK) {
            if (dm_shm_first_missing(comm, goal, missing) < 0) {
                /* Somebody left, but after it did what it is waited for. */
                comm->parting = 0;
                return DM_OK;
            }
            return status;
        }
        status = dm_wait_poll(wait, err);
        if (status != DM_OK) {
            if (status == DM_ERR_TIMEOUT) {
                dm_shm_say_timeout(comm, goal, missing, err);
            }
            return status;
        }
        int64_t before = dm_clock_now();
        sleep_once(comm, goal, missing, wait);
        look_hard = dm_clock_now() - before >= DM_WAIT_SLICE_NS / 2;
    }
}
