/* The waits of rounds: see dm_shm_round.h. */
#include "backend/shm/dm_shm_round.h"

#include "backend/shm/dm_shm_peers.h"

/* How often a long operation asks its caller whether to go on. */
#define POLL_INTERVAL_NS (50 * DM_NS_PER_MS)

dm_status
dm_shm_await_done(dm_comm *comm, uint64_t round, const dm_wait *wait, dm_error *err)
{
    uint64_t cleared = UINT64_MAX;
    for (int pass = 0; pass < 2; pass++) {
        cleared = UINT64_MAX;
        for (int32_t i = 0; i < comm->size; i++) {
            if (i != comm->rank) {
                /* Acquire: the member read the slot before it reported. */
                uint64_t done =
                    atomic_load_explicit(&comm->members[i].done, memory_order_acquire);
                cleared = done < cleared ? done : cleared;
            }
        }
        if (cleared >= round) {
            comm->cleared = cleared;
            return DM_OK;
        }
        const dm_shm_goal goal = {
            .first_word = &comm->members[0].done,
            .stride = sizeof(dm_shm_member),
            .first = 0,
            .end = comm->size,
            .want = round,
            .collective = true,
        };
        DM_TRY(dm_shm_wait(comm, &goal, wait, err));
    }
    comm->cleared = round;
    return DM_OK;
}

dm_status
dm_shm_await_flags(dm_comm *comm, uint64_t round, int32_t first, int32_t end,
                   const dm_wait *wait, dm_error *err)
{
    const uint64_t expected = dm_shm_flag(comm, round);
    for (int32_t i = first; i < end; i++) {
        if (i == comm->rank) {
            continue;
        }
        const dm_shm_cell *cell = dm_shm_cell_of(comm, i, round);
        /* Acquire: the data was written before the flag. */
        uint64_t flag = atomic_load_explicit(&cell->flag, memory_order_acquire);
        if (flag == expected) {
            continue;
        }
        if (!dm_shm_reached(flag, round << 32)) {
            const dm_shm_goal goal = {
                .first_word = &dm_shm_cell_of(comm, i, round)->flag,
                .stride = sizeof(dm_shm_member),
                .first = i,
                .end = end,
                .want = round << 32,
                .collective = true,
            };
            DM_TRY(dm_shm_wait(comm, &goal, wait, err));
            flag = atomic_load_explicit(&cell->flag, memory_order_acquire);
        }
        if (flag != expected) {
            return dm_shm_say_mismatch(comm, i, err);
        }
    }
    return DM_OK;
}

dm_status
dm_shm_go_on(dm_comm *comm, const dm_wait *wait, dm_error *err)
{
    int64_t now = dm_clock_now();
    if (now < comm->next_poll) {
        return DM_OK;
    }
    bool first = comm->next_poll == 0;
    comm->next_poll = now + POLL_INTERVAL_NS;
    if (first) {
        return DM_OK;
    }
    if (atomic_load(&comm->aborted)) {
        return dm_error_set(err, DM_ERR_ABORTED, "the group was aborted");
    }
    dm_status status = dm_wait_poll(wait, err);
    if (status == DM_ERR_TIMEOUT) {
        dm_error_set(err, status, "timed out while the data was moving");
    }
    return status;
}
