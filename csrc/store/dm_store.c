/* The store's front door: checks what every store must refuse, counts references
 * and falls back where a store lacks a call.
 *
 * No state and no locks of its own. This file is also compiled into the gloo
 * bridge, so it depends on base alone.
 */
#include "store/dm_store.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/dm_alloc.h"

/* How long the fallback of wait_unless waits before it looks again. */
enum { UNLESS_FIRST_MS = 20, UNLESS_LAST_MS = 1000 };

void
dm_bytes_free(dm_bytes *bytes)
{
    if (bytes != NULL) {
        dm_free(bytes->data);
        bytes->data = NULL;
        bytes->size = 0;
    }
}

dm_status
dm_bytes_copy(const void *data, size_t size, dm_bytes *bytes, dm_error *err)
{
    char *copy = size < SIZE_MAX ? dm_malloc_array(size + 1, 1) : NULL;
    if (copy == NULL) {
        return dm_error_set_no_memory(err, "a copy of a store's value");
    }
    if (size != 0) {
        memcpy(copy, data, size);
    }
    copy[size] = '\0';
    *bytes = (dm_bytes){copy, size};
    return DM_OK;
}

void
dm_store_init(dm_store *store, const dm_store_ops *ops)
{
    store->ops = ops;
    atomic_init(&store->refs, 1);
    store->pid = getpid();
    store->slot = NULL;
}

dm_store *
dm_store_hold(dm_store *store)
{
    /* Relaxed: whoever holds already has a reference that keeps it alive. */
    atomic_fetch_add_explicit(&store->refs, 1, memory_order_relaxed);
    return store;
}

void
dm_store_release(dm_store *store)
{
    /* acq_rel: what other holders wrote is seen by the one that frees. */
    if (store != NULL &&
        atomic_fetch_sub_explicit(&store->refs, 1, memory_order_acq_rel) == 1) {
        store->ops->free(store);
    }
}

const char *
dm_store_list_missing(const char *const *keys, const bool *there, size_t n, char *text,
                      size_t size)
{
    assert(size >= 128);
    const size_t reserve = 32; /* for "and 18446744073709551615 more" */
    const int longest = 200;
    size_t used = 0;
    size_t left = 0;
    text[0] = '\0';
    for (size_t i = 0; i < n; i++) {
        if (there != NULL && there[i]) {
            continue;
        }
        size_t length = strlen(keys[i]);
        bool cut = length > (size_t)longest;
        size_t room = (cut ? (size_t)longest + 3 : length) + 4;
        if (left != 0 || used + room + reserve > size) {
            left++;
            continue;
        }
        used +=
            (size_t)snprintf(text + used, size - used, "%s'%.*s%s'",
                             used != 0 ? ", " : "", longest, keys[i], cut ? "..." : "");
    }
    if (left != 0) {
        snprintf(text + used, size - used, "%s%zu %s", used != 0 ? " and " : "", left,
                 used != 0 ? "more" : "keys");
    }
    return text;
}

/* --- checks ------------------------------------------------------------------------ */

static dm_status
check_store(const dm_store *store, dm_error *err)
{
    if (store->pid != getpid()) {
        return dm_error_set(err, DM_ERR_FORKED,
                            "%s store was made by process %ld; make a new one in the "
                            "forked process %ld",
                            store->ops->kind, (long)store->pid, (long)getpid());
    }
    return DM_OK;
}

static dm_status
check_key(const char *key, dm_error *err)
{
    size_t length = strlen(key);
    if (length + 1 > DM_STORE_KEY_MAX) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "key '%.32s...' has %zu bytes, at most %d are allowed", key,
                            length, DM_STORE_KEY_MAX - 1);
    }
    return DM_OK;
}

static dm_status
check_keys(const char *const *keys, size_t n, dm_error *err)
{
    for (size_t i = 0; i < n; i++) {
        DM_TRY(check_key(keys[i], err));
    }
    return DM_OK;
}

static dm_status
check_size(const char *key, size_t size, dm_error *err)
{
    if (size > DM_STORE_VALUE_MAX) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "value for key '%.200s' has %zu bytes, at most %d are "
                            "allowed",
                            key, size, DM_STORE_VALUE_MAX);
    }
    return DM_OK;
}

static dm_status
check_call(const dm_store *store, const char *key, size_t size, dm_error *err)
{
    DM_TRY(check_store(store, err));
    DM_TRY(check_key(key, err));
    return check_size(key, size, err);
}

static dm_status
unsupported(const dm_store *store, const char *what, dm_error *err)
{
    return dm_error_set(err, DM_ERR_UNSUPPORTED, "%s store has no %s", store->ops->kind,
                        what);
}

/* --- calls ------------------------------------------------------------------------- */

dm_status
dm_store_set(dm_store *store, const char *key, const void *data, size_t size,
             const dm_wait *wait, dm_error *err)
{
    DM_TRY(check_call(store, key, size, err));
    return store->ops->set(store, key, data, size, wait, err);
}

dm_status
dm_store_get(dm_store *store, const char *key, const dm_wait *wait, dm_bytes *value,
             dm_error *err)
{
    DM_TRY(check_call(store, key, 0, err));
    return store->ops->get(store, key, wait, value, err);
}

dm_status
dm_store_add(dm_store *store, const char *key, int64_t amount, const dm_wait *wait,
             int64_t *result, dm_error *err)
{
    DM_TRY(check_call(store, key, 0, err));
    return store->ops->add(store, key, amount, wait, result, err);
}

dm_status
dm_store_compare_set(dm_store *store, const char *key, const void *expected,
                     size_t expected_size, const void *desired, size_t desired_size,
                     const dm_wait *wait, dm_bytes *value, dm_error *err)
{
    DM_TRY(check_call(store, key, desired_size, err));
    DM_TRY(check_size(key, expected_size, err));
    if (store->ops->compare_set == NULL) {
        return unsupported(store, "compare_set", err);
    }
    return store->ops->compare_set(store, key, expected, expected_size, desired,
                                   desired_size, wait, value, err);
}

dm_status
dm_store_check(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
               bool *ready, dm_error *err)
{
    DM_TRY(check_store(store, err));
    DM_TRY(check_keys(keys, n, err));
    if (n == 0) {
        *ready = true;
        return DM_OK;
    }
    if (store->ops->check == NULL) {
        return unsupported(store, "check", err);
    }
    return store->ops->check(store, keys, n, wait, ready, err);
}

dm_status
dm_store_wait(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
              dm_error *err)
{
    DM_TRY(check_store(store, err));
    DM_TRY(check_keys(keys, n, err));
    if (n == 0) {
        return DM_OK;
    }
    return store->ops->wait(store, keys, n, wait, err);
}

dm_status
dm_store_delete_key(dm_store *store, const char *key, const dm_wait *wait,
                    bool *existed, dm_error *err)
{
    DM_TRY(check_call(store, key, 0, err));
    if (store->ops->delete_key == NULL) {
        return unsupported(store, "delete_key", err);
    }
    return store->ops->delete_key(store, key, wait, existed, err);
}

dm_status
dm_store_append(dm_store *store, const char *key, const void *data, size_t size,
                const dm_wait *wait, dm_error *err)
{
    DM_TRY(check_call(store, key, size, err));
    if (store->ops->append == NULL) {
        return unsupported(store, "append", err);
    }
    return store->ops->append(store, key, data, size, wait, err);
}

dm_status
dm_store_multi_get(dm_store *store, const char *const *keys, size_t n,
                   const dm_wait *wait, dm_bytes *values, dm_error *err)
{
    DM_TRY(check_store(store, err));
    DM_TRY(check_keys(keys, n, err));
    if (n == 0) {
        return DM_OK;
    }
    if (store->ops->multi_get != NULL) {
        return store->ops->multi_get(store, keys, n, wait, values, err);
    }
    for (size_t i = 0; i < n; i++) {
        dm_status status = store->ops->get(store, keys[i], wait, &values[i], err);
        if (status != DM_OK) {
            while (i-- > 0) {
                dm_bytes_free(&values[i]);
            }
            return status;
        }
    }
    return DM_OK;
}

dm_status
dm_store_multi_set(dm_store *store, const char *const *keys, const dm_bytes *values,
                   size_t n, const dm_wait *wait, dm_error *err)
{
    DM_TRY(check_store(store, err));
    DM_TRY(check_keys(keys, n, err));
    for (size_t i = 0; i < n; i++) {
        DM_TRY(check_size(keys[i], values[i].size, err));
    }
    if (n == 0) {
        return DM_OK;
    }
    if (store->ops->multi_set != NULL) {
        return store->ops->multi_set(store, keys, values, n, wait, err);
    }
    for (size_t i = 0; i < n; i++) {
        DM_TRY(
            store->ops->set(store, keys[i], values[i].data, values[i].size, wait, err));
    }
    return DM_OK;
}

dm_status
dm_store_num_keys(dm_store *store, const dm_wait *wait, int64_t *n, dm_error *err)
{
    DM_TRY(check_store(store, err));
    if (store->ops->num_keys == NULL) {
        return unsupported(store, "num_keys", err);
    }
    return store->ops->num_keys(store, wait, n, err);
}

dm_status
dm_store_list_keys(dm_store *store, const dm_wait *wait, dm_bytes **keys, size_t *n,
                   dm_error *err)
{
    DM_TRY(check_store(store, err));
    if (store->ops->list_keys == NULL) {
        return unsupported(store, "list_keys", err);
    }
    return store->ops->list_keys(store, wait, keys, n, err);
}

dm_status
dm_store_queue_push(dm_store *store, const char *key, const void *data, size_t size,
                    const dm_wait *wait, dm_error *err)
{
    DM_TRY(check_call(store, key, size, err));
    if (store->ops->queue_push == NULL) {
        return unsupported(store, "queue_push", err);
    }
    return store->ops->queue_push(store, key, data, size, wait, err);
}

dm_status
dm_store_queue_pop(dm_store *store, const char *key, bool block, const dm_wait *wait,
                   dm_bytes *value, dm_error *err)
{
    DM_TRY(check_call(store, key, 0, err));
    if (store->ops->queue_pop == NULL) {
        return unsupported(store, "queue_pop", err);
    }
    return store->ops->queue_pop(store, key, block, wait, value, err);
}

dm_status
dm_store_queue_len(dm_store *store, const char *key, const dm_wait *wait, int64_t *n,
                   dm_error *err)
{
    DM_TRY(check_call(store, key, 0, err));
    if (store->ops->queue_len == NULL) {
        return unsupported(store, "queue_len", err);
    }
    return store->ops->queue_len(store, key, wait, n, err);
}

/* --- barrier ----------------------------------------------------------------------- */

/* "<key>/<what>" or "<key>/<what>/<round>". */
static char *
barrier_key(const char *key, const char *what, int64_t round)
{
    size_t size = strlen(key) + strlen(what) + 32;
    char *name = dm_malloc_array(size, 1);
    if (name != NULL && round < 0) {
        snprintf(name, size, "%s/%s", key, what);
    }
    else if (name != NULL) {
        snprintf(name, size, "%s/%s/%lld", key, what, (long long)round);
    }
    return name;
}

/* Everybody counts up; the last of a round sets the round's key, which the others
 * wait for. Whoever ends round r knows that all have left round r - 1 and may
 * remove its key. */
static dm_status
barrier_by_counting(dm_store *store, const char *key, int32_t world,
                    const dm_wait *wait, dm_error *err)
{
    char *counter = barrier_key(key, "count", -1);
    char *here = NULL;
    char *before = NULL;
    dm_status status;
    if (counter == NULL) {
        status = dm_error_set_no_memory(err, "a barrier's key");
        goto done;
    }
    int64_t arrived;
    DM_TRY_GOTO(status, dm_store_add(store, counter, 1, wait, &arrived, err), done);

    int64_t round = (arrived - 1) / world;
    here = barrier_key(key, "round", round);
    before = barrier_key(key, "round", round > 0 ? round - 1 : 0);
    if (here == NULL || before == NULL) {
        status = dm_error_set_no_memory(err, "a barrier's key");
        goto done;
    }
    if (arrived % world != 0) {
        status = dm_store_wait(store, (const char *const *)&here, 1, wait, err);
        if (status == DM_ERR_TIMEOUT) {
            dm_error_context(err,
                             "barrier '%.200s': %lld of %d had come when this one "
                             "did",
                             key, (long long)((arrived - 1) % world + 1), world);
        }
        goto done;
    }
    DM_TRY_GOTO(status, dm_store_set(store, here, "1", 1, wait, err), done);
    if (round > 0 && store->ops->delete_key != NULL) {
        bool existed;
        (void)store->ops->delete_key(store, before, wait, &existed, NULL);
    }

done:
    dm_free(counter);
    dm_free(here);
    dm_free(before);
    return status;
}

dm_status
dm_store_barrier(dm_store *store, const char *key, int32_t world, const dm_wait *wait,
                 dm_error *err)
{
    DM_TRY(check_call(store, key, 0, err));
    if (world < 1) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "barrier '%.200s' needs a world of 1 or more, got %d", key,
                            world);
    }
    if (store->ops->barrier != NULL) {
        return store->ops->barrier(store, key, world, wait, err);
    }
    return barrier_by_counting(store, key, world, wait, err);
}

/* --- departures --------------------------------------------------------------------- */

dm_status
dm_store_will(dm_store *store, const char *key, const void *data, size_t size,
              const dm_wait *wait, dm_error *err)
{
    DM_TRY(check_call(store, key, size, err));
    if (store->ops->will == NULL) {
        return unsupported(store, "will", err);
    }
    return store->ops->will(store, key, data, size, wait, err);
}

/* DM_ERR_PEER with the value of the first `unless` key that is there. */
static dm_status
look_for_departures(dm_store *store, const char *const *unless, size_t m,
                    const dm_wait *wait, dm_error *err)
{
    for (size_t i = 0; i < m; i++) {
        bool ready;
        DM_TRY(dm_store_check(store, &unless[i], 1, wait, &ready, err));
        if (!ready) {
            continue;
        }
        dm_bytes value;
        DM_TRY(dm_store_get(store, unless[i], wait, &value, err));
        dm_error_set(err, DM_ERR_PEER, "%s", value.data);
        dm_bytes_free(&value);
        return DM_ERR_PEER;
    }
    return DM_OK;
}

static dm_status
wait_by_turns(dm_store *store, const char *const *keys, size_t n,
              const char *const *unless, size_t m, const dm_wait *wait, dm_error *err)
{
    int64_t turn = UNLESS_FIRST_MS * DM_NS_PER_MS;
    for (;;) {
        dm_wait slice = *wait;
        int64_t end = dm_clock_deadline(turn);
        bool last = end >= wait->deadline;
        slice.deadline = last ? wait->deadline : end;
        dm_status status = dm_store_wait(store, keys, n, &slice, err);
        if (status != DM_ERR_TIMEOUT || last) {
            return status;
        }
        DM_TRY(look_for_departures(store, unless, m, wait, err));
        if (turn < UNLESS_LAST_MS * DM_NS_PER_MS) {
            turn *= 2;
        }
    }
}

dm_status
dm_store_wait_unless(dm_store *store, const char *const *keys, size_t n,
                     const char *const *unless, size_t m, const dm_wait *wait,
                     dm_error *err)
{
    DM_TRY(check_store(store, err));
    DM_TRY(check_keys(keys, n, err));
    DM_TRY(check_keys(unless, m, err));
    if (n == 0) {
        return DM_OK;
    }
    if (m == 0) {
        return store->ops->wait(store, keys, n, wait, err);
    }
    if (store->ops->wait_unless != NULL) {
        return store->ops->wait_unless(store, keys, n, unless, m, wait, err);
    }
    if (store->ops->check == NULL) {
        return store->ops->wait(store, keys, n, wait, err);
    }
    return wait_by_turns(store, keys, n, unless, m, wait, err);
}

/* ------------------------------------------------------------------------------------- */

void
dm_store_close(dm_store *store)
{
    if (store->pid == getpid()) {
        store->ops->close(store);
    }
}

const char *
dm_store_kind(const dm_store *store)
{
    return store->ops->kind;
}
