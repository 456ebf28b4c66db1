/* Tests of the file store.
 *
 * sources: base store
 * sanitize: address,undefined thread
 */
#include "store_calls.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const char path[] = "file_store_test.data"; /* in the test's own folder */

static dm_store *
new_store(int32_t world_size)
{
    dm_store *store = NULL;
    CHECK_OK(dm_store_file_new(path, world_size, &store, &err));
    return store;
}

static void
bad_arguments(void)
{
    dm_store *store = NULL;
    CHECK_ERR(dm_store_file_new("no/such/folder/file", 0, &store, &err), DM_ERR_SYSTEM);
    CHECK_INT(err.native, ENOENT);
    CHECK_CONTAINS(err.text, "no/such/folder/file");
    FILE *file = fopen(path, "w");
    fputs("something else altogether", file);
    fclose(file);
    store = new_store(0);
    CHECK_ERR(dm_store_set(store, "a", "1", 1, &forever, &err), DM_ERR_PROTOCOL);
    CHECK_CONTAINS(err.text, path);
    dm_store_release(store);
    unlink(path);
}

static void
every_call(void)
{
    dm_store *store = new_store(0);
    dm_store *other = new_store(0);
    CHECK_STR(dm_store_kind(store), "file");
    CHECK_STR(dm_store_file_path(store), path);
    check_calls(store);
    check_value(other, "p", "potato");
    check_queues(store);
    check_timeouts(other);
    check_barriers(store);
    CHECK_ERR(dm_store_will(store, "b", "", 0, &forever, &err), DM_ERR_UNSUPPORTED);
    dm_store_close(store);
    dm_bytes value;
    CHECK_ERR(dm_store_get(store, "p", &forever, &value, &err), DM_ERR_CLOSED);
    check_value(other, "p", "potato");
    dm_store_release(store);
    dm_store_release(other);
    struct stat info;
    CHECK(stat(path, &info) == 0 && (info.st_mode & 0777) == 0600);
    unlink(path);
}

static void
large_values(void)
{
    dm_store *store = new_store(0), *other = new_store(0);
    char *data = malloc(DM_STORE_VALUE_MAX);
    memset(data, 'x', DM_STORE_VALUE_MAX);
    CHECK_OK(dm_store_set(store, "big", data, DM_STORE_VALUE_MAX, &forever, &err));
    CHECK_OK(dm_store_set(store, "small", "1", 1, &forever, &err));
    dm_bytes value;
    CHECK_OK(dm_store_get(other, "big", &forever, &value, &err));
    CHECK(value.size == DM_STORE_VALUE_MAX &&
          memcmp(value.data, data, DM_STORE_VALUE_MAX) == 0);
    dm_bytes_free(&value);
    check_value(other, "small", "1");
    CHECK_ERR(dm_store_append(other, "big", "x", 1, &forever, &err), DM_ERR_VALUE);
    CHECK_CONTAINS(err.text, "'big'");
    free(data);
    dm_store_release(store);
    dm_store_release(other);
    unlink(path);
}

/* Four processes add to one counter and pass barriers. */
static void
processes(void)
{
    enum { N = 4, ROUNDS = 25 };
    pid_t pids[N];
    for (int i = 0; i < N; i++) {
        pids[i] = fork();
        if (pids[i] == 0) {
            dm_store *store = new_store(N);
            int64_t n;
            for (int round = 1; round <= ROUNDS; round++) {
                CHECK_OK(dm_store_add(store, "n", 1, &forever, &n, &err));
                CHECK_OK(dm_store_barrier(store, "in", N, &forever, &err));
                CHECK_OK(dm_store_add(store, "n", 0, &forever, &n, &err));
                CHECK_INT(n, N * round);
                CHECK_OK(dm_store_barrier(store, "out", N, &forever, &err));
            }
            dm_store_close(store);
            dm_store_release(store);
            _exit(0);
        }
    }
    for (int i = 0; i < N; i++) {
        int status;
        CHECK(waitpid(pids[i], &status, 0) == pids[i]);
        CHECK_INT(status, 0);
    }
    /* A store that finds the lock taken when it closes leaves the file. */
    (void)unlink(path);
}

static void
last_one_removes_the_file(void)
{
    dm_store *first = new_store(2), *second = new_store(2);
    CHECK_OK(dm_store_set(first, "a", "1", 1, &forever, &err));
    dm_store_close(first);
    dm_store_close(first);
    CHECK(access(path, F_OK) == 0);
    check_value(second, "a", "1");
    dm_store_release(second); /* counts as well */
    CHECK(access(path, F_OK) != 0);
    dm_store_release(first);
}

static void
removed_file(void)
{
    dm_store *store = new_store(0);
    CHECK_OK(dm_store_set(store, "a", "1", 1, &forever, &err));
    worker waiting;
    start(&waiting, store, "never", work_get);
    unlink(path);
    pthread_join(waiting.thread, NULL);
    CHECK_INT(waiting.status, DM_ERR_CONNECTION);
    CHECK_CONTAINS(waiting.err.text, "removed");
    CHECK_ERR(dm_store_set(store, "a", "1", 1, &forever, &err), DM_ERR_CONNECTION);
    dm_store_release(store);
}

static void
waiting_threads(void)
{
    dm_store *store = new_store(0);
    worker workers[2];
    start(&workers[0], store, "late", work_get);
    start(&workers[1], store, "never", work_unless);
    CHECK_OK(dm_store_set(store, "late", "1", 1, &forever, &err));
    CHECK_OK(dm_store_set(store, "gone", "rank 3 is gone", 14, &forever, &err));
    pthread_join(workers[0].thread, NULL);
    CHECK_INT(workers[0].status, DM_OK);
    pthread_join(workers[1].thread, NULL);
    CHECK_INT(workers[1].status, DM_ERR_PEER);
    CHECK_STR(workers[1].err.text, "rank 3 is gone");
    start(&workers[0], store, "never", work_get);
    dm_store_close(store);
    pthread_join(workers[0].thread, NULL);
    CHECK_INT(workers[0].status, DM_ERR_CLOSED);
    dm_store_release(store);
    unlink(path);
}

/* A writer that died in the middle of a record, at every possible place. */
static void
unfinished_records(void)
{
    dm_store *store = new_store(0);
    CHECK_OK(dm_store_set(store, "a", "1", 1, &forever, &err));
    struct stat before, after;
    CHECK(stat(path, &before) == 0);
    CHECK_OK(dm_store_set(store, "b", "22", 2, &forever, &err));
    CHECK(stat(path, &after) == 0);
    dm_store_release(store);
    char bytes[256];
    int fd = open(path, O_RDWR);
    CHECK(pread(fd, bytes, sizeof(bytes), 0) == after.st_size);
    for (off_t cut = 0; cut < after.st_size; cut++) {
        CHECK(ftruncate(fd, 0) == 0);
        CHECK(pwrite(fd, bytes, (size_t)cut, 0) == cut);
        dm_store *reader = new_store(0);
        store = new_store(0);
        const char *keys[] = {"a", "b"};
        bool a, b;
        CHECK_OK(dm_store_check(reader, &keys[0], 1, &forever, &a, &err));
        CHECK_OK(dm_store_check(reader, &keys[1], 1, &forever, &b, &err));
        CHECK_INT(a, cut >= before.st_size);
        CHECK(!b);
        CHECK_OK(dm_store_set(store, "c", "3", 1, &forever, &err));
        check_value(reader, "c", "3");
        CHECK_OK(dm_store_set(reader, "d", "4", 1, &forever, &err));
        check_value(store, "d", "4");
        dm_store_release(reader);
        dm_store_release(store);
    }
    /* Damage is told, not read. */
    CHECK(ftruncate(fd, 0) == 0);
    CHECK(pwrite(fd, bytes, (size_t)after.st_size, 0) == after.st_size);
    CHECK(pwrite(fd, "\xff\xff\xff\xff", 4, before.st_size) == 4);
    store = new_store(0);
    CHECK_ERR(dm_store_set(store, "c", "3", 1, &forever, &err), DM_ERR_PROTOCOL);
    CHECK_CONTAINS(err.text, "damaged");
    dm_store_release(store);
    close(fd);
    unlink(path);
}

/* What could not be written is not there afterwards either. */
static void
full_disk(void)
{
    dm_store *store = new_store(0);
    CHECK_OK(dm_store_set(store, "a", "1", 1, &forever, &err));
    struct rlimit old, limit;
    CHECK(getrlimit(RLIMIT_FSIZE, &old) == 0);
    signal(SIGXFSZ, SIG_IGN);
    limit = old;
    limit.rlim_cur = 200;
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    char data[300] = {0};
    CHECK_ERR(dm_store_set(store, "b", data, sizeof(data), &forever, &err),
              DM_ERR_SYSTEM);
    CHECK_INT(err.native, EFBIG);
    bool there;
    CHECK_OK(dm_store_check(store, &(const char *){"b"}, 1, &forever, &there, &err));
    CHECK(!there);
    CHECK(setrlimit(RLIMIT_FSIZE, &old) == 0);
    check_value(store, "a", "1");
    CHECK_OK(dm_store_set(store, "b", "2", 1, &forever, &err));
    check_value(store, "b", "2");
    dm_store_release(store);
    unlink(path);
}

static void
no_memory(void)
{
    dm_store *store;
    CHECK_NO_MEMORY(dm_store_file_new(path, 0, &store, &err), 2);
    CHECK_OK(dm_store_set(store, "a", "1", 1, &forever, &err));
    dm_store *other = new_store(0);
    /* The table is made anew after each failure. */
    dm_status status = DM_ERR_NO_MEMORY;
    for (uint64_t i = 1; status == DM_ERR_NO_MEMORY; i++) {
        dm_alloc_fail_at(i);
        status = dm_store_set(store, "b", "2", 1, &forever, &err);
        dm_alloc_fail_at(0);
        check_value(other, "a", "1");
        check_value(store, "a", "1");
    }
    CHECK_INT(status, DM_OK);
    check_value(other, "b", "2");
    dm_store_release(store);
    dm_store_release(other);
    unlink(path);
}

TEST_MAIN(TEST(bad_arguments), TEST(every_call), TEST(large_values), TEST(processes),
          TEST(last_one_removes_the_file), TEST(removed_file), TEST(waiting_threads),
          TEST(unfinished_records), TEST(full_disk), TEST(no_memory))
