/* The gloo bridge, driven directly: N forked processes, one communicator each.
 *
 * The library under test is the one that setup.py built into devicemesh/; without it
 * the tests are skipped. The parent serves the store.
 *
 * sources: base store backend/reduce backend/dm_op.c
 * sanitize: none
 */
#include "dm_test.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/dm_backend.h"
#include "backend/reduce/dm_reduce.h"
#include "base/dm_clock.h"
#include "store/dm_store.h"

enum { MAX_RANKS = 20, GROUP_TIMEOUT_S = 30, TEST_TIMEOUT_S = 100 };

#define LONG_NS (GROUP_TIMEOUT_S * DM_NS_PER_S)

static const dm_backend *gloo;

/* --- N processes ---------------------------------------------------------------------- */

/* What one rank's body gets. */
typedef struct rank {
    int32_t rank;
    int32_t size;
    int32_t ranks[MAX_RANKS]; /* global: group rank + 10 */
    dm_store *store;
    char name[64];
    dm_comm *comm;
    uint64_t seq;
    atomic_int *shared; /* MAX_RANKS counters that all processes see */
} rank;

typedef void (*body)(rank *);

static uint16_t store_port;

static dm_store *
open_store(void)
{
    dm_store *store;
    dm_error err = DM_ERROR_INIT;
    dm_wait wait = {dm_clock_deadline(LONG_NS), NULL, NULL};
    CHECK_OK(dm_store_tcp_new("127.0.0.1", store_port, NULL, &wait, &store, &err));
    return store;
}

static dm_status
connect_comm(rank *r, int64_t timeout_ns, dm_error *err)
{
    dm_comm_config config = {
        .rank = r->rank,
        .size = r->size,
        .ranks = r->ranks,
        .name = r->name,
        .store = r->store,
        .timeout_ns = timeout_ns,
    };
    DM_TRY(gloo->comm_new(&config, &r->comm, err));
    dm_wait wait = {dm_clock_deadline(timeout_ns), NULL, NULL};
    return gloo->comm_connect(r->comm, &wait, err);
}

static void
open_comm(rank *r)
{
    dm_error err = DM_ERROR_INIT;
    CHECK_OK(connect_comm(r, GROUP_TIMEOUT_S * DM_NS_PER_S, &err));
}

static dm_status
run_for(rank *r, dm_op *op, int64_t timeout_ns, dm_error *err)
{
    op->seq = ++r->seq;
    dm_wait wait = {dm_clock_deadline(timeout_ns), NULL, NULL};
    return gloo->comm_run(r->comm, op, &wait, err);
}

static void
run(rank *r, dm_op op)
{
    dm_error err = DM_ERROR_INIT;
    CHECK_OK(run_for(r, &op, GROUP_TIMEOUT_S * DM_NS_PER_S, &err));
}

static void
barrier(rank *r)
{
    run(r, (dm_op){.kind = DM_OP_BARRIER});
}

/* Forks `size` processes that run `b`; the ranks in `killed` must end by SIGKILL, all
 * others with exit code 0. */
static void
run_ranks_killing(int32_t size, body b, bool connected, uint64_t killed)
{
    static int count;
    atomic_int *shared =
        mmap(NULL, MAX_RANKS * sizeof(atomic_int), PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    pid_t pids[MAX_RANKS];
    count++;
    for (int32_t i = 0; i < size; i++) {
        pids[i] = fork();
        CHECK(pids[i] >= 0);
        if (pids[i] > 0) {
            continue;
        }
        alarm(TEST_TIMEOUT_S);
        rank r = {.rank = i, .size = size, .shared = shared, .store = open_store()};
        snprintf(r.name, sizeof(r.name), "test%d", count);
        for (int32_t k = 0; k < size; k++) {
            r.ranks[k] = k + 10;
        }
        if (connected) {
            open_comm(&r);
        }
        b(&r);
        if (r.comm != NULL) {
            gloo->comm_free(r.comm, false);
        }
        dm_store_release(r.store);
        _exit(0);
    }
    for (int32_t i = 0; i < size; i++) {
        int status;
        CHECK_INT(waitpid(pids[i], &status, 0), pids[i]);
        if ((killed & (UINT64_C(1) << i)) != 0) {
            CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        }
        else if (status != 0) {
            TEST_FAIL("rank %d of %d ended with status %#x", i, size, status);
        }
    }
    munmap(shared, MAX_RANKS * sizeof(atomic_int));
}

static void
run_ranks(int32_t size, body b)
{
    run_ranks_killing(size, b, true, 0);
}

/* --- results ------------------------------------------------------------------------- */

/* Through every path: the last goes round the ring. */
static const size_t counts[] = {0, 1, 3, 1000, 64 * 1024 + 1, 600 * 1024 + 1};
static int count_of_counts = sizeof(counts) / sizeof(counts[0]);

/* What rank `r` puts at `i`: small integers, exact in every dtype used here. */
static float
value(int32_t r, size_t i)
{
    return (float)(r + 1) + (float)(i % 7);
}

static float *
array(size_t n, int32_t r)
{
    float *data = dm_malloc_array(n, sizeof(float));
    for (size_t i = 0; i < n; i++) {
        data[i] = value(r, i);
    }
    return data;
}

static void
check_sums(const float *data, size_t n, size_t from, int32_t size, float scale)
{
    float ranks = (float)(size * (size + 1)) / 2;
    for (size_t i = 0; i < n; i++) {
        float expected = (ranks + (float)size * (float)((from + i) % 7)) * scale;
        if (data[i] != expected) {
            TEST_FAIL("element %zu of %zu is %f, expected %f", i, n, (double)data[i],
                      (double)expected);
        }
    }
}

static void
check_array(const float *data, size_t n, size_t from, int32_t r)
{
    for (size_t i = 0; i < n; i++) {
        if (data[i] != value(r, from + i)) {
            TEST_FAIL("element %zu of %zu is %f, expected rank %d's %f", i, n,
                      (double)data[i], r, (double)value(r, from + i));
        }
    }
}

static void
all_reduces(rank *r)
{
    for (int c = 0; c < count_of_counts; c++) {
        size_t n = counts[c];
        float *data = array(n, r->rank);
        dm_op op = {.kind = DM_OP_ALL_REDUCE,
                    .dtype = DM_FLOAT32,
                    .reduce = DM_SUM,
                    .output = data,
                    .count = n};
        run(r, op);
        check_sums(data, n, 0, r->size, 1);
        dm_free(data);

        op.output = data = array(n, r->rank);
        op.reduce = DM_AVG;
        run(r, op);
        check_sums(data, n, 0, r->size, 1.0f / (float)r->size);
        dm_free(data);

        op.output = data = array(n, r->rank);
        op.reduce = DM_MAX;
        run(r, op);
        check_array(data, n, 0, r->size - 1);
        dm_free(data);
    }
}

/* Every dtype and op that has a kernel, against the kernel on one process. */
static void
all_dtypes(rank *r)
{
    enum { N = 37 };
    for (int dtype = 0; dtype < DM_DTYPE_COUNT; dtype++) {
        size_t width = dm_dtype_size((dm_dtype)dtype);
        for (int op = 0; op < DM_REDUCE_OP_COUNT; op++) {
            dm_reduce_fn fn = dm_reduce_lookup((dm_dtype)dtype, (dm_reduce_op)op);
            CHECK(gloo->supports(DM_OP_ALL_REDUCE, (dm_dtype)dtype, (dm_reduce_op)op) ==
                  (fn != NULL));
            if (fn == NULL) {
                continue;
            }
            /* Zeros and ones as bytes are numbers in every dtype, and sums of a few of
             * them are exact. */
            unsigned char data[N * 16] = {0}, expected[N * 16] = {0},
                                   other[N * 16] = {0};
            for (int32_t k = 0; k < r->size; k++) {
                for (size_t i = 0; i < N; i++) {
                    other[i * width] = (unsigned char)((i + (size_t)k) % 2);
                }
                if (k == r->rank) {
                    memcpy(data, other, sizeof(data));
                }
                if (k == 0) {
                    memcpy(expected, other, sizeof(expected));
                }
                else {
                    fn(expected, expected, other, N);
                }
            }
            dm_reduce_finish(expected, N, (dm_dtype)dtype, (dm_reduce_op)op, r->size);
            run(r, (dm_op){.kind = DM_OP_ALL_REDUCE,
                           .dtype = (dm_dtype)dtype,
                           .reduce = (dm_reduce_op)op,
                           .output = data,
                           .count = N});
            if (memcmp(data, expected, N * width) != 0) {
                TEST_FAIL("%s of %s is wrong", dm_reduce_op_name((dm_reduce_op)op),
                          dm_dtype_name((dm_dtype)dtype));
            }
        }
    }
}

static void
rooted(rank *r)
{
    int32_t size = r->size;
    for (int c = 0; c < count_of_counts; c++) {
        for (int32_t root = 0; root < size; root += size > 3 ? 3 : 1) {
            size_t n = counts[c];
            float *mine = array(n, r->rank), *out = array(n, r->rank);
            dm_op op = {.dtype = DM_FLOAT32, .root = root, .count = n};

            op.kind = DM_OP_BROADCAST;
            op.output = out;
            run(r, op);
            check_array(out, n, 0, root);

            op.kind = DM_OP_REDUCE;
            op.reduce = DM_SUM;
            op.input = mine;
            op.output = r->rank == root ? out : NULL;
            run(r, op);
            if (r->rank == root) {
                check_sums(out, n, 0, size, 1);
            }
            check_array(mine, n, 0, r->rank);

            /* In place on every rank, averaged; the others keep theirs. */
            op.input = NULL;
            op.output = mine;
            op.reduce = DM_AVG;
            run(r, op);
            if (r->rank == root) {
                check_sums(mine, n, 0, size, 1.0f / (float)size);
            }
            else {
                check_array(mine, n, 0, r->rank);
            }
            dm_free(mine);
            dm_free(out);

            mine = array(n, r->rank);
            float *all = array(n * (size_t)size, 0);
            op.kind = DM_OP_GATHER;
            op.input = mine;
            op.output = r->rank == root ? all : NULL;
            run(r, op);
            for (int32_t k = 0; k < size && r->rank == root; k++) {
                check_array(all + (size_t)k * n, n, 0, k);
            }

            for (int32_t k = 0; k < size; k++) {
                for (size_t i = 0; i < n; i++) {
                    all[(size_t)k * n + i] = value(k + root, i);
                }
            }
            op.kind = DM_OP_SCATTER;
            op.input = r->rank == root ? all : NULL;
            op.output = mine;
            run(r, op);
            check_array(mine, n, 0, r->rank + root);
            dm_free(all);
            dm_free(mine);
        }
    }
}

static void
all_to_all_and_gathers(rank *r)
{
    size_t size = (size_t)r->size;
    for (int c = 0; c < count_of_counts; c++) {
        size_t n = counts[c];
        float *mine = array(n, r->rank), *all = array(n * size, 100);
        dm_op op = {.kind = DM_OP_ALL_GATHER,
                    .dtype = DM_FLOAT32,
                    .input = mine,
                    .output = all,
                    .count = n};
        run(r, op);
        for (size_t k = 0; k < size; k++) {
            check_array(all + k * n, n, 0, (int32_t)k);
        }

        /* In place: the input is my part of the output. */
        memset(all, 0, n * size * sizeof(float));
        memcpy(all + (size_t)r->rank * n, mine, n * sizeof(float));
        op.input = all + (size_t)r->rank * n;
        run(r, op);
        for (size_t k = 0; k < size; k++) {
            check_array(all + k * n, n, 0, (int32_t)k);
        }

        float *sent = array(n * size, r->rank);
        op = (dm_op){.kind = DM_OP_REDUCE_SCATTER,
                     .dtype = DM_FLOAT32,
                     .reduce = DM_SUM,
                     .input = sent,
                     .output = mine,
                     .count = n};
        run(r, op);
        check_sums(mine, n, (size_t)r->rank * n, r->size, 1);
        check_array(sent, n * size, 0, r->rank);
        op.reduce = DM_AVG;
        run(r, op);
        check_sums(mine, n, (size_t)r->rank * n, r->size, 1.0f / (float)size);

        /* In place: the output is my part of the input. */
        float *both = array(n * size, r->rank);
        op.input = both;
        op.output = both + (size_t)r->rank * n;
        op.reduce = DM_SUM;
        run(r, op);
        check_sums(both + (size_t)r->rank * n, n, (size_t)r->rank * n, r->size, 1);
        dm_free(both);

        op = (dm_op){.kind = DM_OP_ALL_TO_ALL,
                     .dtype = DM_FLOAT32,
                     .input = sent,
                     .output = all,
                     .count = n};
        run(r, op);
        for (size_t k = 0; k < size; k++) {
            check_array(all + k * n, n, (size_t)r->rank * n, (int32_t)k);
        }
        dm_free(sent);
        dm_free(all);
        dm_free(mine);
    }
}

/* Rank a's piece for rank b has (a + 2 b) % 3 * unit elements: some are empty. */
static void
uneven(rank *r)
{
    size_t units[] = {1, 1000, 40000};
    for (int u = 0; u < 3; u++) {
        size_t in[MAX_RANKS], out[MAX_RANKS], in_all = 0, out_all = 0;
        for (int32_t k = 0; k < r->size; k++) {
            in_all += in[k] = (size_t)((r->rank + 2 * k) % 3) * units[u];
            out_all += out[k] = (size_t)((k + 2 * r->rank) % 3) * units[u];
        }
        float *sent = dm_malloc_array(in_all, sizeof(float));
        size_t at = 0;
        for (int32_t k = 0; k < r->size; k++) {
            for (size_t i = 0; i < in[k]; i++) {
                sent[at++] = value(r->rank * 100 + k, i);
            }
        }
        float *got = dm_malloc_array(out_all, sizeof(float));
        run(r, (dm_op){.kind = DM_OP_ALL_TO_ALL,
                       .dtype = DM_FLOAT32,
                       .input = sent,
                       .output = got,
                       .input_counts = in,
                       .output_counts = out});
        at = 0;
        for (int32_t k = 0; k < r->size; k++) {
            check_array(got + at, out[k], 0, k * 100 + r->rank);
            at += out[k];
        }
        dm_free(sent);
        dm_free(got);

        size_t all = 0;
        for (int32_t k = 0; k < r->size; k++) {
            all += out[k] = (size_t)(k % 3) * units[u];
        }
        sent = array(out[r->rank], r->rank);
        got = dm_malloc_array(all, sizeof(float));
        run(r, (dm_op){.kind = DM_OP_ALL_GATHER,
                       .dtype = DM_FLOAT32,
                       .input = sent,
                       .output = got,
                       .output_counts = out});
        at = 0;
        for (int32_t k = 0; k < r->size; k++) {
            check_array(got + at, out[k], 0, k);
            at += out[k];
        }
        dm_free(sent);
        dm_free(got);
    }
}

/* Everybody to the next rank, two tags the other way round, then any source. */
static void
point_to_point(rank *r)
{
    int32_t next = (r->rank + 1) % r->size;
    int32_t previous = (r->rank - 1 + r->size) % r->size;
    for (int c = 0; c < count_of_counts; c++) {
        size_t n = counts[c];
        float *mine = array(n, r->rank), *got = array(n, 100);
        dm_op send = {
            .kind = DM_OP_SEND, .dtype = DM_FLOAT32, .root = next, .count = n};
        send.input = mine;
        dm_op recv = {.kind = DM_OP_RECV, .dtype = DM_FLOAT32, .count = n};
        recv.root = previous;
        recv.output = got;
        int32_t source = -7;
        recv.source = &source;
        send.tag = recv.tag = (uint32_t)c;
        /* Even ranks send first; the last of an odd number waits for its turn. */
        if (r->rank % 2 == 0) {
            run(r, send);
            run(r, recv);
        }
        else {
            run(r, recv);
            run(r, send);
        }
        check_array(got, n, 0, previous);
        CHECK_INT(source, previous);
        dm_free(mine);
        dm_free(got);
    }
    barrier(r);

    int seen = 0;
    for (int32_t k = 1; k < r->size; k++) {
        int32_t number = r->rank, source = -7;
        if (r->rank == 0) {
            run(r, (dm_op){.kind = DM_OP_RECV,
                           .dtype = DM_INT32,
                           .root = DM_ANY_RANK,
                           .tag = 9,
                           .output = &number,
                           .count = 1,
                           .source = &source});
            CHECK_INT(source, number);
            seen |= 1 << number;
        }
        else if (r->rank == k) {
            run(r, (dm_op){.kind = DM_OP_SEND,
                           .dtype = DM_INT32,
                           .root = 0,
                           .tag = 9,
                           .input = &number,
                           .count = 1});
        }
    }
    if (r->rank == 0) {
        CHECK_INT(seen, (1 << r->size) - 2);
    }
    barrier(r);
}

static void
everything(rank *r)
{
    all_reduces(r);
    rooted(r);
    all_to_all_and_gathers(r);
    uneven(r);
    if (r->size > 1) {
        point_to_point(r);
    }
    barrier(r);
}

static void
results(void)
{
    for (int32_t size = 1; size <= 5; size++) {
        run_ranks(size, everything);
    }
    run_ranks(8, everything);
}

static void
dtypes(void)
{
    run_ranks(3, all_dtypes);
}

static void
large(rank *r)
{
    count_of_counts--; /* time */
    all_reduces(r);
    rooted(r);
    all_to_all_and_gathers(r);
    uneven(r);
    barrier(r);
}

/* Each stage for itself, in groups that have opened nothing else. */
static void
large_pairs(rank *r)
{
    float data = (float)r->rank;
    if (r->rank == 3) {
        run(r, (dm_op){.kind = DM_OP_SEND, .root = 14, .input = &data, .count = 1});
    }
    if (r->rank == 14) {
        run(r, (dm_op){.kind = DM_OP_RECV, .root = 3, .output = &data, .count = 1});
    }
    barrier(r);
    dm_error err;
    dm_op any = {.kind = DM_OP_RECV, .root = DM_ANY_RANK, .output = &data, .count = 1};
    CHECK_ERR(run_for(r, &any, LONG_NS, &err), DM_ERR_UNSUPPORTED);
    barrier(r);
}

/* More members than connect at once: connections open in stages. */
static void
large_group(void)
{
    run_ranks(18, large);
    run_ranks(17, large_pairs);
}

/* --- failures ------------------------------------------------------------------------- */

static dm_op
sum_of(float *data, size_t n)
{
    return (dm_op){.kind = DM_OP_ALL_REDUCE,
                   .dtype = DM_FLOAT32,
                   .reduce = DM_SUM,
                   .output = data,
                   .count = n};
}

static void
wait_for(atomic_int *counter, int value)
{
    while (atomic_load(counter) < value) {
        sched_yield();
    }
}

static void
expect_peer(rank *r, dm_op op, const char *name)
{
    dm_error err;
    CHECK_ERR(run_for(r, &op, LONG_NS, &err), DM_ERR_PEER);
    CHECK_CONTAINS(err.text, name);
    CHECK_ERR(run_for(r, &op, LONG_NS, &err), DM_ERR_CLOSED);
}

/* The last rank dies while all others wait; all name it, also those who wait for
 * somebody else. */
static void
die_while_others_wait(rank *r)
{
    barrier(r);
    if (r->rank == r->size - 1) {
        wait_for(r->shared, r->size - 1);
        raise(SIGKILL);
    }
    float *data = array(1000, r->rank);
    char name[16];
    snprintf(name, sizeof(name), "rank %d ", r->ranks[r->size - 1]);
    atomic_fetch_add(r->shared, 1);
    expect_peer(r, sum_of(data, 1000), name);
    dm_free(data);
}

static volatile float *watched;
static pid_t victim;

static void *
kill_when_data_comes(void *arg)
{
    (void)arg;
    while (*watched == 0) {
        sched_yield();
    }
    kill(victim, SIGKILL);
    return NULL;
}

/* The sender dies in the middle of a message. */
static void
die_in_a_message(rank *r)
{
    barrier(r);
    size_t n = 64 * 1024 * 1024;
    float *data = mmap(NULL, n * sizeof(float), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(data != MAP_FAILED);
    dm_op op = {.kind = DM_OP_BROADCAST,
                .dtype = DM_FLOAT32,
                .output = data,
                .root = 1,
                .count = n};
    if (r->rank == 1) {
        data[0] = 1;
        atomic_store(r->shared, getpid());
        dm_error err;
        run_for(r, &op, LONG_NS, &err);
        pause();
    }
    wait_for(r->shared, 1);
    victim = atomic_load(r->shared);
    watched = data;
    pthread_t killer;
    CHECK_INT(pthread_create(&killer, NULL, kill_when_data_comes, NULL), 0);
    expect_peer(r, op, "rank 11 (group rank 1) closed its connection");
    pthread_join(killer, NULL);
}

/* The receiver dies in the middle of a message. */
static void
die_receiving(rank *r)
{
    barrier(r);
    size_t n = 64 * 1024 * 1024;
    float *data = mmap(NULL, n * sizeof(float), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(data != MAP_FAILED);
    dm_op op = {.kind = DM_OP_BROADCAST,
                .dtype = DM_FLOAT32,
                .output = data,
                .root = 1,
                .count = n};
    if (r->rank == 0) {
        victim = getpid();
        watched = data;
        pthread_t killer;
        CHECK_INT(pthread_create(&killer, NULL, kill_when_data_comes, NULL), 0);
        dm_error err;
        run_for(r, &op, LONG_NS, &err);
        pause();
    }
    data[0] = 1;
    expect_peer(r, op, "rank 10 (group rank 0) closed its connection");
}

static void
dead_peer(void)
{
    run_ranks_killing(2, die_while_others_wait, true, 1 << 1);
    run_ranks_killing(5, die_while_others_wait, true, 1 << 4);
    run_ranks_killing(2, die_in_a_message, true, 1 << 1);
    run_ranks_killing(2, die_receiving, true, 1 << 0);
}

static void
be_late(rank *r)
{
    barrier(r);
    if (r->rank == 2) {
        wait_for(r->shared, 2);
        return;
    }
    float data[10] = {0};
    dm_op op = sum_of(data, 10);
    dm_error err = DM_ERROR_INIT;
    dm_status status = run_for(r, &op, 700 * DM_NS_PER_MS, &err);
    CHECK(status == DM_ERR_TIMEOUT || status == DM_ERR_PEER);
    CHECK_CONTAINS(err.text, "timed out after 0.");
    CHECK_CONTAINS(err.text, "rank 12 (group rank 2)");
    atomic_fetch_add(r->shared, 1);
}

static void
never_join(rank *r)
{
    if (r->rank == 2) {
        return;
    }
    dm_error err;
    /* Whoever gives up first tells the other. */
    dm_status status = connect_comm(r, 500 * DM_NS_PER_MS, &err);
    CHECK(status == DM_ERR_TIMEOUT || status == DM_ERR_PEER);
    CHECK_CONTAINS(err.text, "timed out after 0.");
    CHECK_CONTAINS(err.text, "waiting for rank 12 (group rank 2) to join");
}

/* One rank cannot take part; the others learn why at once. */
static void
cannot_join(rank *r)
{
    dm_error err;
    if (r->rank == 1) {
        setenv("DEVICEMESH_SOCKET_IFNAME", "nosuch0", 1);
        CHECK_ERR(connect_comm(r, LONG_NS, &err), DM_ERR_VALUE);
        CHECK_CONTAINS(err.text, "DEVICEMESH_SOCKET_IFNAME=nosuch0");
        return;
    }
    CHECK_ERR(connect_comm(r, LONG_NS, &err), DM_ERR_PEER);
    CHECK_CONTAINS(err.text,
                   "rank 11 left the group: DEVICEMESH_SOCKET_IFNAME=nosuch0");
}

static void
late_peer(void)
{
    run_ranks_killing(3, cannot_join, false, 0);
    run_ranks(3, be_late);
    run_ranks_killing(3, never_join, false, 0);
}

static void *
abort_soon(void *arg)
{
    rank *r = arg;
    wait_for(&r->shared[r->rank], 1);
    gloo->comm_abort(r->comm);
    gloo->comm_abort(r->comm);
    return NULL;
}

static void
abort_running(rank *r)
{
    barrier(r);
    float data[10] = {0};
    dm_op op = sum_of(data, 10);
    if (r->rank == 1) {
        expect_peer(r, (dm_op){.kind = DM_OP_RECV, .output = data, .count = 1},
                    "rank 10");
        return;
    }
    dm_error err;
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, abort_soon, r), 0);
    atomic_fetch_add(&r->shared[r->rank], 1);
    CHECK_ERR(run_for(r, &op, LONG_NS, &err), DM_ERR_ABORTED);
    pthread_join(thread, NULL);
    CHECK_ERR(run_for(r, &op, LONG_NS, &err), DM_ERR_ABORTED);
}

static void
abort_idle(rank *r)
{
    barrier(r);
    if (r->rank == 1) {
        float data = 0;
        expect_peer(r, (dm_op){.kind = DM_OP_RECV, .output = &data, .count = 1},
                    "rank 10");
        return;
    }
    gloo->comm_abort(r->comm);
}

static void
abort_connecting(rank *r)
{
    if (r->rank == 1) {
        return;
    }
    dm_error err;
    dm_comm_config config = {
        .rank = 0, .size = 2, .ranks = r->ranks, .name = r->name, .store = r->store};
    CHECK_OK(gloo->comm_new(&config, &r->comm, &err));
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, abort_soon, r), 0);
    atomic_fetch_add(&r->shared[r->rank], 1);
    dm_wait wait = DM_WAIT_FOREVER;
    CHECK_ERR(gloo->comm_connect(r->comm, &wait, &err), DM_ERR_ABORTED);
    pthread_join(thread, NULL);
}

static void
aborted(void)
{
    run_ranks(2, abort_running);
    run_ranks(2, abort_idle);
    run_ranks_killing(2, abort_connecting, false, 0);
}

static dm_status
stop_at_second_call(void *arg, dm_error *err)
{
    int *calls = arg;
    return ++*calls < 2 ? DM_OK : dm_error_set(err, DM_ERR_INTERRUPTED, "stop, please");
}

static void
interrupt(rank *r)
{
    barrier(r);
    float data = 0;
    dm_op op = {.kind = DM_OP_RECV, .dtype = DM_FLOAT32, .output = &data, .count = 1};
    if (r->rank == 1) {
        expect_peer(r, op, "rank 10 left the group: stop, please");
        return;
    }
    op.root = 1;
    int calls = 0;
    dm_wait wait = {DM_FOREVER, stop_at_second_call, &calls};
    dm_error err;
    CHECK_ERR(gloo->comm_run(r->comm, &op, &wait, &err), DM_ERR_INTERRUPTED);
    CHECK_STR(err.text, "stop, please");
    CHECK_INT(calls, 2);
}

static void
interrupt_connect(rank *r)
{
    if (r->rank == 1) {
        return;
    }
    dm_error err;
    dm_comm_config config = {
        .rank = 0, .size = 2, .ranks = r->ranks, .name = r->name, .store = r->store};
    CHECK_OK(gloo->comm_new(&config, &r->comm, &err));
    int calls = 0;
    dm_wait wait = {DM_FOREVER, stop_at_second_call, &calls};
    CHECK_ERR(gloo->comm_connect(r->comm, &wait, &err), DM_ERR_INTERRUPTED);
}

static void
interrupted(void)
{
    run_ranks(2, interrupt);
    run_ranks_killing(2, interrupt_connect, false, 0);
}

/* --- ranks that disagree ----------------------------------------------------------- */

static void
expect_mismatch(rank *r, dm_op op, const char *one, const char *other)
{
    dm_error err;
    CHECK_ERR(run_for(r, &op, LONG_NS, &err), DM_ERR_MISMATCH);
    CHECK_CONTAINS(err.text, one);
    CHECK_CONTAINS(err.text, other);
}

static void
different_kinds(rank *r)
{
    float data[20] = {0};
    dm_op op = sum_of(data, 10);
    if (r->rank == 1) {
        op = (dm_op){
            .kind = DM_OP_BROADCAST, .dtype = DM_FLOAT32, .output = data, .count = 10};
    }
    expect_mismatch(r, op, "all_reduce(sum) of 10 float32",
                    "broadcast of 10 float32 from group rank 0");
}

static void
different_counts(rank *r)
{
    float data[20] = {0};
    expect_mismatch(r, sum_of(data, r->rank == 1 ? 20 : 10),
                    "all_reduce(sum) of 10 float32", "all_reduce(sum) of 20 float32");
}

static void
different_dtypes(rank *r)
{
    float data[20] = {0};
    dm_op op = sum_of(data, 10);
    op.dtype = r->rank == 1 ? DM_INT32 : DM_FLOAT32;
    expect_mismatch(r, op, "of 10 float32", "of 10 int32");
}

static void
different_lengths(rank *r)
{
    float data[20] = {0};
    dm_op op = {.kind = DM_OP_RECV, .dtype = DM_FLOAT32, .output = data, .count = 10};
    if (r->rank == 0) {
        op = (dm_op){.kind = DM_OP_SEND,
                     .dtype = DM_FLOAT32,
                     .root = 1,
                     .input = data,
                     .count = 20};
    }
    expect_mismatch(r, op, "recv of 10 float32 from group rank 0",
                    "send of 20 float32 to group rank 1");
}

static void
mismatches(void)
{
    run_ranks(2, different_kinds);
    run_ranks(4, different_kinds);
    run_ranks(3, different_counts);
    run_ranks(3, different_dtypes);
    run_ranks(2, different_lengths);
}

/* --- what a process has ------------------------------------------------------------- */

static int
count_entries(const char *path)
{
    DIR *entries = opendir(path);
    CHECK(entries != NULL);
    int n = 0;
    for (struct dirent *e; (e = readdir(entries)) != NULL;) {
        n += e->d_name[0] != '.';
    }
    closedir(entries);
    return n;
}

static int
count_fds(void)
{
    return count_entries("/proc/self/fd");
}

static int
count_threads(void)
{
    return count_entries("/proc/self/task");
}

/* Nothing before the first connect; a descriptor for each peer and four for the
 * process; nothing after the last free. Repeated, so that a leak shows. */
static void
leave_nothing(rank *r)
{
    int fds = count_fds(), threads = count_threads();
    char name[64];
    strcpy(name, r->name);
    for (int i = 0; i < 5; i++) {
        snprintf(r->name, sizeof(r->name), "%.32s.%d", name, i);
        dm_error err = DM_ERROR_INIT;
        open_comm(r);
        CHECK_INT(count_fds() - fds, r->size - 1 + 3);
        CHECK_INT(count_threads() - threads, 1);
        CHECK_STR(gloo->comm_transport(r->comm), "tcp");
        dm_comm *first = r->comm;

        strcat(r->name, "b");
        open_comm(r);
        CHECK_INT(count_fds() - fds, 2 * (r->size - 1) + 3);
        CHECK_INT(count_threads() - threads, 1);

        float data[3] = {1, 2, 3};
        dm_op op = sum_of(data, 3);
        dm_wait wait = DM_WAIT_FOREVER;
        CHECK_OK(gloo->comm_run(first, &op, &wait, &err));
        CHECK_OK(gloo->comm_run(r->comm, &op, &wait, &err));
        /* A failure of one group leaves the other alone. */
        gloo->comm_abort(first);
        CHECK_OK(gloo->comm_run(r->comm, &op, &wait, &err));
        barrier(r);
        gloo->comm_free(first, false);
        gloo->comm_free(r->comm, false);
        r->comm = NULL;
        CHECK_INT(count_fds(), fds);
        CHECK_INT(count_threads(), threads);
    }
}

/* Children of both ranks use a group of their own, then forget their parents'. */
static void
fork_and_meet(rank *r)
{
    barrier(r);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(TEST_TIMEOUT_S);
        dm_comm *parents = r->comm;
        strcat(r->name, ".child");
        r->store = open_store();
        open_comm(r);
        all_reduces(r);
        gloo->comm_free(r->comm, false);
        gloo->comm_free(parents, true);
        dm_store_release(r->store);
        _exit(0);
    }
    all_reduces(r);
    int status;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    barrier(r);
}

/* A child that outlives its killed parent does not hold its connections. */
static void
die_with_a_child(rank *r)
{
    barrier(r);
    if (r->rank == 0) {
        float data = 0;
        dm_op op = {.kind = DM_OP_RECV, .root = 1, .output = &data, .count = 1};
        expect_peer(r, op, "rank 11 (group rank 1) closed its connection");
        atomic_store(r->shared, 2);
        return;
    }
    int fds = count_fds();
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(TEST_TIMEOUT_S);
        CHECK_INT(fds - count_fds(), r->size - 1);
        atomic_store(r->shared, 1);
        wait_for(r->shared, 2);
        _exit(0);
    }
    wait_for(r->shared, 1);
    CHECK_INT(count_fds(), fds);
    raise(SIGKILL);
}

/* What is executed has none of them. */
static void
execute(rank *r)
{
    barrier(r);
    for (int fd = 3; fd < 100; fd++) {
        struct sockaddr_in peer;
        socklen_t size = sizeof(peer);
        if (getpeername(fd, (struct sockaddr *)&peer, &size) == 0) {
            CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
        }
    }
    barrier(r);
}

static void
leftovers(void)
{
    run_ranks_killing(2, die_with_a_child, true, 1 << 1);
    run_ranks(3, execute);
    run_ranks_killing(3, leave_nothing, false, 0);
    run_ranks(2, fork_and_meet);
}

/* --- main ---------------------------------------------------------------------------- */

static const dm_backend *
load(void)
{
    char path[4096];
    const char *asked = getenv("GLOO_TEST_LIBRARY"); /* another build of it */
    snprintf(path, sizeof(path), "%s", asked != NULL ? asked : __FILE__);
    if (asked == NULL) {
        char *end = strstr(path, "tests/c/");
        CHECK(end != NULL);
        strcpy(end, "devicemesh/_gloo.so");
    }
    if (access(path, F_OK) != 0) {
        fprintf(stderr, "skipped: there is no %s\n", path);
        exit(0);
    }
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        TEST_FAIL("%s", dlerror());
    }
    const dm_backend *(*entry)(int abi);
    *(void **)&entry = dlsym(library, "dm_gloo_backend");
    CHECK(entry != NULL);
    CHECK(entry(DM_BACKEND_ABI + 1) == NULL);
    return entry(DM_BACKEND_ABI);
}

static dm_store_server *server;

static void
stop_server(void)
{
    dm_store_server_stop(server);
}

int
main(int argc, char **argv)
{
    static const dm_test tests[] = {
        TEST(results),     TEST(dtypes),     TEST(large_group),
        TEST(dead_peer),   TEST(late_peer),  TEST(aborted),
        TEST(interrupted), TEST(mismatches), TEST(leftovers),
    };
    gloo = load();
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    dm_store_server_config config = {.host = "127.0.0.1", .listen_fd = -1};
    dm_error err = DM_ERROR_INIT;
    CHECK_OK(dm_store_server_start(&config, &server, &err));
    store_port = dm_store_server_port(server);
    atexit(stop_server);
    return test_main(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
