/* Keys, values and queues in memory: see dm_kv.h. */
#include "store/dm_kv.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/dm_alloc.h"
#include "base/dm_clock.h"

enum { FIRST_BUCKETS = 64 };

/* --- hash: SipHash-1-3 ---------------------------------------------------------------- */

static uint64_t
rotate(uint64_t x, int bits)
{
    return (x << bits) | (x >> (64 - bits));
}

static void
sip_round(uint64_t v[4])
{
    v[0] += v[1];
    v[1] = rotate(v[1], 13) ^ v[0];
    v[0] = rotate(v[0], 32);
    v[2] += v[3];
    v[3] = rotate(v[3], 16) ^ v[2];
    v[0] += v[3];
    v[3] = rotate(v[3], 21) ^ v[0];
    v[2] += v[1];
    v[1] = rotate(v[1], 17) ^ v[2];
    v[2] = rotate(v[2], 32);
}

static uint64_t
sip_hash(const uint64_t seed[2], const char *data, size_t size)
{
    uint64_t v[4] = {
        seed[0] ^ UINT64_C(0x736f6d6570736575),
        seed[1] ^ UINT64_C(0x646f72616e646f6d),
        seed[0] ^ UINT64_C(0x6c7967656e657261),
        seed[1] ^ UINT64_C(0x7465646279746573),
    };
    size_t at = 0;
    for (; size - at >= 8; at += 8) {
        uint64_t word;
        memcpy(&word, data + at, 8);
        v[3] ^= word;
        sip_round(v);
        v[0] ^= word;
    }
    uint64_t last = (uint64_t)size << 56;
    for (size_t i = 0; at + i < size; i++) {
        last |= (uint64_t)(unsigned char)data[at + i] << (8 * i);
    }
    v[3] ^= last;
    sip_round(v);
    v[0] ^= last;
    v[2] ^= 0xff;
    sip_round(v);
    sip_round(v);
    sip_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

/* --- table ----------------------------------------------------------------------------- */

void
dm_kv_init(dm_kv *kv)
{
    memset(kv, 0, sizeof(*kv));
    if (getrandom(kv->seed, sizeof(kv->seed), GRND_NONBLOCK) !=
        (ssize_t)sizeof(kv->seed)) {
        /* Only in the first moments of a machine's life. */
        kv->seed[0] = (uint64_t)dm_clock_now();
        kv->seed[1] = (uint64_t)(uintptr_t)kv;
    }
}

static void
free_entry(dm_kv_entry *entry)
{
    while (entry->first != NULL) {
        dm_kv_item *item = entry->first;
        entry->first = item->next;
        dm_bytes_free(&item->value);
        dm_free(item);
    }
    dm_bytes_free(&entry->value);
    dm_free(entry);
}

void
dm_kv_fini(dm_kv *kv)
{
    for (size_t i = 0; i < kv->n_buckets; i++) {
        while (kv->buckets[i] != NULL) {
            dm_kv_entry *entry = kv->buckets[i];
            kv->buckets[i] = entry->next;
            free_entry(entry);
        }
    }
    dm_free(kv->buckets);
    memset(kv, 0, sizeof(*kv));
}

dm_kv_entry *
dm_kv_find(const dm_kv *kv, const char *key, size_t key_size)
{
    if (kv->n_buckets == 0) {
        return NULL;
    }
    uint64_t hash = sip_hash(kv->seed, key, key_size);
    dm_kv_entry *entry = kv->buckets[hash & (kv->n_buckets - 1)];
    while (entry != NULL && (entry->hash != hash || entry->key_size != key_size ||
                             memcmp(entry->key, key, key_size) != 0)) {
        entry = entry->next;
    }
    return entry;
}

/* Twice the buckets (or the first ones). Failing is fine as long as there are some:
 * the chains get longer. */
static bool
grow(dm_kv *kv)
{
    size_t n = kv->n_buckets != 0 ? kv->n_buckets * 2 : FIRST_BUCKETS;
    dm_kv_entry **buckets = dm_calloc(n, sizeof(dm_kv_entry *));
    if (buckets == NULL) {
        return kv->n_buckets != 0;
    }
    for (size_t i = 0; i < kv->n_buckets; i++) {
        while (kv->buckets[i] != NULL) {
            dm_kv_entry *entry = kv->buckets[i];
            kv->buckets[i] = entry->next;
            dm_kv_entry **bucket = &buckets[entry->hash & (n - 1)];
            entry->next = *bucket;
            *bucket = entry;
        }
    }
    dm_free(kv->buckets);
    kv->buckets = buckets;
    kv->n_buckets = n;
    return true;
}

dm_kv_entry *
dm_kv_claim(dm_kv *kv, const char *key, size_t key_size)
{
    dm_kv_entry *entry = dm_kv_find(kv, key, key_size);
    if (entry != NULL) {
        return entry;
    }
    if (kv->n_entries >= kv->n_buckets && !grow(kv)) {
        return NULL;
    }
    entry = dm_calloc(1, sizeof(*entry) + key_size + 1);
    if (entry == NULL) {
        return NULL;
    }
    entry->hash = sip_hash(kv->seed, key, key_size);
    entry->key_size = key_size;
    memcpy(entry->key, key, key_size);
    dm_kv_entry **bucket = &kv->buckets[entry->hash & (kv->n_buckets - 1)];
    entry->next = *bucket;
    *bucket = entry;
    kv->n_entries++;
    return entry;
}

void
dm_kv_tidy(dm_kv *kv, dm_kv_entry *entry)
{
    if (entry == NULL || dm_kv_is_there(entry) || entry->watcher != NULL) {
        return;
    }
    dm_kv_entry **link = &kv->buckets[entry->hash & (kv->n_buckets - 1)];
    while (*link != entry) {
        link = &(*link)->next;
    }
    *link = entry->next;
    kv->n_entries--;
    free_entry(entry);
}

bool
dm_kv_is_there(const dm_kv_entry *entry)
{
    return entry != NULL && (entry->has_value || entry->items != 0);
}

/* --- values ------------------------------------------------------------------------------ */

/* Gives the entry `value`, taking it over. */
static void
put(dm_kv *kv, dm_kv_entry *entry, dm_bytes value)
{
    if (!entry->has_value) {
        entry->has_value = true;
        kv->n_values++;
    }
    dm_bytes_free(&entry->value);
    entry->value = value;
}

dm_status
dm_kv_set(dm_kv *kv, const char *key, size_t key_size, const void *data, size_t size,
          dm_kv_entry **entry, dm_error *err)
{
    dm_bytes value;
    DM_TRY(dm_bytes_copy(data, size, &value, err));
    dm_kv_entry *found = dm_kv_claim(kv, key, key_size);
    if (found == NULL) {
        dm_bytes_free(&value);
        return dm_error_set_no_memory(err, "a store's entry");
    }
    put(kv, found, value);
    *entry = found;
    return DM_OK;
}

dm_status
dm_kv_append(dm_kv *kv, const char *key, size_t key_size, const void *data, size_t size,
             dm_kv_entry **entry, dm_error *err)
{
    dm_kv_entry *found = dm_kv_find(kv, key, key_size);
    if (found == NULL || !found->has_value) {
        return dm_kv_set(kv, key, key_size, data, size, entry, err);
    }
    size_t before = found->value.size;
    if (before + size > DM_STORE_VALUE_MAX) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "appending %zu bytes to %zu makes more than the %d allowed",
                            size, before, DM_STORE_VALUE_MAX);
    }
    char *data_now = dm_realloc_array(found->value.data, before + size + 1, 1);
    if (data_now == NULL) {
        return dm_error_set_no_memory(err, "a store's value");
    }
    if (size != 0) {
        memcpy(data_now + before, data, size);
    }
    data_now[before + size] = '\0';
    found->value = (dm_bytes){data_now, before + size};
    *entry = found;
    return DM_OK;
}

/* The whole value as a decimal number. */
static bool
parse_number(const dm_bytes *value, int64_t *number)
{
    if (value->size == 0 || value->size > 20) {
        return false;
    }
    char first = value->data[0];
    if (first != '-' && (first < '0' || first > '9')) {
        return false;
    }
    char *end;
    errno = 0;
    *number = strtoll(value->data, &end, 10);
    return errno == 0 && end == value->data + value->size;
}

dm_status
dm_kv_add(dm_kv *kv, const char *key, size_t key_size, int64_t amount, int64_t *result,
          dm_kv_entry **entry, dm_error *err)
{
    int64_t number = 0;
    dm_kv_entry *found = dm_kv_find(kv, key, key_size);
    if (found != NULL && found->has_value && !parse_number(&found->value, &number)) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "cannot add to '%.32s', which is no whole number",
                            found->value.data);
    }
    int64_t sum;
    if (__builtin_add_overflow(number, amount, &sum)) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "cannot add %" PRId64 " to %" PRId64
                            ": the sum does not fit into 64 bits",
                            amount, number);
    }
    char text[24];
    int size = snprintf(text, sizeof(text), "%" PRId64, sum);
    DM_TRY(dm_kv_set(kv, key, key_size, text, (size_t)size, entry, err));
    *result = sum;
    return DM_OK;
}

dm_status
dm_kv_compare_set(dm_kv *kv, const char *key, size_t key_size, const dm_bytes *expected,
                  const dm_bytes *desired, dm_bytes *now, dm_kv_entry **entry,
                  dm_error *err)
{
    dm_kv_entry *found = dm_kv_find(kv, key, key_size);
    bool has_value = found != NULL && found->has_value;
    if (!has_value && expected->size != 0) {
        *now = *expected;
        *entry = NULL;
        return DM_OK;
    }
    if (has_value && (found->value.size != expected->size ||
                      (expected->size != 0 && memcmp(found->value.data, expected->data,
                                                     expected->size) != 0))) {
        *now = found->value;
        *entry = NULL;
        return DM_OK;
    }
    DM_TRY(dm_kv_set(kv, key, key_size, desired->data, desired->size, entry, err));
    *now = (*entry)->value;
    return DM_OK;
}

bool
dm_kv_delete(dm_kv *kv, const char *key, size_t key_size)
{
    dm_kv_entry *entry = dm_kv_find(kv, key, key_size);
    if (entry == NULL || !entry->has_value) {
        return false;
    }
    dm_bytes_free(&entry->value);
    entry->has_value = false;
    kv->n_values--;
    dm_kv_tidy(kv, entry);
    return true;
}

/* --- queues -------------------------------------------------------------------------------- */

dm_status
dm_kv_push(dm_kv *kv, const char *key, size_t key_size, const void *data, size_t size,
           dm_kv_entry **entry, dm_error *err)
{
    dm_kv_item *item = dm_calloc(1, sizeof(*item));
    if (item == NULL) {
        return dm_error_set_no_memory(err, "a store's queue item");
    }
    dm_status status;
    DM_TRY_GOTO(status, dm_bytes_copy(data, size, &item->value, err), free_item);
    dm_kv_entry *found = dm_kv_claim(kv, key, key_size);
    if (found == NULL) {
        status = dm_error_set_no_memory(err, "a store's entry");
        goto free_value;
    }
    if (found->last != NULL) {
        found->last->next = item;
    }
    else {
        found->first = item;
    }
    found->last = item;
    found->items++;
    *entry = found;
    return DM_OK;

free_value:
    dm_bytes_free(&item->value);
free_item:
    dm_free(item);
    return status;
}

bool
dm_kv_pop(dm_kv *kv, const char *key, size_t key_size, dm_bytes *value)
{
    dm_kv_entry *entry = dm_kv_find(kv, key, key_size);
    if (entry == NULL || entry->items == 0) {
        return false;
    }
    dm_kv_item *item = entry->first;
    entry->first = item->next;
    if (entry->first == NULL) {
        entry->last = NULL;
    }
    entry->items--;
    *value = item->value;
    dm_free(item);
    dm_kv_tidy(kv, entry);
    return true;
}

/* --- lists ----------------------------------------------------------------------------------- */

void
dm_kv_each(const dm_kv *kv, bool (*visit)(void *arg, const dm_kv_entry *entry),
           void *arg)
{
    for (size_t i = 0; i < kv->n_buckets; i++) {
        for (dm_kv_entry *entry = kv->buckets[i]; entry != NULL; entry = entry->next) {
            if (entry->has_value && !visit(arg, entry)) {
                return;
            }
        }
    }
}

typedef struct listing {
    dm_bytes *keys;
    size_t n;
    size_t skip;
    dm_status status;
    dm_error *err;
} listing;

static bool
list_one(void *arg, const dm_kv_entry *entry)
{
    listing *list = arg;
    size_t skip = entry->key_size < list->skip ? entry->key_size : list->skip;
    list->status = dm_bytes_copy(entry->key + skip, entry->key_size - skip,
                                 &list->keys[list->n], list->err);
    if (list->status != DM_OK) {
        return false;
    }
    list->n++;
    return true;
}

dm_status
dm_kv_list(const dm_kv *kv, size_t skip, dm_bytes **keys, size_t *n, dm_error *err)
{
    listing list = {.skip = skip, .status = DM_OK, .err = err};
    list.keys = dm_calloc(kv->n_values, sizeof(dm_bytes));
    if (list.keys == NULL) {
        return dm_error_set_no_memory(err, "a list of keys");
    }
    dm_kv_each(kv, list_one, &list);
    if (list.status != DM_OK) {
        while (list.n-- > 0) {
            dm_bytes_free(&list.keys[list.n]);
        }
        dm_free(list.keys);
        return list.status;
    }
    assert(list.n == kv->n_values);
    *keys = list.keys;
    *n = list.n;
    return DM_OK;
}
