/* Ranks for the tests of shm: as processes or as threads, and what they check.
 *
 * run_processes forks one process for each rank; they meet through a store of files in
 * the current folder. run_threads gives each rank a thread and all of them one segment,
 * so that a thread sanitizer sees the whole protocol. Both end the test when a rank
 * fails a check.
 */
#ifndef SHM_LAB_H
#define SHM_LAB_H

#include "dm_test.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "backend/dm_backend.h"
#include "backend/shm/dm_shm.h"
#include "store/dm_store.h"

enum { LAB_MOST = 16 };

/* One rank at work. */
typedef struct lab_rank {
    int32_t rank;
    int32_t size;
    dm_comm *comm;
    void (*work)(struct lab_rank *);
    void *arg;
    dm_shm_segment *segment; /* threads */
    const char *name;
    bool quiet; /* the work connects by itself */
    int32_t ranks[LAB_MOST];
    dm_comm_config config;
    dm_store *store;
} lab_rank;

/* Long enough for a loaded machine, short enough to end a hang. */
#define LAB_PATIENCE_NS (60 * DM_NS_PER_S)

static inline dm_wait
lab_wait(int64_t ns)
{
    return (dm_wait){dm_clock_deadline(ns), NULL, NULL};
}

/* --- a store of files ------------------------------------------------------------------ */

/* What this process does when it first reads: its own values are there by then. */
static void (*lab_before_get)(void);

static inline void
lab_path(const char *key, char *path, size_t size, const char *prefix)
{
    int n = snprintf(path, size, "%s", prefix);
    for (const char *c = key; *c != '\0' && (size_t)n + 2 < size; c++) {
        path[n++] = *c == '/' ? '+' : *c;
    }
    path[n] = '\0';
}

static inline dm_status
lab_set(dm_store *store, const char *key, const void *data, size_t size,
        const dm_wait *wait, dm_error *err)
{
    (void)store;
    (void)wait;
    (void)err;
    char path[512];
    char temporary[600];
    lab_path(key, path, sizeof(path), "store-");
    snprintf(temporary, sizeof(temporary), "%s.%d", path, (int)getpid());
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    CHECK_INT(write(fd, data, size), size);
    close(fd);
    CHECK_INT(rename(temporary, path), 0);
    return DM_OK;
}

static inline dm_status
lab_get(dm_store *store, const char *key, const dm_wait *wait, dm_bytes *value,
        dm_error *err)
{
    (void)store;
    if (lab_before_get != NULL) {
        lab_before_get();
    }
    char path[512];
    lab_path(key, path, sizeof(path), "store-");
    int fd;
    while ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0) {
        DM_TRY(dm_wait_poll(wait, err));
        struct timespec pause = {0, 500000};
        nanosleep(&pause, NULL);
    }
    char data[1024];
    ssize_t n = read(fd, data, sizeof(data));
    CHECK(n >= 0);
    close(fd);
    return dm_bytes_copy(data, (size_t)n, value, err);
}

static inline dm_status
lab_check(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
          bool *ready, dm_error *err)
{
    (void)store;
    (void)wait;
    (void)err;
    *ready = true;
    for (size_t i = 0; i < n; i++) {
        char path[512];
        lab_path(keys[i], path, sizeof(path), "store-");
        *ready = *ready && access(path, R_OK) == 0;
    }
    return DM_OK;
}

static inline void
lab_close(dm_store *store)
{
    (void)store;
}

static inline dm_store *
lab_store(void)
{
    static const dm_store_ops ops = {.kind = "files",
                                     .set = lab_set,
                                     .get = lab_get,
                                     .check = lab_check,
                                     .close = lab_close,
                                     .free = (void (*)(dm_store *))dm_free};
    dm_store *store = dm_calloc(1, sizeof(*store));
    CHECK(store != NULL);
    dm_store_init(store, &ops);
    return store;
}

/* --- ranks ------------------------------------------------------------------------------- */

/* A name that no group of this executable had. */
static inline const char *
lab_name(void)
{
    static char name[64];
    static int count;
    snprintf(name, sizeof(name), "group/%d", ++count);
    return name;
}

static inline void
lab_open(lab_rank *r)
{
    dm_error err = DM_ERROR_INIT;
    for (int32_t i = 0; i < r->size; i++) {
        r->ranks[i] = 10 + 3 * i; /* global ranks differ from group ranks */
    }
    r->config = (dm_comm_config){.rank = r->rank,
                                 .size = r->size,
                                 .ranks = r->ranks,
                                 .name = r->name,
                                 .store = r->store,
                                 .timeout_ns = LAB_PATIENCE_NS};
    CHECK_OK(dm_backend_shm.comm_new(&r->config, &r->comm, &err));
    if (r->quiet) {
        return;
    }
    dm_wait wait = lab_wait(LAB_PATIENCE_NS);
    if (r->segment != NULL) {
        CHECK_OK(dm_shm_connect_to(r->comm, r->segment, &wait, &err));
    }
    else {
        CHECK_OK(dm_backend_shm.comm_connect(r->comm, &wait, &err));
    }
}

static inline void *
lab_main(void *arg)
{
    lab_rank *r = arg;
    lab_open(r);
    r->work(r);
    dm_backend_shm.comm_free(r->comm, false);
    return NULL;
}

static inline void
lab_child(lab_rank *r)
{
    alarm(100);
    r->store = lab_store();
    lab_main(r);
    dm_store_release(r->store);
    exit(0);
}

/* Forks the ranks; pids[] is the caller's to reap. */
static inline void
fork_ranks(int32_t size, void (*work)(lab_rank *), void *arg, bool quiet, pid_t *pids)
{
    const char *name = lab_name();
    for (int32_t i = 0; i < size; i++) {
        pids[i] = fork();
        CHECK(pids[i] >= 0);
        if (pids[i] == 0) {
            lab_rank r = {.rank = i,
                          .size = size,
                          .work = work,
                          .arg = arg,
                          .name = name,
                          .quiet = quiet};
            lab_child(&r);
        }
    }
}

/* Reaps a rank; `signum` is what killed it, 0 if it must have ended well. */
static inline void
reap(pid_t pid, int signum)
{
    int status;
    CHECK_INT(waitpid(pid, &status, 0), pid);
    if (signum != 0) {
        CHECK(WIFSIGNALED(status));
        CHECK_INT(WTERMSIG(status), signum);
    }
    else if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        TEST_FAIL("a rank ended with %s %d", WIFEXITED(status) ? "code" : "signal",
                  WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
    }
}

static inline void
run_processes(int32_t size, void (*work)(lab_rank *), void *arg)
{
    pid_t pids[LAB_MOST];
    fork_ranks(size, work, arg, false, pids);
    for (int32_t i = 0; i < size; i++) {
        reap(pids[i], 0);
    }
}

static inline void
run_threads(int32_t size, void (*work)(lab_rank *), void *arg)
{
    dm_error err = DM_ERROR_INIT;
    dm_shm_segment *segment;
    CHECK_OK(dm_shm_segment_new(size, &segment, &err));
    pthread_t threads[LAB_MOST];
    lab_rank ranks[LAB_MOST];
    for (int32_t i = 0; i < size; i++) {
        ranks[i] = (lab_rank){.rank = i,
                              .size = size,
                              .work = work,
                              .arg = arg,
                              .segment = segment,
                              .name = "threads"};
        CHECK_INT(pthread_create(&threads[i], NULL, lab_main, &ranks[i]), 0);
    }
    for (int32_t i = 0; i < size; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
    }
    dm_shm_segment_release(segment, false);
}

/* --- operations and what must come out ------------------------------------------------- */

static inline dm_status
lab_run(lab_rank *r, const dm_op *op, dm_error *err)
{
    dm_wait wait = lab_wait(LAB_PATIENCE_NS);
    return dm_backend_shm.comm_run(r->comm, op, &wait, err);
}

/* What `rank` contributes at element i: small, so that sums are exact in any type. */
static inline int
lab_value(int32_t rank, size_t i)
{
    return (int)((i * 7 + (size_t)rank * 3 + i / 1000) % 11) - 5;
}

/* Element types of the checks: as doubles outside. */
static inline void
lab_put(dm_dtype dtype, void *data, size_t i, int value)
{
    switch (dtype) {
    case DM_INT8:
        ((int8_t *)data)[i] = (int8_t)value;
        break;
    case DM_INT32:
        ((int32_t *)data)[i] = value;
        break;
    case DM_FLOAT32:
        ((float *)data)[i] = (float)value;
        break;
    case DM_FLOAT64:
        ((double *)data)[i] = value;
        break;
    case DM_COMPLEX128:
        ((double *)data)[2 * i] = value;
        ((double *)data)[2 * i + 1] = -value;
        break;
    default:
        TEST_FAIL("no such element type here");
    }
}

static inline int
lab_at(dm_dtype dtype, const void *data, size_t i)
{
    switch (dtype) {
    case DM_INT8:
        return ((const int8_t *)data)[i];
    case DM_INT32:
        return ((const int32_t *)data)[i];
    case DM_FLOAT32:
        return (int)((const float *)data)[i];
    case DM_FLOAT64:
        return (int)((const double *)data)[i];
    case DM_COMPLEX128:
        CHECK(((const double *)data)[2 * i] == -((const double *)data)[2 * i + 1]);
        return (int)((const double *)data)[2 * i];
    default:
        TEST_FAIL("no such element type here");
    }
}

/* `count` elements of memory, with room for a guard of 16 bytes behind. */
static inline void *
lab_array(dm_dtype dtype, size_t count)
{
    size_t bytes = count * dm_dtype_size(dtype);
    unsigned char *data = malloc(bytes + 16);
    CHECK(data != NULL);
    memset(data, 0x5a, bytes + 16);
    return data;
}

static inline void
lab_free(dm_dtype dtype, void *data, size_t count)
{
    const unsigned char *guard =
        (const unsigned char *)data + count * dm_dtype_size(dtype);
    for (int i = 0; i < 16; i++) {
        CHECK_INT(guard[i], 0x5a);
    }
    free(data);
}

static inline int
lab_sum(int32_t size, size_t i)
{
    int sum = 0;
    for (int32_t q = 0; q < size; q++) {
        sum += lab_value(q, i);
    }
    return sum;
}

static inline void
check_all_reduce(lab_rank *r, dm_dtype dtype, size_t count)
{
    dm_error err = DM_ERROR_INIT;
    void *data = lab_array(dtype, count);
    for (size_t i = 0; i < count; i++) {
        lab_put(dtype, data, i, lab_value(r->rank, i));
    }
    dm_op op = {.kind = DM_OP_ALL_REDUCE,
                .dtype = dtype,
                .reduce = DM_SUM,
                .output = data,
                .count = count};
    CHECK_OK(lab_run(r, &op, &err));
    for (size_t i = 0; i < count; i++) {
        CHECK_INT(lab_at(dtype, data, i), lab_sum(r->size, i));
    }
    lab_free(dtype, data, count);
}

static inline void
check_broadcast(lab_rank *r, dm_dtype dtype, size_t count, int32_t root)
{
    dm_error err = DM_ERROR_INIT;
    void *data = lab_array(dtype, count);
    for (size_t i = 0; i < count; i++) {
        lab_put(dtype, data, i, r->rank == root ? lab_value(root, i) : 99);
    }
    dm_op op = {.kind = DM_OP_BROADCAST,
                .dtype = dtype,
                .root = root,
                .output = data,
                .count = count};
    CHECK_OK(lab_run(r, &op, &err));
    for (size_t i = 0; i < count; i++) {
        CHECK_INT(lab_at(dtype, data, i), lab_value(root, i));
    }
    lab_free(dtype, data, count);
}

static inline void
check_reduce(lab_rank *r, dm_dtype dtype, size_t count, int32_t root)
{
    dm_error err = DM_ERROR_INIT;
    bool mine = r->rank == root;
    void *input = lab_array(dtype, count);
    void *output = mine ? lab_array(dtype, count) : NULL;
    for (size_t i = 0; i < count; i++) {
        lab_put(dtype, input, i, lab_value(r->rank, i));
    }
    dm_op op = {.kind = DM_OP_REDUCE,
                .dtype = dtype,
                .reduce = DM_SUM,
                .root = root,
                .input = input,
                .output = output,
                .count = count};
    CHECK_OK(lab_run(r, &op, &err));
    for (size_t i = 0; i < count; i++) {
        CHECK_INT(lab_at(dtype, input, i), lab_value(r->rank, i));
    }
    for (size_t i = 0; mine && i < count; i++) {
        CHECK_INT(lab_at(dtype, output, i), lab_sum(r->size, i));
    }
    lab_free(dtype, input, count);
    if (mine) {
        lab_free(dtype, output, count);
    }
}

/* A root of -1: all_gather, else gather. Uneven: rank q gives q * count / 2 elements. */
static inline void
check_gather(lab_rank *r, dm_dtype dtype, size_t count, int32_t root, bool uneven,
             bool in_place)
{
    dm_error err = DM_ERROR_INIT;
    bool mine = root < 0 || r->rank == root;
    size_t counts[LAB_MOST] = {0};
    size_t total = 0;
    size_t before = 0;
    for (int32_t q = 0; q < r->size; q++) {
        counts[q] = uneven ? (size_t)q * count / 2 : count;
        before += q < r->rank ? counts[q] : 0;
        total += counts[q];
    }
    size_t own = counts[r->rank];
    size_t element = dm_dtype_size(dtype);
    unsigned char *output = mine ? lab_array(dtype, total) : NULL;
    unsigned char *input = in_place ? output + before * element : lab_array(dtype, own);
    for (size_t i = 0; i < own; i++) {
        lab_put(dtype, input, i, lab_value(r->rank, i));
    }
    dm_op op = {.kind = root < 0 ? DM_OP_ALL_GATHER : DM_OP_GATHER,
                .dtype = dtype,
                .root = root < 0 ? 0 : root,
                .input = input,
                .output = output,
                .count = own,
                .output_counts = uneven ? counts : NULL};
    CHECK_OK(lab_run(r, &op, &err));
    size_t at = 0;
    for (int32_t q = 0; mine && q < r->size; q++) {
        for (size_t i = 0; i < counts[q]; i++) {
            CHECK_INT(lab_at(dtype, output, at++), lab_value(q, i));
        }
    }
    if (!in_place) {
        lab_free(dtype, input, own);
    }
    if (mine) {
        lab_free(dtype, output, total);
    }
}

static inline void
check_scatter(lab_rank *r, dm_dtype dtype, size_t count, int32_t root)
{
    dm_error err = DM_ERROR_INIT;
    bool mine = r->rank == root;
    size_t total = count * (size_t)r->size;
    void *input = mine ? lab_array(dtype, total) : NULL;
    void *output = lab_array(dtype, count);
    for (size_t i = 0; mine && i < total; i++) {
        lab_put(dtype, input, i, lab_value(root, i));
    }
    dm_op op = {.kind = DM_OP_SCATTER,
                .dtype = dtype,
                .root = root,
                .input = input,
                .output = output,
                .count = count};
    CHECK_OK(lab_run(r, &op, &err));
    for (size_t i = 0; i < count; i++) {
        CHECK_INT(lab_at(dtype, output, i),
                  lab_value(root, (size_t)r->rank * count + i));
    }
    if (mine) {
        lab_free(dtype, input, total);
    }
    lab_free(dtype, output, count);
}

static inline void
check_reduce_scatter(lab_rank *r, dm_dtype dtype, size_t count, bool in_place)
{
    dm_error err = DM_ERROR_INIT;
    size_t total = count * (size_t)r->size;
    size_t before = count * (size_t)r->rank;
    unsigned char *input = lab_array(dtype, total);
    unsigned char *output =
        in_place ? input + before * dm_dtype_size(dtype) : lab_array(dtype, count);
    for (size_t i = 0; i < total; i++) {
        lab_put(dtype, input, i, lab_value(r->rank, i));
    }
    dm_op op = {.kind = DM_OP_REDUCE_SCATTER,
                .dtype = dtype,
                .reduce = DM_SUM,
                .input = input,
                .output = output,
                .count = count};
    CHECK_OK(lab_run(r, &op, &err));
    for (size_t i = 0; i < count; i++) {
        CHECK_INT(lab_at(dtype, output, i), lab_sum(r->size, before + i));
    }
    if (!in_place) {
        lab_free(dtype, output, count);
    }
    lab_free(dtype, input, total);
}

/* Uneven: rank p gives rank q (p + 2 * q) % 3 * count elements; but rank 0 passes no
 * counts where its own are equal by chance. */
static inline void
check_all_to_all(lab_rank *r, dm_dtype dtype, size_t count, bool uneven)
{
    dm_error err = DM_ERROR_INIT;
    size_t in[LAB_MOST];
    size_t out[LAB_MOST];
    size_t in_total = 0;
    size_t out_total = 0;
    for (int32_t q = 0; q < r->size; q++) {
        in[q] = uneven ? (size_t)((r->rank + 2 * q) % 3) * count : count;
        out[q] = uneven ? (size_t)((q + 2 * r->rank) % 3) * count : count;
        in_total += in[q];
        out_total += out[q];
    }
    void *input = lab_array(dtype, in_total);
    void *output = lab_array(dtype, out_total);
    size_t at = 0;
    for (int32_t q = 0; q < r->size; q++) {
        for (size_t i = 0; i < in[q]; i++) {
            lab_put(dtype, input, at++, lab_value(r->rank + 5 * q, i));
        }
    }
    dm_op op = {.kind = DM_OP_ALL_TO_ALL,
                .dtype = dtype,
                .input = input,
                .output = output,
                .count = uneven ? 0 : count,
                .input_counts = uneven ? in : NULL,
                .output_counts = uneven ? out : NULL};
    CHECK_OK(lab_run(r, &op, &err));
    at = 0;
    for (int32_t q = 0; q < r->size; q++) {
        for (size_t i = 0; i < out[q]; i++) {
            CHECK_INT(lab_at(dtype, output, at++), lab_value(q + 5 * r->rank, i));
        }
    }
    lab_free(dtype, input, in_total);
    lab_free(dtype, output, out_total);
}

static inline void
check_barrier(lab_rank *r)
{
    dm_error err = DM_ERROR_INIT;
    dm_op op = {.kind = DM_OP_BARRIER};
    CHECK_OK(lab_run(r, &op, &err));
}

static inline void
lab_send(lab_rank *r, int32_t to, uint32_t tag, dm_dtype dtype, size_t count)
{
    dm_error err = DM_ERROR_INIT;
    void *data = lab_array(dtype, count);
    for (size_t i = 0; i < count; i++) {
        lab_put(dtype, data, i, lab_value(r->rank + (int32_t)tag, i));
    }
    dm_op op = {.kind = DM_OP_SEND,
                .dtype = dtype,
                .root = to,
                .tag = tag,
                .input = data,
                .count = count};
    CHECK_OK(lab_run(r, &op, &err));
    lab_free(dtype, data, count);
}

/* Returns the group rank that the message came from. */
static inline int32_t
check_recv(lab_rank *r, int32_t from, uint32_t tag, dm_dtype dtype, size_t count)
{
    dm_error err = DM_ERROR_INIT;
    int32_t source = -5;
    void *data = lab_array(dtype, count);
    dm_op op = {.kind = DM_OP_RECV,
                .dtype = dtype,
                .root = from,
                .tag = tag,
                .output = data,
                .count = count,
                .source = &source};
    CHECK_OK(lab_run(r, &op, &err));
    CHECK(from == DM_ANY_RANK ? source >= 0 && source < r->size : source == from);
    for (size_t i = 0; i < count; i++) {
        CHECK_INT(lab_at(dtype, data, i), lab_value(source + (int32_t)tag, i));
    }
    lab_free(dtype, data, count);
    return source;
}

#endif
