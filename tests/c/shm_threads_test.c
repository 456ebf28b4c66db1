/* The protocol of shm between threads that share one mapping, for the thread sanitizer:
 * every word that two ranks use, every way of every operation, sleeping and waking.
 *
 * sources: base store backend/reduce backend/dm_op.c backend/shm
 * sanitize: thread
 */
#include "shm_lab.h"

#include <sched.h>

#include "backend/shm/dm_shm_comm.h"

static const size_t counts[] = {1, 14, 15, 3000, 5000, 140001};

enum { COUNT_COUNT = sizeof(counts) / sizeof(counts[0]) };

static void
collectives_work(lab_rank *r)
{
    for (int c = 0; c < COUNT_COUNT; c++) {
        size_t count = counts[c];
        int32_t root = c % r->size;
        check_all_reduce(r, DM_FLOAT32, count);
        check_reduce(r, DM_FLOAT32, count, root);
        check_broadcast(r, DM_FLOAT32, count, root);
        check_gather(r, DM_FLOAT32, count, root, false, false);
        check_gather(r, DM_FLOAT32, count, -1, c % 2 == 0, false);
        check_scatter(r, DM_FLOAT32, count, root);
        check_reduce_scatter(r, DM_FLOAT32, count, true);
        check_all_to_all(r, DM_FLOAT32, count, false);
        check_all_to_all(r, DM_FLOAT32, count, true);
        check_barrier(r);
    }
}

/* Roots that run ahead come round all cells and slots several times. */
static void
ahead_work(lab_rank *r)
{
    for (int i = 0; i < 200; i++) {
        check_broadcast(r, DM_INT32, 3, 0);
        check_broadcast(r, DM_INT32, 300, i % r->size);
        check_reduce(r, DM_INT32, 3, i / 20 % r->size);
        check_reduce(r, DM_INT32, 300, 1);
        check_gather(r, DM_INT32, 40, 0, false, false);
        check_scatter(r, DM_INT32, 3, 1);
        if (i % 50 == 0) {
            check_all_reduce(r, DM_INT32, 3);
        }
    }
}

static void
messages_work(lab_rank *r)
{
    int32_t to = (r->rank + 1) % r->size;
    int32_t from = (r->rank + r->size - 1) % r->size;
    for (uint32_t i = 0; i < 60; i++) {
        lab_send(r, to, i, DM_INT8, i % 7 == 0 ? 700000 : i);
        lab_send(r, to, 1000 + i, DM_INT8, 50);
        check_recv(r, i % 3 == 0 ? from : DM_ANY_RANK, 1000 + i, DM_INT8, 50);
        check_recv(r, from, i, DM_INT8, i % 7 == 0 ? 700000 : i);
    }
    check_barrier(r);
}

/* Comes when all others sleep. */
static void
come_last(const lab_rank *r)
{
    const dm_wait wait = lab_wait(LAB_PATIENCE_NS);
    while (atomic_load(&r->comm->head->sleepers) != (uint32_t)r->size - 1) {
        CHECK(dm_clock_left(wait.deadline) > 0);
        sched_yield();
    }
}

static void
sleepers_work(lab_rank *r)
{
    for (int i = 0; i < 10 * r->size; i++) {
        int32_t late = i % r->size;
        if (r->rank == late) {
            come_last(r);
        }
        switch (i / r->size % 4) {
        case 0:
            check_all_reduce(r, DM_INT32, 2);
            break;
        case 1:
            check_broadcast(r, DM_INT32, 2, late);
            check_barrier(r);
            break;
        case 2:
            check_all_reduce(r, DM_INT32, 60000);
            break;
        default:
            if (r->rank == late) {
                for (int32_t q = 0; q < r->size; q++) {
                    if (q != late) {
                        lab_send(r, q, 0, DM_INT32, 9);
                    }
                }
            }
            else {
                check_recv(r, i % 2 == 0 ? late : DM_ANY_RANK, 0, DM_INT32, 9);
            }
            check_barrier(r);
        }
    }
}

/* The last rank aborts all the others' communicators from its own thread. */
static pthread_barrier_t met;
static dm_comm *all[LAB_MOST];

static void
aborter_work(lab_rank *r)
{
    all[r->rank] = r->comm;
    pthread_barrier_wait(&met);
    if (r->rank == r->size - 1) {
        come_last(r);
        for (int32_t q = 0; q < r->size - 1; q++) {
            dm_backend_shm.comm_abort(all[q]);
        }
    }
    else {
        dm_error err = DM_ERROR_INIT;
        dm_op op = {.kind = DM_OP_BARRIER};
        dm_status status = lab_run(r, &op, &err);
        CHECK(status == DM_ERR_ABORTED || status == DM_ERR_PEER);
    }
    pthread_barrier_wait(&met);
}

#define WITH_THREADS(name, work)                                                       \
    static void name(void)                                                             \
    {                                                                                  \
        static const int32_t sizes[] = {2, 3, 5};                                      \
        for (int i = 0; i < 3; i++) {                                                  \
            pthread_barrier_init(&met, NULL, (unsigned)sizes[i]);                      \
            run_threads(sizes[i], work, NULL);                                         \
            pthread_barrier_destroy(&met);                                             \
        }                                                                              \
    }

WITH_THREADS(collectives, collectives_work)
WITH_THREADS(ahead, ahead_work)
WITH_THREADS(messages, messages_work)
WITH_THREADS(sleepers, sleepers_work)
WITH_THREADS(aborter, aborter_work)

TEST_MAIN(TEST(collectives), TEST(ahead), TEST(messages), TEST(sleepers), TEST(aborter))
