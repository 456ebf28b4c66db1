/* Keys, values and queues in memory: what the in-process store, the tcp server and
 * the file store's picture of its file have in common.
 *
 * A hash table whose keys are bytes (any, also NUL). No locks, no waiting, no
 * dm_store: the owner guards it. The hash is keyed at random, so that nobody who
 * may send keys can make them collide. An entry lives while it has a value, queue
 * items or a `watcher`.
 */
#ifndef DM_KV_H
#define DM_KV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dm_status.h"
#include "store/dm_store.h"

typedef struct dm_kv_item {
    struct dm_kv_item *next;
    dm_bytes value;
} dm_kv_item;

typedef struct dm_kv_entry {
    struct dm_kv_entry *next; /* in its bucket */
    uint64_t hash;
    bool has_value;
    dm_bytes value;
    size_t items; /* length of the queue */
    dm_kv_item *first;
    dm_kv_item *last;
    void *watcher;     /* the owner's; NULL when nobody watches */
    size_t n_watchers; /* the owner's */
    size_t key_size;
    char key[]; /* key_size bytes and a NUL */
} dm_kv_entry;

typedef struct dm_kv {
    dm_kv_entry **buckets;
    size_t n_buckets; /* a power of two, 0 before the first entry */
    size_t n_entries;
    size_t n_values; /* entries that have a value */
    uint64_t seed[2];
} dm_kv;

/* An empty table; does not allocate. */
void
dm_kv_init(dm_kv *kv);

/* Frees everything (watchers are the owner's and stay). */
void
dm_kv_fini(dm_kv *kv);

/* The entry of that key, or NULL. Borrowed until the next call that changes it. */
dm_kv_entry *
dm_kv_find(const dm_kv *kv, const char *key, size_t key_size);

/* The entry of that key, made empty when it is not there; NULL when out of memory.
 * An entry left empty must be given to dm_kv_tidy. */
dm_kv_entry *
dm_kv_claim(dm_kv *kv, const char *key, size_t key_size);

/* Removes the entry if it has neither value, items nor watcher. NULL is fine. */
void
dm_kv_tidy(dm_kv *kv, dm_kv_entry *entry);

/* There for check and wait: a value or a queue that is not empty. NULL is not. */
bool
dm_kv_is_there(const dm_kv_entry *entry);

/* All of these return DM_ERR_NO_MEMORY with nothing changed; texts do not name the
 * key, which the caller knows. `entry` is the key's entry after a change, so that its
 * watchers can be told. */
dm_status
dm_kv_set(dm_kv *kv, const char *key, size_t key_size, const void *data, size_t size,
          dm_kv_entry **entry, dm_error *err);

/* DM_ERR_VALUE: it would grow beyond DM_STORE_VALUE_MAX. */
dm_status
dm_kv_append(dm_kv *kv, const char *key, size_t key_size, const void *data, size_t size,
             dm_kv_entry **entry, dm_error *err);

/* DM_ERR_VALUE: the key holds something that is no number, or the sum overflows. */
dm_status
dm_kv_add(dm_kv *kv, const char *key, size_t key_size, int64_t amount, int64_t *result,
          dm_kv_entry **entry, dm_error *err);

/* As dm_store_compare_set. `now` is the value to answer, borrowed from the table or
 * from `expected`; `entry` is NULL when nothing was set. */
dm_status
dm_kv_compare_set(dm_kv *kv, const char *key, size_t key_size, const dm_bytes *expected,
                  const dm_bytes *desired, dm_bytes *now, dm_kv_entry **entry,
                  dm_error *err);

/* Forgets the value (as in torch, a queue of that name stays). Returns whether there
 * was one. */
bool
dm_kv_delete(dm_kv *kv, const char *key, size_t key_size);

dm_status
dm_kv_push(dm_kv *kv, const char *key, size_t key_size, const void *data, size_t size,
           dm_kv_entry **entry, dm_error *err);

/* Takes the first item out; false when there is none. `value` is the caller's. */
bool
dm_kv_pop(dm_kv *kv, const char *key, size_t key_size, dm_bytes *value);

/* Calls `visit` for every entry that has a value, in no order; stops at false. */
void
dm_kv_each(const dm_kv *kv, bool (*visit)(void *arg, const dm_kv_entry *entry),
           void *arg);

/* The keys that have a value, without their first `skip` bytes, as
 * dm_store_list_keys. */
dm_status
dm_kv_list(const dm_kv *kv, size_t skip, dm_bytes **keys, size_t *n, dm_error *err);

#endif
