/* Tests of the in-process store, the prefix view and the checks in front of both.
 *
 * sources: base store/dm_store.c store/dm_kv.c store/dm_hash_store.c store/dm_prefix_store.c
 * sanitize: address,undefined thread
 */
#include "store_calls.h"

#include <sys/wait.h>
#include <unistd.h>

#include "store/dm_kv.h"

static dm_store *
new_hash(void)
{
    dm_store *store;
    CHECK_OK(dm_store_hash_new(&store, &err));
    return store;
}

static dm_store *
new_prefix(dm_store *base, const char *prefix)
{
    dm_store *store;
    CHECK_OK(dm_store_prefix_new(base, prefix, &store, &err));
    return store;
}

static void
bad_arguments(void)
{
    dm_store *store = new_hash();
    char *key = malloc(DM_STORE_KEY_MAX + 1);
    memset(key, 'k', DM_STORE_KEY_MAX);
    key[DM_STORE_KEY_MAX] = '\0';
    CHECK_ERR(dm_store_set(store, key, "v", 1, &forever, &err), DM_ERR_VALUE);
    CHECK_CONTAINS(err.text, "8192");
    key[DM_STORE_KEY_MAX - 1] = '\0';
    CHECK_OK(dm_store_set(store, key, "v", 1, &forever, &err));
    check_value(store, key, "v");

    CHECK_ERR(dm_store_set(store, "k", "v", DM_STORE_VALUE_MAX + 1, &forever, &err),
              DM_ERR_VALUE);
    CHECK_CONTAINS(err.text, "'k'");
    const char *keys[] = {"a", "b"};
    const dm_bytes values[] = {{"1", 1}, {"", DM_STORE_VALUE_MAX + 1}};
    CHECK_ERR(dm_store_multi_set(store, keys, values, 2, &forever, &err), DM_ERR_VALUE);
    bool ready;
    CHECK_OK(dm_store_check(store, keys, 1, &forever, &ready, &err));
    CHECK(!ready);
    CHECK_ERR(dm_store_barrier(store, "b", 0, &forever, &err), DM_ERR_VALUE);
    CHECK_ERR(dm_store_will(store, "b", "", 0, &forever, &err), DM_ERR_UNSUPPORTED);

    dm_store *view;
    CHECK_ERR(dm_store_prefix_new(store, key, &view, &err), DM_ERR_VALUE);
    key[DM_STORE_KEY_MAX - 2] = '\0';
    CHECK_OK(dm_store_prefix_new(store, key, &view, &err));
    CHECK_ERR(dm_store_set(view, "k", "v", 1, &forever, &err), DM_ERR_VALUE);
    dm_store_release(view);
    dm_store_release(store);
    free(key);
}

static void
every_call_on_hash(void)
{
    dm_store *store = new_hash();
    CHECK_STR(dm_store_kind(store), "hash");
    check_calls(store);
    check_queues(store);
    check_timeouts(store);
    dm_store_release(store);
}

static void
every_call_on_prefix(void)
{
    dm_store *base = new_hash();
    dm_store *view = new_prefix(base, "p");
    CHECK_STR(dm_store_kind(view), "prefix");
    check_calls(view);
    check_queues(view);
    check_timeouts(view);
    check_value(base, "p/p", "potato");
    CHECK_OK(dm_store_set(base, "pq", "not in the view", 15, &forever, &err));
    dm_bytes *names;
    size_t n;
    CHECK_OK(dm_store_list_keys(view, &forever, &names, &n, &err));
    CHECK_INT(n, 7);
    while (n-- > 0) {
        dm_bytes_free(&names[n]);
    }
    dm_free(names);

    dm_store *inner = new_prefix(view, "in");
    CHECK_OK(dm_store_set(inner, "k", "v", 1, &forever, &err));
    check_value(base, "p/in/k", "v");
    dm_store_close(view);
    CHECK_ERR(dm_store_set(inner, "k", "v", 1, &forever, &err), DM_ERR_CLOSED);
    check_value(base, "p/in/k", "v");
    dm_store_release(inner);
    dm_store_release(view);
    dm_store_release(base);
}

static void
no_memory(void)
{
    dm_store *store;
    CHECK_NO_MEMORY(dm_store_hash_new(&store, &err), 1);
    CHECK_NO_MEMORY(dm_store_set(store, "a", "1", 1, &forever, &err), 3);
    CHECK_NO_MEMORY(dm_store_set(store, "a", "2", 1, &forever, &err), 1);
    dm_bytes value;
    CHECK_NO_MEMORY(dm_store_get(store, "a", &forever, &value, &err), 1);
    dm_bytes_free(&value);
    CHECK_NO_MEMORY(dm_store_append(store, "a", "2", 1, &forever, &err), 1);
    CHECK_NO_MEMORY(dm_store_queue_push(store, "q", "2", 1, &forever, &err), 3);
    CHECK_OK(dm_store_barrier(store, "b", 1, &forever, &err));
    CHECK_NO_MEMORY(dm_store_barrier(store, "b", 1, &forever, &err), 2);
    dm_bytes *names;
    size_t n;
    CHECK_NO_MEMORY(dm_store_list_keys(store, &forever, &names, &n, &err), 2);
    dm_bytes_free(&names[0]);
    dm_free(names);
    dm_store *view;
    CHECK_NO_MEMORY(dm_store_prefix_new(store, "p", &view, &err), 1);
    CHECK_NO_MEMORY(dm_store_set(view, "a", "1", 1, &forever, &err), 3);
    dm_store_release(store);
    dm_store_release(view);
}

static void
many_keys(void)
{
    dm_kv kv;
    dm_kv_init(&kv);
    dm_kv_entry *entry;
    char key[32];
    for (int i = 0; i < 20000; i++) {
        int size = snprintf(key, sizeof(key), "key/%d", i);
        CHECK_OK(dm_kv_set(&kv, key, (size_t)size, key, (size_t)size, &entry, &err));
    }
    CHECK_INT(kv.n_values, 20000);
    for (int i = 0; i < 20000; i += 2) {
        int size = snprintf(key, sizeof(key), "key/%d", i);
        CHECK(dm_kv_delete(&kv, key, (size_t)size));
    }
    for (int i = 0; i < 20000; i++) {
        int size = snprintf(key, sizeof(key), "key/%d", i);
        entry = dm_kv_find(&kv, key, (size_t)size);
        CHECK((entry != NULL) == (i % 2 != 0));
        CHECK(entry == NULL || strcmp(entry->value.data, key) == 0);
    }
    CHECK_INT(kv.n_entries, 10000);
    dm_kv_fini(&kv);
}

static void
missing_keys_are_named(void)
{
    char text[128];
    const char *keys[] = {"a", "b", "c"};
    const bool there[] = {true, false, true};
    CHECK_STR(dm_store_list_missing(keys, there, 3, text, sizeof(text)), "'b'");
    CHECK_STR(dm_store_list_missing(keys, NULL, 2, text, sizeof(text)), "'a', 'b'");
    char lengthy[300];
    memset(lengthy, 'x', sizeof(lengthy) - 1);
    lengthy[sizeof(lengthy) - 1] = '\0';
    const char *more[] = {"a", lengthy, "c"};
    CHECK_STR(dm_store_list_missing(more, NULL, 3, text, sizeof(text)),
              "'a' and 2 more");
    CHECK_STR(dm_store_list_missing(more + 1, NULL, 2, text, sizeof(text)), "2 keys");
}

static void
waiting_threads(void)
{
    dm_store *store = new_hash();
    worker workers[3];
    for (int i = 0; i < 3; i++) {
        start(&workers[i], store, "late", work_get);
    }
    CHECK_OK(dm_store_set(store, "late", "1", 1, &forever, &err));
    for (int i = 0; i < 3; i++) {
        pthread_join(workers[i].thread, NULL);
        CHECK_INT(workers[i].status, DM_OK);
    }

    start(&workers[0], store, "never", work_unless);
    CHECK_OK(dm_store_set(store, "gone", "rank 3 is gone", 14, &forever, &err));
    pthread_join(workers[0].thread, NULL);
    CHECK_INT(workers[0].status, DM_ERR_PEER);
    CHECK_STR(workers[0].err.text, "rank 3 is gone");

    start(&workers[0], store, "never", work_get);
    dm_store_close(store);
    dm_store_close(store);
    pthread_join(workers[0].thread, NULL);
    CHECK_INT(workers[0].status, DM_ERR_CLOSED);
    dm_store_release(store);
}

static void
barrier_of_the_store(void)
{
    dm_store *store = new_hash();
    check_barriers(store);
    dm_store_release(store);
}

/* The same without one: dm_store.c counts with add. */
static void
barrier_by_counting(void)
{
    dm_store *store = new_hash();
    dm_store_ops ops = *store->ops;
    ops.barrier = NULL;
    ops.wait_unless = NULL;
    ops.multi_get = NULL;
    ops.multi_set = NULL;
    store->ops = &ops;
    check_barriers(store);
    int64_t n;
    CHECK_OK(dm_store_num_keys(store, &forever, &n, &err));
    CHECK_INT(n, 3); /* arrivals, the count and the last round */
    dm_store *view = new_prefix(store, "fallbacks");
    check_calls(view);

    const char *never = "never", *gone = "gone";
    dm_wait soon = within_ms(5);
    CHECK_ERR(dm_store_wait_unless(store, &never, 1, &gone, 1, &soon, &err),
              DM_ERR_TIMEOUT);
    CHECK_CONTAINS(err.text, "'never'");
    CHECK_OK(dm_store_set(store, "gone", "left", 4, &forever, &err));
    CHECK_ERR(dm_store_wait_unless(store, &never, 1, &gone, 1, &forever, &err),
              DM_ERR_PEER);
    CHECK_STR(err.text, "left");
    CHECK_OK(dm_store_wait_unless(store, &gone, 1, &gone, 1, &forever, &err));
    dm_store_release(view);
    dm_store_release(store);
}

static void
forked_child(void)
{
    dm_store *store = new_hash();
    dm_store *view = new_prefix(store, "p");
    pid_t pid = fork();
    if (pid == 0) {
        dm_bytes value;
        CHECK_ERR(dm_store_get(view, "a", &forever, &value, &err), DM_ERR_FORKED);
        CHECK_ERR(dm_store_set(store, "a", "", 0, &forever, &err), DM_ERR_FORKED);
        CHECK_CONTAINS(err.text, "process");
        dm_store_close(store);
        dm_store_release(view);
        dm_store_release(store);
        _exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK_INT(status, 0);
    CHECK_OK(dm_store_set(view, "a", "1", 1, &forever, &err));
    dm_store_release(view);
    dm_store_release(store);
}

TEST_MAIN(TEST(bad_arguments), TEST(every_call_on_hash), TEST(every_call_on_prefix),
          TEST(no_memory), TEST(many_keys), TEST(missing_keys_are_named),
          TEST(waiting_threads), TEST(barrier_of_the_store), TEST(barrier_by_counting),
          TEST(forked_child))
