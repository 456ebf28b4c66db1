/* The in-process store: a table, a mutex and one condition.
 *
 * Whoever changes a key wakes all who wait; they look again. The mutex is never
 * held while a wait's poll function runs.
 */
#include <pthread.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/dm_alloc.h"
#include "store/dm_kv.h"
#include "store/dm_store.h"

typedef struct hash_store {
    dm_store base;
    pthread_mutex_t mutex; /* guards all below */
    pthread_cond_t changed;
    bool closed;
    dm_kv kv;
    dm_kv barriers; /* entries whose watcher is a hash_barrier */
} hash_store;

typedef struct hash_barrier {
    int32_t arrived; /* in the round that is open */
    int32_t inside;  /* callers that have not returned yet */
    uint64_t round;
} hash_barrier;

static hash_store *
hash_of(dm_store *store)
{
    return (hash_store *)store;
}

static dm_status
check_open_locked(const hash_store *self, dm_error *err)
{
    return self->closed ? dm_error_set(err, DM_ERR_CLOSED, "hash store is closed")
                        : DM_OK;
}

/* Locks; DM_ERR_CLOSED, and not locked, when the store is closed. */
static dm_status
enter(hash_store *self, dm_error *err)
{
    pthread_mutex_lock(&self->mutex);
    dm_status status = check_open_locked(self, err);
    if (status != DM_OK) {
        pthread_mutex_unlock(&self->mutex);
    }
    return status;
}

static dm_status
leave(hash_store *self, dm_status status)
{
    pthread_mutex_unlock(&self->mutex);
    return status;
}

/* Leaves after a change. */
static dm_status
leave_changed(hash_store *self, dm_status status)
{
    pthread_cond_broadcast(&self->changed);
    return leave(self, status);
}

static dm_status
name_key(dm_status status, const char *key, dm_error *err)
{
    if (status == DM_ERR_VALUE) {
        dm_error_context(err, "key '%.200s'", key);
    }
    return status;
}

/* Sleeps until something may have changed, or calls the wait's poll function when
 * that is due; the caller looks at its condition after either. `*next_poll` is 0 at
 * first. Fails also when the store was closed meanwhile. */
static dm_status
sleep_locked(hash_store *self, const dm_wait *wait, int64_t *next_poll, dm_error *err)
{
    int64_t now = dm_clock_now();
    if (now >= *next_poll) {
        pthread_mutex_unlock(&self->mutex);
        dm_status status = dm_wait_poll(wait, err);
        *next_poll = dm_clock_now() + dm_wait_slice(wait);
        pthread_mutex_lock(&self->mutex);
        DM_TRY(status);
    }
    else {
        struct timespec until = {*next_poll / DM_NS_PER_S, *next_poll % DM_NS_PER_S};
        pthread_cond_timedwait(&self->changed, &self->mutex, &until);
    }
    return check_open_locked(self, err);
}

static bool
is_there(const hash_store *self, const char *key)
{
    return dm_kv_is_there(dm_kv_find(&self->kv, key, strlen(key)));
}

static size_t
count_there(const hash_store *self, const char *const *keys, size_t n, bool *there)
{
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        bool found = is_there(self, keys[i]);
        count += found;
        if (there != NULL) {
            there[i] = found;
        }
    }
    return count;
}

/* "timed out waiting for 'a'" with the names of what is missing. */
static void
explain_timeout_locked(const hash_store *self, const char *const *keys, size_t n,
                       dm_error *err)
{
    char text[1024];
    bool *there = dm_calloc(n, sizeof(bool));
    if (there != NULL) {
        count_there(self, keys, n, there);
    }
    dm_store_list_missing(keys, there, n, text, sizeof(text));
    dm_free(there);
    dm_error_set(err, DM_ERR_TIMEOUT, "hash store: timed out waiting for %s", text);
}

/* Waits for all keys with the lock held before and after. */
static dm_status
wait_locked(hash_store *self, const char *const *keys, size_t n,
            const char *const *unless, size_t m, const dm_wait *wait, dm_error *err)
{
    int64_t next_poll = 0;
    while (count_there(self, keys, n, NULL) != n) {
        for (size_t i = 0; i < m; i++) {
            const dm_kv_entry *entry =
                dm_kv_find(&self->kv, unless[i], strlen(unless[i]));
            if (entry != NULL && entry->has_value) {
                return dm_error_set(err, DM_ERR_PEER, "%s", entry->value.data);
            }
        }
        dm_status status = sleep_locked(self, wait, &next_poll, err);
        if (status == DM_ERR_TIMEOUT) {
            explain_timeout_locked(self, keys, n, err);
        }
        DM_TRY(status);
    }
    return DM_OK;
}

/* --- calls ------------------------------------------------------------------------- */

static dm_status
hash_set(dm_store *store, const char *key, const void *data, size_t size,
         const dm_wait *wait, dm_error *err)
{
    (void)wait;
    hash_store *self = hash_of(store);
    DM_TRY(enter(self, err));
    dm_kv_entry *entry;
    return leave_changed(
        self, dm_kv_set(&self->kv, key, strlen(key), data, size, &entry, err));
}

static dm_status
hash_multi_get(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
               dm_bytes *values, dm_error *err)
{
    hash_store *self = hash_of(store);
    DM_TRY(enter(self, err));
    dm_status status = wait_locked(self, keys, n, NULL, 0, wait, err);
    for (size_t i = 0; status == DM_OK && i < n; i++) {
        /* A key that is only a queue reads as empty, as in torch. */
        const dm_kv_entry *entry = dm_kv_find(&self->kv, keys[i], strlen(keys[i]));
        status = dm_bytes_copy(entry->value.data, entry->value.size, &values[i], err);
        if (status != DM_OK) {
            while (i-- > 0) {
                dm_bytes_free(&values[i]);
            }
        }
    }
    return leave(self, status);
}

static dm_status
hash_get(dm_store *store, const char *key, const dm_wait *wait, dm_bytes *value,
         dm_error *err)
{
    return hash_multi_get(store, &key, 1, wait, value, err);
}

static dm_status
hash_add(dm_store *store, const char *key, int64_t amount, const dm_wait *wait,
         int64_t *result, dm_error *err)
{
    (void)wait;
    hash_store *self = hash_of(store);
    DM_TRY(enter(self, err));
    dm_kv_entry *entry;
    dm_status status =
        dm_kv_add(&self->kv, key, strlen(key), amount, result, &entry, err);
    return leave_changed(self, name_key(status, key, err));
}

static dm_status
hash_compare_set(dm_store *store, const char *key, const void *expected,
                 size_t expected_size, const void *desired, size_t desired_size,
                 const dm_wait *wait, dm_bytes *value, dm_error *err)
{
    (void)wait;
    hash_store *self = hash_of(store);
    DM_TRY(enter(self, err));
    const dm_bytes before = {(char *)expected, expected_size};
    const dm_bytes after = {(char *)desired, desired_size};
    dm_bytes now;
    dm_kv_entry *entry;
    dm_status status = dm_kv_compare_set(&self->kv, key, strlen(key), &before, &after,
                                         &now, &entry, err);
    if (status == DM_OK) {
        status = dm_bytes_copy(now.data, now.size, value, err);
    }
    return leave_changed(self, status);
}

static dm_status
hash_check(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
           bool *ready, dm_error *err)
{
    (void)wait;
    hash_store *self = hash_of(store);
    DM_TRY(enter(self, err));
    *ready = count_there(self, keys, n, NULL) == n;
    return leave(self, DM_OK);
}

static dm_status
hash_wait_unless(dm_store *store, const char *const *keys, size_t n,
                 const char *const *unless, size_t m, const dm_wait *wait,
                 dm_error *err)
{
    hash_store *self = hash_of(store);
    DM_TRY(enter(self, err));
    return leave(self, wait_locked(self, keys, n, unless, m, wait, err));
}

static dm_status
hash_wait(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
          dm_error *err)
{
    return hash_wait_unless(store, keys, n, NULL, 0, wait, err);
}

static dm_status
hash_delete_key(dm_store *store, const char *key, const dm_wait *wait, bool *existed,
                dm_error *err)
{
    (void)wait;
    hash_store *self = hash_of(store);
    DM_TRY(enter(self, err));
    *existed = dm_kv_delete(&self->kv, key, strlen(key));
    return leave(self, DM_OK);
}

static dm_status
hash_append(dm_store *store, const char *key, const void *data, size_t size,
            const dm_wait *wait, dm_error *err)
{
    (void)wait;
    hash_store *self = hash_of(store);
    DM_TRY(enter(self, err));
    dm_kv_entry *entry;
    dm_status status =
        dm_kv_append(&self->kv, key, strlen(key), data, size, &entry, err);
    return leave_changed(self, name_key(status, key, err));
}

static dm_status
hash_multi_set(dm_store *store, const char *const *keys, const dm_bytes *values,
               size_t n, const dm_wait *wait, dm_error *err)
{
    (void)wait;
    hash_store *self = hash_of(store);
    DM_TRY(enter(self, err));
    dm_status status = DM_OK;
    for (size_t i = 0; status == DM_OK && i < n; i++) {
        dm_kv_entry *entry;
        status = dm_kv_set(&self->kv, keys[i], strlen(keys[i]), values[i].data,
                           values[i].size, &entry, err);
    }
    return leave_changed(self, status);
}

static dm_status
hash_num_keys(dm_store *store, const dm_wait *wait, int64_t *n, dm_error *err)
{
    (void)wait;
    hash_store *self = hash_of(store);
    DM_TRY(enter(self, err));
    *n = (int64_t)self->kv.n_values;
    return leave(self, DM_OK);
}

static dm_status
hash_list_keys(dm_store *store, const dm_wait *wait, dm_bytes **keys, size_t *n,
               dm_error *err)
{
    (void)wait;
    hash_store *self = hash_of(store);
    DM_TRY(enter(self, err));
    return leave(self, dm_kv_list(&self->kv, 0, keys, n, err));
}

/* --- queues ---------------------------------------------------------------------------- */

static dm_status
hash_queue_push(dm_store *store, const char *key, const void *data, size_t size,
                const dm_wait *wait, dm_error *err)
{
    (void)wait;
    hash_store *self = hash_of(store);
    DM_TRY(enter(self, err));
    dm_kv_entry *entry;
    return leave_changed(
        self, dm_kv_push(&self->kv, key, strlen(key), data, size, &entry, err));
}

static dm_status
hash_queue_pop(dm_store *store, const char *key, bool block, const dm_wait *wait,
               dm_bytes *value, dm_error *err)
{
    hash_store *self = hash_of(store);
    DM_TRY(enter(self, err));
    int64_t next_poll = 0;
    while (!dm_kv_pop(&self->kv, key, strlen(key), value)) {
        if (!block) {
            return leave(
                self, dm_error_set(err, DM_ERR_AGAIN, "queue '%.200s' is empty", key));
        }
        dm_status status = sleep_locked(self, wait, &next_poll, err);
        if (status == DM_ERR_TIMEOUT) {
            dm_error_set(err, status,
                         "hash store: timed out waiting for an item in "
                         "queue '%.200s'",
                         key);
        }
        if (status != DM_OK) {
            return leave(self, status);
        }
    }
    return leave(self, DM_OK);
}

static dm_status
hash_queue_len(dm_store *store, const char *key, const dm_wait *wait, int64_t *n,
               dm_error *err)
{
    (void)wait;
    hash_store *self = hash_of(store);
    DM_TRY(enter(self, err));
    const dm_kv_entry *entry = dm_kv_find(&self->kv, key, strlen(key));
    *n = entry != NULL ? (int64_t)entry->items : 0;
    return leave(self, DM_OK);
}

/* --- barrier ---------------------------------------------------------------------------- */

/* The barrier of that key, made when it is the first to come; NULL without memory. */
static dm_kv_entry *
barrier_entry_locked(hash_store *self, const char *key)
{
    dm_kv_entry *entry = dm_kv_claim(&self->barriers, key, strlen(key));
    if (entry != NULL && entry->watcher == NULL) {
        entry->watcher = dm_calloc(1, sizeof(hash_barrier));
        if (entry->watcher == NULL) {
            dm_kv_tidy(&self->barriers, entry);
            return NULL;
        }
    }
    return entry;
}

static dm_status
hash_barrier_call(dm_store *store, const char *key, int32_t world, const dm_wait *wait,
                  dm_error *err)
{
    hash_store *self = hash_of(store);
    DM_TRY(enter(self, err));
    dm_kv_entry *entry = barrier_entry_locked(self, key);
    if (entry == NULL) {
        return leave(self, dm_error_set_no_memory(err, "a store's barrier"));
    }
    hash_barrier *barrier = entry->watcher;
    dm_status status = DM_OK;
    barrier->inside++;
    if (++barrier->arrived >= world) {
        barrier->arrived = 0;
        barrier->round++;
        pthread_cond_broadcast(&self->changed);
    }
    else {
        uint64_t round = barrier->round;
        int64_t next_poll = 0;
        while (status == DM_OK && barrier->round == round) {
            status = sleep_locked(self, wait, &next_poll, err);
        }
        if (barrier->round != round) {
            status = DM_OK;
        }
        else {
            if (status == DM_ERR_TIMEOUT) {
                dm_error_set(err, status,
                             "hash store: timed out in barrier '%.200s': %d of %d have "
                             "come",
                             key, barrier->arrived, world);
            }
            barrier->arrived--;
        }
    }
    if (--barrier->inside == 0) {
        dm_free(barrier);
        entry->watcher = NULL;
        dm_kv_tidy(&self->barriers, entry);
    }
    return leave(self, status);
}

/* --- life --------------------------------------------------------------------------------- */

static void
hash_close(dm_store *store)
{
    hash_store *self = hash_of(store);
    pthread_mutex_lock(&self->mutex);
    self->closed = true;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->mutex);
}

static void
hash_free(dm_store *store)
{
    hash_store *self = hash_of(store);
    if (store->pid == getpid()) {
        /* A forked child may have inherited them in use: it leaves them. */
        pthread_cond_destroy(&self->changed);
        pthread_mutex_destroy(&self->mutex);
        dm_kv_fini(&self->barriers);
        dm_kv_fini(&self->kv);
    }
    dm_free(self);
}

static const dm_store_ops hash_ops = {
    .kind = "hash",
    .set = hash_set,
    .get = hash_get,
    .add = hash_add,
    .compare_set = hash_compare_set,
    .check = hash_check,
    .wait = hash_wait,
    .delete_key = hash_delete_key,
    .append = hash_append,
    .multi_get = hash_multi_get,
    .multi_set = hash_multi_set,
    .num_keys = hash_num_keys,
    .list_keys = hash_list_keys,
    .queue_push = hash_queue_push,
    .queue_pop = hash_queue_pop,
    .queue_len = hash_queue_len,
    .barrier = hash_barrier_call,
    .wait_unless = hash_wait_unless,
    .close = hash_close,
    .free = hash_free,
};

dm_status
dm_store_hash_new(dm_store **store, dm_error *err)
{
    hash_store *self = dm_calloc(1, sizeof(*self));
    if (self == NULL) {
        return dm_error_set_no_memory(err, "a hash store");
    }
    dm_store_init(&self->base, &hash_ops);
    dm_kv_init(&self->kv);
    dm_kv_init(&self->barriers);
    pthread_mutex_init(&self->mutex, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&self->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    *store = &self->base;
    return DM_OK;
}
