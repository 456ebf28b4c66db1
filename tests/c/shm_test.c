/* Every operation of the shm backend between processes, at sizes around every border.
 *
 * sources: base store backend/reduce backend/dm_op.c backend/shm
 * sanitize: address,undefined
 */
#include "shm_lab.h"

#include <dirent.h>

static const int32_t sizes[] = {2, 3, 4, 5, 8};

enum { SIZE_COUNT = sizeof(sizes) / sizeof(sizes[0]) };

/* Elements: around the borders of cells, small slots and chunks. */
static const size_t counts[] = {0,    1,    3,    7,     14,    15,     100,
                                1000, 4096, 4097, 16384, 40000, 140001, 300000};

enum { COUNT_COUNT = sizeof(counts) / sizeof(counts[0]) };

static const dm_dtype dtypes[] = {DM_FLOAT32, DM_INT8, DM_COMPLEX128};

enum { DTYPE_COUNT = sizeof(dtypes) / sizeof(dtypes[0]) };

/* All dtypes at all but the largest sizes, which take only one. */
#define FOR_EACH_CASE(dtype, count)                                                    \
    for (int d_ = 0; d_ < DTYPE_COUNT; d_++)                                           \
        for (int c_ = 0; c_ < (d_ == 0 ? COUNT_COUNT : COUNT_COUNT - 2); c_++)         \
            for (dm_dtype dtype = dtypes[d_], once_ = 1; once_ == 1; once_ = 0)        \
                for (size_t count = counts[c_], again_ = 1; again_ == 1; again_ = 0)

static void
all_reduce_work(lab_rank *r)
{
    FOR_EACH_CASE(dtype, count)
    {
        check_all_reduce(r, dtype, count);
    }
}

static void
reduce_work(lab_rank *r)
{
    int32_t root = 0;
    FOR_EACH_CASE(dtype, count)
    {
        check_reduce(r, dtype, count, root);
        root = (root + 1) % r->size;
    }
}

static void
reduce_scatter_work(lab_rank *r)
{
    FOR_EACH_CASE(dtype, count)
    {
        check_reduce_scatter(r, dtype, count / (size_t)r->size, count % 2 == 0);
    }
    check_reduce_scatter(r, DM_FLOAT32, 140001, false);
}

static void
broadcast_work(lab_rank *r)
{
    int32_t root = 0;
    FOR_EACH_CASE(dtype, count)
    {
        check_broadcast(r, dtype, count, root);
        root = (root + 1) % r->size;
    }
}

static void
scatter_work(lab_rank *r)
{
    int32_t root = 0;
    FOR_EACH_CASE(dtype, count)
    {
        check_scatter(r, dtype, count / (size_t)r->size, root);
        root = (root + 1) % r->size;
    }
}

static void
all_gather_work(lab_rank *r)
{
    FOR_EACH_CASE(dtype, count)
    {
        check_gather(r, dtype, count / (size_t)r->size, -1, false, count % 2 == 0);
        check_gather(r, dtype, count / (size_t)r->size, -1, true, count % 2 == 0);
    }
    check_gather(r, DM_FLOAT32, 140001, -1, false, false);
    check_gather(r, DM_FLOAT32, 70001, -1, true, false);
}

static void
gather_work(lab_rank *r)
{
    int32_t root = 0;
    FOR_EACH_CASE(dtype, count)
    {
        check_gather(r, dtype, count / (size_t)r->size, root, false, false);
        root = (root + 1) % r->size;
    }
    check_gather(r, DM_FLOAT32, 300000, root, false, false);
}

static void
all_to_all_work(lab_rank *r)
{
    FOR_EACH_CASE(dtype, count)
    {
        check_all_to_all(r, dtype, count / (size_t)r->size, false);
        check_all_to_all(r, dtype, count / (size_t)r->size, true);
    }
    check_all_to_all(r, DM_FLOAT32, 140001, false);
}

static void
barrier_work(lab_rank *r)
{
    for (int i = 0; i < 300; i++) {
        check_barrier(r);
    }
}

/* Small operations of different kinds in a row, with roots that run ahead. */
static void
mixture_work(lab_rank *r)
{
    uint32_t seed = 12345;
    for (int i = 0; i < 1500; i++) {
        seed = seed * 1103515245 + 12345;
        uint32_t dice = seed >> 16;
        size_t count = dice / 16 % 5 == 0 ? dice % 9000 : dice % 20;
        int32_t root = (int32_t)(dice / 7 % (uint32_t)r->size);
        switch (dice % 9) {
        case 0:
            check_all_reduce(r, DM_INT32, count);
            break;
        case 1:
            check_reduce(r, DM_FLOAT64, count, root);
            break;
        case 2:
            check_reduce_scatter(r, DM_INT32, count, false);
            break;
        case 3:
            check_scatter(r, DM_INT8, count, root);
            break;
        case 4:
            check_gather(r, DM_INT32, count, root, false, false);
            break;
        case 5:
            check_gather(r, DM_INT8, count, -1, count % 3 == 0, false);
            break;
        case 6:
            check_all_to_all(r, DM_INT32, count, count % 3 == 0);
            break;
        case 7:
            check_barrier(r);
            break;
        default:
            for (int k = 0; k < 40; k++) {
                check_broadcast(r, DM_INT32, count, root);
            }
        }
    }
}

/* --- messages ------------------------------------------------------------------------- */

static void
ring_work(lab_rank *r)
{
    int32_t to = (r->rank + 1) % r->size;
    int32_t from = (r->rank + r->size - 1) % r->size;
    for (int c = 0; c < COUNT_COUNT; c++) {
        /* Everybody sends first: messages larger than the ring need a receiver that
         * takes in while it waits for room itself. */
        lab_send(r, to, 7, DM_FLOAT32, counts[c]);
        check_recv(r, from, 7, DM_FLOAT32, counts[c]);
    }
}

static void
tags_work(lab_rank *r)
{
    if (r->rank > 1) {
        return;
    }
    int32_t other = 1 - r->rank;
    for (uint32_t round = 0; round < 20; round++) {
        size_t large = round % 2 == 0 ? 90000 : 5;
        if (r->rank == 0) {
            for (uint32_t tag = 0; tag < 25; tag++) {
                lab_send(r, other, tag, DM_INT32, tag % 5 == 0 ? large : tag);
            }
        }
        else {
            for (uint32_t k = 0; k < 25; k++) {
                uint32_t tag = k * 7 % 25;
                check_recv(r, other, tag, DM_INT32, tag % 5 == 0 ? large : tag);
            }
        }
    }
}

static void
any_source_work(lab_rank *r)
{
    enum { EACH = 50 };
    if (r->rank != 0) {
        for (uint32_t i = 0; i < EACH; i++) {
            if (i % 10 == 3) {
                lab_send(r, 0, 1, DM_FLOAT32, 100000); /* another tag, in the way */
            }
            lab_send(r, 0, 0, DM_FLOAT32, i % 9 == 0 ? 80000 : 3);
        }
        check_barrier(r);
        return;
    }
    int got[LAB_MOST] = {0};
    for (int32_t k = 0; k < EACH * (r->size - 1); k++) {
        /* What comes next from each is known, from whom it comes is not: so ask for
         * those whose turn has the same size. */
        int32_t from = DM_ANY_RANK;
        size_t count = 3;
        bool all_alike = true;
        for (int32_t q = 1; q < r->size; q++) {
            all_alike = all_alike && got[q] % 9 != 0;
        }
        if (!all_alike) {
            for (int32_t q = 1; q < r->size; q++) {
                from = got[q] % 9 == 0 && got[q] < EACH ? q : from;
            }
            count = 80000;
            if (from == DM_ANY_RANK) {
                break;
            }
        }
        int32_t source = check_recv(r, from, 0, DM_FLOAT32, count);
        got[source]++;
    }
    for (int32_t q = 1; q < r->size; q++) {
        while (got[q] < EACH) {
            check_recv(r, q, 0, DM_FLOAT32, got[q] % 9 == 0 ? 80000 : 3);
            got[q]++;
        }
        for (int i = 3; i < EACH; i += 10) {
            check_recv(r, q, 1, DM_FLOAT32, 100000);
        }
    }
    check_barrier(r);
}

/* A message is under way while its receiver is in a collective. */
static void
message_around_collective_work(lab_rank *r)
{
    if (r->rank == 0) {
        lab_send(r, 1, 0, DM_FLOAT32, 300000);
    }
    check_all_reduce(r, DM_FLOAT32, 5);
    if (r->rank == 1) {
        check_recv(r, 0, 0, DM_FLOAT32, 300000);
    }
    check_barrier(r);
}

/* --- what is left behind ---------------------------------------------------------------- */

static int
count_descriptors(void)
{
    int n = 0;
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder != NULL);
    while (readdir(folder) != NULL) {
        n++;
    }
    closedir(folder);
    return n;
}

static void
leak_work(lab_rank *r)
{
    dm_error err = DM_ERROR_INIT;
    dm_wait wait = lab_wait(LAB_PATIENCE_NS);
    int before = 0;
    for (int i = 0; i < 20; i++) {
        char name[32];
        snprintf(name, sizeof(name), "leak/%d/%d", i, r->size);
        dm_comm_config config = r->config;
        config.name = name;
        dm_comm *comm;
        CHECK_OK(dm_backend_shm.comm_new(&config, &comm, &err));
        CHECK_OK(dm_backend_shm.comm_connect(comm, &wait, &err));
        CHECK_STR(dm_backend_shm.comm_transport(comm), "shm");
        float value = 1;
        dm_op op = {.kind = DM_OP_ALL_REDUCE,
                    .dtype = DM_FLOAT32,
                    .output = &value,
                    .count = 1};
        CHECK_OK(dm_backend_shm.comm_run(comm, &op, &wait, &err));
        CHECK(value == (float)r->size);
        dm_backend_shm.comm_abort(comm);
        dm_backend_shm.comm_free(comm, false);
        if (i == 0) {
            before = count_descriptors();
        }
    }
    CHECK_INT(count_descriptors(), before);
}

/* A member may close as soon as its own part is done. */
static void
early_close_work(lab_rank *r)
{
    for (int i = 0; i < 5; i++) {
        check_broadcast(r, DM_FLOAT32, 9, 0);
    }
    check_broadcast(r, DM_FLOAT32, 3000, 0);
    check_reduce(r, DM_FLOAT32, 9, r->size - 1);
    if (r->rank == 0) {
        lab_send(r, 1, 0, DM_FLOAT32, 20);
    }
    if (r->rank == 1) {
        check_recv(r, 0, 0, DM_FLOAT32, 20);
    }
    dm_backend_shm.comm_abort(r->comm);
}

static void
memory_work(lab_rank *r)
{
    /* Small operations touch the control area and a few slots, no more. */
    for (int i = 0; i < 100; i++) {
        check_all_reduce(r, DM_FLOAT32, 4);
        check_broadcast(r, DM_FLOAT32, 4, 0);
    }
    check_barrier(r);
    if (r->rank == 0) {
        char line[256];
        long used = -1;
        bool ours = false;
        FILE *maps = fopen("/proc/self/smaps", "re");
        CHECK(maps != NULL);
        while (fgets(line, sizeof(line), maps) != NULL) {
            if (strstr(line, "memfd:devicemesh") != NULL) {
                ours = true;
            }
            if (ours && sscanf(line, "Rss: %ld kB", &used) == 1) {
                break;
            }
        }
        fclose(maps);
        CHECK(used > 0);
        CHECK(used <= 8 + 4 * r->size);
    }
}

#define FOR_EACH_SIZE(name, work)                                                      \
    static void name(void)                                                             \
    {                                                                                  \
        for (int i = 0; i < SIZE_COUNT; i++) {                                         \
            run_processes(sizes[i], work, NULL);                                       \
        }                                                                              \
    }

FOR_EACH_SIZE(all_reduce, all_reduce_work)
FOR_EACH_SIZE(reduce, reduce_work)
FOR_EACH_SIZE(reduce_scatter, reduce_scatter_work)
FOR_EACH_SIZE(broadcast, broadcast_work)
FOR_EACH_SIZE(scatter, scatter_work)
FOR_EACH_SIZE(all_gather, all_gather_work)
FOR_EACH_SIZE(gather, gather_work)
FOR_EACH_SIZE(all_to_all, all_to_all_work)
FOR_EACH_SIZE(barrier, barrier_work)
FOR_EACH_SIZE(mixture, mixture_work)
FOR_EACH_SIZE(messages_in_a_ring, ring_work)
FOR_EACH_SIZE(messages_by_tag, tags_work)
FOR_EACH_SIZE(messages_from_anybody, any_source_work)
FOR_EACH_SIZE(message_around_collective, message_around_collective_work)
FOR_EACH_SIZE(nothing_is_left, leak_work)
FOR_EACH_SIZE(early_close, early_close_work)
FOR_EACH_SIZE(little_memory, memory_work)

TEST_MAIN(TEST(all_reduce), TEST(reduce), TEST(reduce_scatter), TEST(broadcast),
          TEST(scatter), TEST(all_gather), TEST(gather), TEST(all_to_all),
          TEST(barrier), TEST(mixture), TEST(messages_in_a_ring), TEST(messages_by_tag),
          TEST(messages_from_anybody), TEST(message_around_collective),
          TEST(nothing_is_left), TEST(early_close), TEST(little_memory))
