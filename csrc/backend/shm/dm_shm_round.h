/* Rounds: how collectives exchange data.
 *
 * A collective is a sequence of rounds, numbered on, equal on all members. In a round a
 * member may publish (put data into its cell or slot, then store the cell's flag) and
 * may await others' flags and read what they published. A cell or slot of round t is
 * used again only when every member has finished round t. That is known without asking
 * where all members await each other: a flag of round t says that its writer is
 * through with what it read in earlier rounds (`cleared`). Elsewhere members store
 * their progress in `done` and a publisher that needs a cell or slot looks there.
 *
 * Orders: data is written plainly before the flag's store and read after the flag's
 * load, which are release and acquire (and more, for the sake of sleepers). `done` is
 * the same the other way round: reads come before its store, writes into the slot
 * after its load.
 */
#ifndef DM_SHM_ROUND_H
#define DM_SHM_ROUND_H

#include "backend/shm/dm_shm_comm.h"
#include "backend/shm/dm_shm_op.h"
#include "backend/shm/dm_shm_wait.h"

/* What my flag of this round is, and everybody's who agrees with me. */
static inline uint64_t
dm_shm_flag(const dm_comm *comm, uint64_t round)
{
    return round << 32 | comm->chain >> 32;
}

/* Waits until every member has finished `round`. */
dm_status
dm_shm_await_done(dm_comm *comm, uint64_t round, const dm_wait *wait, dm_error *err);

static inline dm_status
dm_shm_require_done(dm_comm *comm, uint64_t round, const dm_wait *wait, dm_error *err)
{
    return round <= comm->cleared ? DM_OK : dm_shm_await_done(comm, round, wait, err);
}

/* Goes on to the next round; its number is comm->round. */
static inline void
dm_shm_next_round(dm_comm *comm)
{
    comm->round++;
}

/* Makes sure that my cell of this round is free, `*cell`. Waits for members that are
 * more than DM_SHM_CELLS_HALF rounds behind. */
static inline dm_status
dm_shm_open_cell(dm_comm *comm, dm_shm_cell **cell, const dm_wait *wait, dm_error *err)
{
    uint64_t round = comm->round;
    if (round >= comm->cells_free) {
        /* Cells come free by halves: in this half they were last used by the rounds
         * DM_SHM_CELLS before, the last of which every member has reported. */
        uint64_t half = round / DM_SHM_CELLS_HALF * DM_SHM_CELLS_HALF;
        if (half > DM_SHM_CELLS_HALF) {
            DM_TRY(dm_shm_require_done(comm, half - DM_SHM_CELLS_HALF - 1, wait, err));
        }
        comm->cells_free = half + DM_SHM_CELLS_HALF;
    }
    *cell = dm_shm_cell_of(comm, comm->rank, round);
    return DM_OK;
}

/* Announces what I have put into this round's cell and slot. */
static inline void
dm_shm_publish(dm_comm *comm, dm_shm_cell *cell)
{
    /* Release for the data; sequentially consistent for sleepers (dm_shm_wait.h, A). */
    atomic_store(&cell->flag, dm_shm_flag(comm, comm->round));
    dm_shm_wake(comm);
}

/* Opens the cell and publishes an announcement without data. */
static inline dm_status
dm_shm_announce(dm_comm *comm, const dm_wait *wait, dm_error *err)
{
    dm_shm_cell *cell;
    DM_TRY(dm_shm_open_cell(comm, &cell, wait, err));
    dm_shm_publish(comm, cell);
    return DM_OK;
}

/* Waits for the flags of round `round` of the members first..end-1. */
dm_status
dm_shm_await_flags(dm_comm *comm, uint64_t round, int32_t first, int32_t end,
                   const dm_wait *wait, dm_error *err);

/* Waits for one member's flag and returns its cell. */
static inline dm_status
dm_shm_await_one(dm_comm *comm, int32_t member, uint64_t round,
                 const dm_shm_cell **cell, const dm_wait *wait, dm_error *err)
{
    dm_shm_cell *c = dm_shm_cell_of(comm, member, round);
    *cell = c;
    /* Acquire: the data was written before the flag. */
    uint64_t flag = atomic_load_explicit(&c->flag, memory_order_acquire);
    if (flag == dm_shm_flag(comm, round)) {
        return DM_OK;
    }
    return dm_shm_await_flags(comm, round, member, member + 1, wait, err);
}

/* Waits for everybody's flag. `lag` says how far back the rounds lie that a member is
 * through with when it publishes: 1 where it reads a round before it publishes the
 * next. */
static inline dm_status
dm_shm_await_all(dm_comm *comm, uint64_t round, uint64_t lag, const dm_wait *wait,
                 dm_error *err)
{
    DM_TRY(dm_shm_await_flags(comm, round, 0, comm->size, wait, err));
    if (round > lag && round - lag > comm->cleared) {
        comm->cleared = round - lag;
    }
    return DM_OK;
}

/* Reports that I shall read nothing any more of what is published up to `round`. */
static inline void
dm_shm_report_through(dm_comm *comm, uint64_t round)
{
    /* Release for what was read; sequentially consistent for sleepers. */
    atomic_store(&comm->self->done, round);
    dm_shm_wake(comm);
}

/* The same for everything up to this round. */
static inline void
dm_shm_report(dm_comm *comm)
{
    dm_shm_report_through(comm, comm->round);
}

/* The end of a round that used cells only: reports where a half ends, where others may
 * wait for it. */
static inline void
dm_shm_end_cells(dm_comm *comm)
{
    if (comm->round % DM_SHM_CELLS_HALF == DM_SHM_CELLS_HALF - 1) {
        dm_shm_report(comm);
    }
}

/* Takes the next slot, the same for all members, for this round. `*used` is the round
 * in which it was used last: a member that writes into it requires that to be done. Who
 * uses slots reports at the end of its operation. */
static inline uint64_t
dm_shm_next_small(dm_comm *comm, uint64_t *used)
{
    uint64_t slot = comm->next_small++;
    *used = comm->small_round[slot % DM_SHM_SMALL_SLOTS];
    comm->small_round[slot % DM_SHM_SMALL_SLOTS] = comm->round;
    return slot;
}

static inline uint64_t
dm_shm_next_large(dm_comm *comm, uint64_t *used)
{
    uint64_t slot = comm->next_large++;
    *used = comm->large_round[slot % DM_SHM_LARGE_SLOTS];
    comm->large_round[slot % DM_SHM_LARGE_SLOTS] = comm->round;
    return slot;
}

/* Between the rounds of a long operation: asks the caller now and then whether to go
 * on, and whether somebody aborts. */
dm_status
dm_shm_go_on(dm_comm *comm, const dm_wait *wait, dm_error *err);

#endif
