/* The prefix view: every key gets "<prefix>/" in front, the rest is the base's.
 *
 * No state of its own but the prefix and a closed flag, so no lock.
 */
#include <stdio.h>
#include <string.h>

#include "base/dm_alloc.h"
#include "store/dm_store.h"

typedef struct prefix_store {
    dm_store head;
    dm_store *base; /* held */
    atomic_bool closed;
    size_t prefix_size; /* with the '/' */
    char prefix[];      /* "<prefix>/" */
} prefix_store;

static prefix_store *
prefix_of(dm_store *store)
{
    return (prefix_store *)store;
}

static dm_status
check_open(const prefix_store *self, dm_error *err)
{
    /* Relaxed: a call that races with close may go either way. */
    if (atomic_load_explicit(&self->closed, memory_order_relaxed)) {
        return dm_error_set(err, DM_ERR_CLOSED, "prefix store '%.200s' is closed",
                            self->prefix);
    }
    return DM_OK;
}

/* `n` full keys in one block: an array of pointers, then their texts. */
static dm_status
join(const prefix_store *self, const char *const *keys, size_t n, const char ***joined,
     dm_error *err)
{
    size_t bytes = n * sizeof(char *);
    for (size_t i = 0; i < n; i++) {
        bytes += self->prefix_size + strlen(keys[i]) + 1;
    }
    const char **block = dm_malloc_array(bytes, 1);
    if (block == NULL) {
        return dm_error_set_no_memory(err, "a prefix store's keys");
    }
    char *text = (char *)(block + n);
    for (size_t i = 0; i < n; i++) {
        size_t size = strlen(keys[i]) + 1;
        block[i] = text;
        memcpy(text, self->prefix, self->prefix_size);
        memcpy(text + self->prefix_size, keys[i], size);
        text += self->prefix_size + size;
    }
    *joined = block;
    return DM_OK;
}

/* One call on its way to the base. */
typedef struct prefix_call {
    dm_store *base;
    const char **full; /* the joined keys */
    dm_wait wait;      /* the caller's, which also ends when the view is closed */
    const dm_wait *outer;
    const prefix_store *view;
} prefix_call;

static dm_status
poll_call(void *arg, dm_error *err)
{
    const prefix_call *call = arg;
    DM_TRY(check_open(call->view, err));
    const dm_wait *outer = call->outer;
    return outer->poll != NULL ? outer->poll(outer->arg, err) : DM_OK;
}

static dm_status
begin(prefix_call *call, dm_store *store, const char *const *keys, size_t n,
      const dm_wait *wait, dm_error *err)
{
    const prefix_store *self = prefix_of(store);
    DM_TRY(check_open(self, err));
    call->base = self->base;
    call->wait = (dm_wait){wait->deadline, poll_call, call};
    call->outer = wait;
    call->view = self;
    return join(self, keys, n, &call->full, err);
}

static dm_status
done(prefix_call *call, dm_status status)
{
    dm_free(call->full);
    return status;
}

static dm_status
prefix_set(dm_store *store, const char *key, const void *data, size_t size,
           const dm_wait *wait, dm_error *err)
{
    prefix_call call;
    DM_TRY(begin(&call, store, &key, 1, wait, err));
    return done(&call,
                dm_store_set(call.base, call.full[0], data, size, &call.wait, err));
}

static dm_status
prefix_get(dm_store *store, const char *key, const dm_wait *wait, dm_bytes *value,
           dm_error *err)
{
    prefix_call call;
    DM_TRY(begin(&call, store, &key, 1, wait, err));
    return done(&call, dm_store_get(call.base, call.full[0], &call.wait, value, err));
}

static dm_status
prefix_add(dm_store *store, const char *key, int64_t amount, const dm_wait *wait,
           int64_t *result, dm_error *err)
{
    prefix_call call;
    DM_TRY(begin(&call, store, &key, 1, wait, err));
    return done(&call,
                dm_store_add(call.base, call.full[0], amount, &call.wait, result, err));
}

static dm_status
prefix_compare_set(dm_store *store, const char *key, const void *expected,
                   size_t expected_size, const void *desired, size_t desired_size,
                   const dm_wait *wait, dm_bytes *value, dm_error *err)
{
    prefix_call call;
    DM_TRY(begin(&call, store, &key, 1, wait, err));
    return done(&call,
                dm_store_compare_set(call.base, call.full[0], expected, expected_size,
                                     desired, desired_size, &call.wait, value, err));
}

static dm_status
prefix_check(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
             bool *ready, dm_error *err)
{
    prefix_call call;
    DM_TRY(begin(&call, store, keys, n, wait, err));
    return done(&call, dm_store_check(call.base, call.full, n, &call.wait, ready, err));
}

static dm_status
prefix_wait(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
            dm_error *err)
{
    prefix_call call;
    DM_TRY(begin(&call, store, keys, n, wait, err));
    return done(&call, dm_store_wait(call.base, call.full, n, &call.wait, err));
}

static dm_status
prefix_delete_key(dm_store *store, const char *key, const dm_wait *wait, bool *existed,
                  dm_error *err)
{
    prefix_call call;
    DM_TRY(begin(&call, store, &key, 1, wait, err));
    return done(&call,
                dm_store_delete_key(call.base, call.full[0], &call.wait, existed, err));
}

static dm_status
prefix_append(dm_store *store, const char *key, const void *data, size_t size,
              const dm_wait *wait, dm_error *err)
{
    prefix_call call;
    DM_TRY(begin(&call, store, &key, 1, wait, err));
    return done(&call,
                dm_store_append(call.base, call.full[0], data, size, &call.wait, err));
}

static dm_status
prefix_multi_get(dm_store *store, const char *const *keys, size_t n,
                 const dm_wait *wait, dm_bytes *values, dm_error *err)
{
    prefix_call call;
    DM_TRY(begin(&call, store, keys, n, wait, err));
    return done(&call,
                dm_store_multi_get(call.base, call.full, n, &call.wait, values, err));
}

static dm_status
prefix_multi_set(dm_store *store, const char *const *keys, const dm_bytes *values,
                 size_t n, const dm_wait *wait, dm_error *err)
{
    prefix_call call;
    DM_TRY(begin(&call, store, keys, n, wait, err));
    return done(&call,
                dm_store_multi_set(call.base, call.full, values, n, &call.wait, err));
}

/* The base's count, as in torch: counting a prefix would mean reading all keys. */
static dm_status
prefix_num_keys(dm_store *store, const dm_wait *wait, int64_t *n, dm_error *err)
{
    prefix_call call;
    DM_TRY(begin(&call, store, NULL, 0, wait, err));
    return done(&call, dm_store_num_keys(call.base, &call.wait, n, err));
}

/* The base's keys that begin with the prefix, without it. */
static dm_status
prefix_list_keys(dm_store *store, const dm_wait *wait, dm_bytes **keys, size_t *n,
                 dm_error *err)
{
    const prefix_store *self = prefix_of(store);
    prefix_call call;
    DM_TRY(begin(&call, store, NULL, 0, wait, err));
    dm_status status = dm_store_list_keys(call.base, &call.wait, keys, n, err);
    if (status == DM_OK) {
        size_t kept = 0;
        for (size_t i = 0; i < *n; i++) {
            dm_bytes *key = &(*keys)[i];
            if (key->size < self->prefix_size ||
                memcmp(key->data, self->prefix, self->prefix_size) != 0) {
                dm_bytes_free(key);
                continue;
            }
            key->size -= self->prefix_size;
            memmove(key->data, key->data + self->prefix_size, key->size + 1);
            (*keys)[kept++] = *key;
        }
        *n = kept;
    }
    return done(&call, status);
}

static dm_status
prefix_queue_push(dm_store *store, const char *key, const void *data, size_t size,
                  const dm_wait *wait, dm_error *err)
{
    prefix_call call;
    DM_TRY(begin(&call, store, &key, 1, wait, err));
    return done(&call, dm_store_queue_push(call.base, call.full[0], data, size,
                                           &call.wait, err));
}

static dm_status
prefix_queue_pop(dm_store *store, const char *key, bool block, const dm_wait *wait,
                 dm_bytes *value, dm_error *err)
{
    prefix_call call;
    DM_TRY(begin(&call, store, &key, 1, wait, err));
    return done(&call, dm_store_queue_pop(call.base, call.full[0], block, &call.wait,
                                          value, err));
}

static dm_status
prefix_queue_len(dm_store *store, const char *key, const dm_wait *wait, int64_t *n,
                 dm_error *err)
{
    prefix_call call;
    DM_TRY(begin(&call, store, &key, 1, wait, err));
    return done(&call, dm_store_queue_len(call.base, call.full[0], &call.wait, n, err));
}

static dm_status
prefix_barrier(dm_store *store, const char *key, int32_t world, const dm_wait *wait,
               dm_error *err)
{
    prefix_call call;
    DM_TRY(begin(&call, store, &key, 1, wait, err));
    return done(&call,
                dm_store_barrier(call.base, call.full[0], world, &call.wait, err));
}

static dm_status
prefix_wait_unless(dm_store *store, const char *const *keys, size_t n,
                   const char *const *unless, size_t m, const dm_wait *wait,
                   dm_error *err)
{
    prefix_call call;
    DM_TRY(begin(&call, store, keys, n, wait, err));
    const char **full_unless;
    dm_status status = join(prefix_of(store), unless, m, &full_unless, err);
    if (status != DM_OK) {
        return done(&call, status);
    }
    status =
        dm_store_wait_unless(call.base, call.full, n, full_unless, m, &call.wait, err);
    dm_free(full_unless);
    return done(&call, status);
}

static dm_status
prefix_will(dm_store *store, const char *key, const void *data, size_t size,
            const dm_wait *wait, dm_error *err)
{
    prefix_call call;
    DM_TRY(begin(&call, store, &key, 1, wait, err));
    return done(&call,
                dm_store_will(call.base, call.full[0], data, size, &call.wait, err));
}

static void
prefix_close(dm_store *store)
{
    /* Relaxed: see join. */
    atomic_store_explicit(&prefix_of(store)->closed, true, memory_order_relaxed);
}

static void
prefix_free(dm_store *store)
{
    prefix_store *self = prefix_of(store);
    dm_store_release(self->base);
    dm_free(self);
}

static const dm_store_ops prefix_ops = {
    .kind = "prefix",
    .set = prefix_set,
    .get = prefix_get,
    .add = prefix_add,
    .compare_set = prefix_compare_set,
    .check = prefix_check,
    .wait = prefix_wait,
    .delete_key = prefix_delete_key,
    .append = prefix_append,
    .multi_get = prefix_multi_get,
    .multi_set = prefix_multi_set,
    .num_keys = prefix_num_keys,
    .list_keys = prefix_list_keys,
    .queue_push = prefix_queue_push,
    .queue_pop = prefix_queue_pop,
    .queue_len = prefix_queue_len,
    .barrier = prefix_barrier,
    .wait_unless = prefix_wait_unless,
    .will = prefix_will,
    .close = prefix_close,
    .free = prefix_free,
};

dm_status
dm_store_prefix_new(dm_store *base, const char *prefix, dm_store **store, dm_error *err)
{
    size_t size = strlen(prefix);
    if (size + 2 > DM_STORE_KEY_MAX) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "prefix '%.32s...' has %zu bytes, which leaves no room for "
                            "keys (at most %d bytes)",
                            prefix, size, DM_STORE_KEY_MAX - 1);
    }
    prefix_store *self = dm_calloc(1, sizeof(*self) + size + 2);
    if (self == NULL) {
        return dm_error_set_no_memory(err, "a prefix store");
    }
    dm_store_init(&self->head, &prefix_ops);
    self->base = dm_store_hold(base);
    atomic_init(&self->closed, false);
    self->prefix_size = size + 1;
    memcpy(self->prefix, prefix, size);
    self->prefix[size] = '/';
    *store = &self->head;
    return DM_OK;
}

dm_store *
dm_store_prefix_base(dm_store *store, const char **prefix)
{
    if (store->ops != &prefix_ops) {
        return NULL;
    }
    *prefix = prefix_of(store)->prefix;
    return prefix_of(store)->base;
}
