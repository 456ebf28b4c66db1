/* What every kind of store must do, for the C tests of the stores: call it with an
 * empty store of that kind. `err` and `forever` are what the checks need in scope.
 */
#ifndef STORE_CALLS_H
#define STORE_CALLS_H

#include <pthread.h>

#include "dm_test.h"
#include "store/dm_store.h"

static dm_error err;
static const dm_wait forever = DM_WAIT_FOREVER;

static inline dm_wait
within_ms(int64_t ms)
{
    return (dm_wait){dm_clock_deadline(ms * DM_NS_PER_MS), NULL, NULL};
}

/* `key` holds the text `expected`. */
static inline void
check_value(dm_store *store, const char *key, const char *expected)
{
    dm_bytes value;
    CHECK_OK(dm_store_get(store, key, &forever, &value, &err));
    CHECK_STR(value.data, expected);
    CHECK_INT(value.size, strlen(expected));
    dm_bytes_free(&value);
}

/* Every call that needs no other client. */
static inline void
check_calls(dm_store *store)
{
    dm_bytes value;
    int64_t n_before;
    CHECK_OK(dm_store_num_keys(store, &forever, &n_before, &err));
    CHECK_OK(dm_store_set(store, "a", "1", 1, &forever, &err));
    check_value(store, "a", "1");
    CHECK_OK(dm_store_set(store, "a", NULL, 0, &forever, &err));
    check_value(store, "a", "");
    CHECK_OK(dm_store_set(store, "a", "x\0y", 3, &forever, &err));
    CHECK_OK(dm_store_get(store, "a", &forever, &value, &err));
    CHECK(value.size == 3 && memcmp(value.data, "x\0y", 4) == 0);
    dm_bytes_free(&value);

    int64_t n;
    CHECK_OK(dm_store_add(store, "n", 5, &forever, &n, &err));
    CHECK_OK(dm_store_add(store, "n", -7, &forever, &n, &err));
    CHECK_INT(n, -2);
    check_value(store, "n", "-2");
    CHECK_ERR(dm_store_add(store, "a", 1, &forever, &n, &err), DM_ERR_VALUE);
    CHECK_OK(dm_store_set(store, "n", " 1", 2, &forever, &err));
    CHECK_ERR(dm_store_add(store, "n", 1, &forever, &n, &err), DM_ERR_VALUE);
    CHECK_OK(dm_store_set(store, "n", "9223372036854775807", 19, &forever, &err));
    CHECK_ERR(dm_store_add(store, "n", 1, &forever, &n, &err), DM_ERR_VALUE);

    /* Absent: only an empty expectation sets; the answer is torch's. */
    CHECK_OK(dm_store_compare_set(store, "c", "e", 1, "d", 1, &forever, &value, &err));
    CHECK_STR(value.data, "e");
    dm_bytes_free(&value);
    CHECK_OK(dm_store_compare_set(store, "c", "", 0, "d", 1, &forever, &value, &err));
    CHECK_STR(value.data, "d");
    dm_bytes_free(&value);
    CHECK_OK(dm_store_compare_set(store, "c", "", 0, "f", 1, &forever, &value, &err));
    CHECK_STR(value.data, "d");
    dm_bytes_free(&value);
    CHECK_OK(dm_store_compare_set(store, "c", "d", 1, "f", 1, &forever, &value, &err));
    CHECK_STR(value.data, "f");
    dm_bytes_free(&value);

    CHECK_OK(dm_store_append(store, "p", "po", 2, &forever, &err));
    CHECK_OK(dm_store_append(store, "p", "tato", 4, &forever, &err));
    check_value(store, "p", "potato");

    const char *keys[] = {"m1", "m2", "m3"};
    const dm_bytes values[] = {{"1", 1}, {"22", 2}, {"", 0}};
    CHECK_OK(dm_store_multi_set(store, keys, values, 3, &forever, &err));
    dm_bytes got[3];
    CHECK_OK(dm_store_multi_get(store, keys, 3, &forever, got, &err));
    for (int i = 0; i < 3; i++) {
        CHECK_INT(got[i].size, values[i].size);
        CHECK_STR(got[i].data, values[i].data);
        dm_bytes_free(&got[i]);
    }
    bool yes;
    CHECK_OK(dm_store_check(store, keys, 3, &forever, &yes, &err));
    CHECK(yes);
    CHECK_OK(dm_store_wait(store, keys, 3, &forever, &err));
    CHECK_OK(dm_store_delete_key(store, "m2", &forever, &yes, &err));
    CHECK(yes);
    CHECK_OK(dm_store_delete_key(store, "m2", &forever, &yes, &err));
    CHECK(!yes);
    CHECK_OK(dm_store_check(store, keys, 3, &forever, &yes, &err));
    CHECK(!yes);

    CHECK_OK(dm_store_num_keys(store, &forever, &n, &err));
    dm_bytes *names;
    size_t n_names;
    CHECK_OK(dm_store_list_keys(store, &forever, &names, &n_names, &err));
    CHECK_INT(n, n_before + 6);                   /* a n c p m1 m3 */
    CHECK(n_names >= 6 && (int64_t)n_names <= n); /* a prefix lists only its own */
    for (size_t i = 0; i < n_names; i++) {
        CHECK_OK(dm_store_check(store, (const char *const *)&names[i].data, 1, &forever,
                                &yes, &err));
        CHECK(yes);
        dm_bytes_free(&names[i]);
    }
    dm_free(names);
}

static inline void
check_queues(dm_store *store)
{
    dm_bytes value;
    int64_t n;
    bool yes;
    const char *key = "q";
    CHECK_ERR(dm_store_queue_pop(store, key, false, &forever, &value, &err),
              DM_ERR_AGAIN);
    CHECK_OK(dm_store_queue_push(store, key, "1", 1, &forever, &err));
    CHECK_OK(dm_store_queue_push(store, key, "2", 1, &forever, &err));
    CHECK_OK(dm_store_queue_len(store, key, &forever, &n, &err));
    CHECK_INT(n, 2);
    CHECK_OK(dm_store_check(store, &key, 1, &forever, &yes, &err));
    CHECK(yes);
    CHECK_OK(dm_store_delete_key(store, key, &forever, &yes, &err));
    CHECK(!yes);
    CHECK_OK(dm_store_queue_pop(store, key, true, &forever, &value, &err));
    CHECK_STR(value.data, "1");
    dm_bytes_free(&value);
    CHECK_OK(dm_store_queue_pop(store, key, false, &forever, &value, &err));
    CHECK_STR(value.data, "2");
    dm_bytes_free(&value);
    CHECK_OK(dm_store_queue_len(store, key, &forever, &n, &err));
    CHECK_INT(n, 0);
    dm_wait soon = within_ms(5);
    CHECK_ERR(dm_store_queue_pop(store, key, true, &soon, &value, &err),
              DM_ERR_TIMEOUT);
    CHECK_CONTAINS(err.text, "q'");
}

static inline void
check_timeouts(dm_store *store)
{
    CHECK_OK(dm_store_set(store, "here", "1", 1, &forever, &err));
    const char *keys[] = {"here", "not", "nor"};
    dm_wait soon = within_ms(5);
    CHECK_ERR(dm_store_wait(store, keys, 3, &soon, &err), DM_ERR_TIMEOUT);
    CHECK_CONTAINS(err.text, "not'");
    CHECK_CONTAINS(err.text, "nor'");
    CHECK(strstr(err.text, "here'") == NULL);
    dm_bytes value;
    CHECK_ERR(dm_store_get(store, "not", &soon, &value, &err), DM_ERR_TIMEOUT);
    CHECK_CONTAINS(err.text, "not'");
    dm_wait late = {0, NULL, NULL};
    CHECK_OK(dm_store_get(store, "here", &late, &value, &err));
    dm_bytes_free(&value);
    CHECK_ERR(dm_store_barrier(store, "late", 2, &soon, &err), DM_ERR_TIMEOUT);
    CHECK_CONTAINS(err.text, "barrier");
    CHECK_OK(dm_store_barrier(store, "alone", 1, &soon, &err));
}

/* --- threads ------------------------------------------------------------------------ */

typedef struct worker {
    pthread_t thread;
    dm_store *store;
    const char *key;
    dm_status status;
    dm_error err;
} worker;

static inline void *
work_get(void *arg)
{
    worker *self = arg;
    dm_bytes value;
    self->status = dm_store_get(self->store, self->key, &forever, &value, &self->err);
    if (self->status == DM_OK) {
        dm_bytes_free(&value);
    }
    return NULL;
}

static inline void *
work_unless(void *arg)
{
    worker *self = arg;
    const char *gone = "gone";
    self->status = dm_store_wait_unless(self->store, &self->key, 1, &gone, 1, &forever,
                                        &self->err);
    return NULL;
}

static inline void *
work_barriers(void *arg)
{
    worker *self = arg;
    self->status = DM_OK;
    for (int i = 0; i < 200 && self->status == DM_OK; i++) {
        int64_t n;
        self->status =
            dm_store_add(self->store, "arrivals", 1, &forever, &n, &self->err);
        if (self->status == DM_OK) {
            self->status =
                dm_store_barrier(self->store, self->key, 3, &forever, &self->err);
        }
        dm_bytes value = {NULL, 0};
        if (self->status == DM_OK) {
            self->status =
                dm_store_get(self->store, "arrivals", &forever, &value, &self->err);
        }
        /* Between this barrier and the next at most two others have gone on. */
        CHECK_STR(self->err.text, "");
        int64_t now = value.data != NULL ? atoll(value.data) : 0;
        CHECK(now >= 3 * (i + 1) && now <= 3 * (i + 1) + 2);
        dm_bytes_free(&value);
        if (self->status == DM_OK) {
            self->status =
                dm_store_barrier(self->store, self->key, 3, &forever, &self->err);
        }
    }
    return NULL;
}

static inline void
start(worker *self, dm_store *store, const char *key, void *(*run)(void *))
{
    self->store = store;
    self->key = key;
    self->err = (dm_error)DM_ERROR_INIT;
    CHECK(pthread_create(&self->thread, NULL, run, self) == 0);
}

/* Three threads through 400 rounds of one barrier. */
static inline void
check_barriers(dm_store *store)
{
    worker workers[3];
    for (int i = 0; i < 3; i++) {
        start(&workers[i], store, "b", work_barriers);
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(workers[i].thread, NULL);
        CHECK_STR(workers[i].err.text, "");
    }
}

#endif
