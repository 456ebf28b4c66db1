/* The file store: calls on the table that a file's log makes (dm_file_log.h). */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/dm_alloc.h"
#include "store/dm_file_log.h"

enum { LOOK_ANYWAY_MS = 100 }; /* a network file system may tell of growth late */

static dm_file_store *
file_of(dm_store *store)
{
    return (dm_file_store *)store;
}

/* --- calls: changes ----------------------------------------------------------------------- */

static dm_status
name_key(dm_status status, const char *key, dm_error *err)
{
    if (status == DM_ERR_VALUE) {
        dm_error_context(err, "key '%.200s'", key);
    }
    return status;
}

static dm_status
file_multi_set(dm_store *store, const char *const *keys, const dm_bytes *values,
               size_t n, const dm_wait *wait, dm_error *err)
{
    dm_file_store *self = file_of(store);
    DM_TRY(dm_file_enter(self, true, wait, err));
    dm_wire_buffer out;
    dm_file_begin_records(self, &out);
    for (size_t i = 0; i < n; i++) {
        dm_kv_entry *entry;
        dm_status status = dm_kv_set(&self->kv, keys[i], strlen(keys[i]),
                                     values[i].data, values[i].size, &entry, err);
        if (status != DM_OK) {
            self->must_reread = true;
            dm_wire_buffer_fini(&out);
            return dm_file_leave(self, status);
        }
        dm_file_put_record(&out, DM_RECORD_SET, keys[i], values[i].data,
                           values[i].size);
    }
    return dm_file_leave(self, dm_file_end_records(self, &out, err));
}

static dm_status
file_set(dm_store *store, const char *key, const void *data, size_t size,
         const dm_wait *wait, dm_error *err)
{
    const dm_bytes value = {(char *)data, size};
    return file_multi_set(store, &key, &value, 1, wait, err);
}

static dm_status
file_add(dm_store *store, const char *key, int64_t amount, const dm_wait *wait,
         int64_t *result, dm_error *err)
{
    dm_file_store *self = file_of(store);
    DM_TRY(dm_file_enter(self, true, wait, err));
    dm_kv_entry *entry;
    int64_t sum;
    dm_status status =
        dm_kv_add(&self->kv, key, strlen(key), amount, &sum, &entry, err);
    if (status == DM_OK) {
        status = dm_file_write_record(self, DM_RECORD_SET, key, entry->value.data,
                                      entry->value.size, err);
    }
    if (status == DM_OK) {
        *result = sum;
    }
    return dm_file_leave(self, name_key(status, key, err));
}

static dm_status
file_append(dm_store *store, const char *key, const void *data, size_t size,
            const dm_wait *wait, dm_error *err)
{
    dm_file_store *self = file_of(store);
    DM_TRY(dm_file_enter(self, true, wait, err));
    dm_kv_entry *entry;
    dm_status status =
        dm_kv_append(&self->kv, key, strlen(key), data, size, &entry, err);
    if (status == DM_OK) {
        status = dm_file_write_record(self, DM_RECORD_APPEND, key, data, size, err);
    }
    return dm_file_leave(self, name_key(status, key, err));
}

static dm_status
file_compare_set(dm_store *store, const char *key, const void *expected,
                 size_t expected_size, const void *desired, size_t desired_size,
                 const dm_wait *wait, dm_bytes *value, dm_error *err)
{
    dm_file_store *self = file_of(store);
    DM_TRY(dm_file_enter(self, true, wait, err));
    const dm_bytes before = {(char *)expected, expected_size};
    const dm_bytes after = {(char *)desired, desired_size};
    dm_bytes now;
    dm_kv_entry *entry;
    dm_bytes answer = {NULL, 0};
    dm_status status = dm_kv_compare_set(&self->kv, key, strlen(key), &before, &after,
                                         &now, &entry, err);
    if (status == DM_OK) {
        status = dm_bytes_copy(now.data, now.size, &answer, err);
        if (status != DM_OK && entry != NULL) {
            self->must_reread = true;
        }
    }
    if (status == DM_OK && entry != NULL) {
        status =
            dm_file_write_record(self, DM_RECORD_SET, key, desired, desired_size, err);
    }
    if (status == DM_OK) {
        *value = answer;
    }
    else {
        dm_bytes_free(&answer);
    }
    return dm_file_leave(self, status);
}

static dm_status
file_delete_key(dm_store *store, const char *key, const dm_wait *wait, bool *existed,
                dm_error *err)
{
    dm_file_store *self = file_of(store);
    DM_TRY(dm_file_enter(self, true, wait, err));
    bool there = dm_kv_delete(&self->kv, key, strlen(key));
    dm_status status =
        there ? dm_file_write_record(self, DM_RECORD_DELETE, key, NULL, 0, err) : DM_OK;
    if (status == DM_OK) {
        *existed = there;
    }
    return dm_file_leave(self, status);
}

static dm_status
file_queue_push(dm_store *store, const char *key, const void *data, size_t size,
                const dm_wait *wait, dm_error *err)
{
    dm_file_store *self = file_of(store);
    DM_TRY(dm_file_enter(self, true, wait, err));
    dm_kv_entry *entry;
    dm_status status = dm_kv_push(&self->kv, key, strlen(key), data, size, &entry, err);
    if (status == DM_OK) {
        status = dm_file_write_record(self, DM_RECORD_PUSH, key, data, size, err);
    }
    return dm_file_leave(self, status);
}

/* --- calls: looking ------------------------------------------------------------------------- */

static size_t
count_there(const dm_file_store *self, const char *const *keys, size_t n, bool *there)
{
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        bool found = dm_kv_is_there(dm_kv_find(&self->kv, keys[i], strlen(keys[i])));
        count += found;
        if (there != NULL) {
            there[i] = found;
        }
    }
    return count;
}

static dm_status
file_check(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
           bool *ready, dm_error *err)
{
    dm_file_store *self = file_of(store);
    DM_TRY(dm_file_enter(self, false, wait, err));
    *ready = count_there(self, keys, n, NULL) == n;
    return dm_file_leave(self, DM_OK);
}

static dm_status
file_num_keys(dm_store *store, const dm_wait *wait, int64_t *n, dm_error *err)
{
    dm_file_store *self = file_of(store);
    DM_TRY(dm_file_enter(self, false, wait, err));
    *n = (int64_t)self->kv.n_values;
    return dm_file_leave(self, DM_OK);
}

static dm_status
file_list_keys(dm_store *store, const dm_wait *wait, dm_bytes **keys, size_t *n,
               dm_error *err)
{
    dm_file_store *self = file_of(store);
    DM_TRY(dm_file_enter(self, false, wait, err));
    return dm_file_leave(self, dm_kv_list(&self->kv, 0, keys, n, err));
}

static dm_status
file_queue_len(dm_store *store, const char *key, const dm_wait *wait, int64_t *n,
               dm_error *err)
{
    dm_file_store *self = file_of(store);
    DM_TRY(dm_file_enter(self, false, wait, err));
    const dm_kv_entry *entry = dm_kv_find(&self->kv, key, strlen(key));
    *n = entry != NULL ? (int64_t)entry->items : 0;
    return dm_file_leave(self, DM_OK);
}

/* --- calls: waiting --------------------------------------------------------------------------- */

/* Sleeps until the file seems to have more than the records before `seen`, or for a
 * while. */
static dm_status
sleep_until_it_grows(dm_file_store *self, off_t seen, const dm_wait *wait,
                     dm_error *err)
{
    int64_t look_anyway = dm_clock_deadline(LOOK_ANYWAY_MS * DM_NS_PER_MS);
    int64_t pause_us = DM_FILE_FIRST_PAUSE_US;
    for (;;) {
        DM_TRY(dm_file_sleep(&pause_us, wait, err));
        if (dm_clock_left(look_anyway) == 0) {
            return DM_OK;
        }
        pthread_mutex_lock(&self->mutex);
        struct stat info;
        bool grown = self->closed || fstat(self->fd, &info) != 0 ||
                     info.st_nlink == 0 || info.st_size > seen;
        pthread_mutex_unlock(&self->mutex);
        if (grown) {
            return DM_OK;
        }
    }
}

static dm_status
timed_out(dm_file_store *self, const char *const *keys, size_t n, dm_error *err)
{
    char text[512];
    bool *there = dm_calloc(n, sizeof(bool));
    pthread_mutex_lock(&self->mutex);
    if (there != NULL) {
        count_there(self, keys, n, there);
    }
    pthread_mutex_unlock(&self->mutex);
    dm_store_list_missing(keys, there, n, text, sizeof(text));
    dm_free(there);
    return dm_error_set(err, DM_ERR_TIMEOUT,
                        "file store '%.200s': timed out waiting for %s", self->path,
                        text);
}

/* Waits for all keys; still locked (for reading) when that has succeeded. */
static dm_status
enter_when_there(dm_file_store *self, const char *const *keys, size_t n,
                 const char *const *unless, size_t m, const dm_wait *wait,
                 dm_error *err)
{
    for (;;) {
        DM_TRY(dm_file_enter(self, false, wait, err));
        if (count_there(self, keys, n, NULL) == n) {
            return DM_OK;
        }
        for (size_t i = 0; i < m; i++) {
            const dm_kv_entry *entry =
                dm_kv_find(&self->kv, unless[i], strlen(unless[i]));
            if (entry != NULL && entry->has_value) {
                dm_error_set(err, DM_ERR_PEER, "%s", entry->value.data);
                return dm_file_leave(self, DM_ERR_PEER);
            }
        }
        off_t seen = self->position;
        dm_file_unlock(self);
        dm_status status = sleep_until_it_grows(self, seen, wait, err);
        if (status == DM_ERR_TIMEOUT) {
            return timed_out(self, keys, n, err);
        }
        DM_TRY(status);
    }
}

static dm_status
file_wait_unless(dm_store *store, const char *const *keys, size_t n,
                 const char *const *unless, size_t m, const dm_wait *wait,
                 dm_error *err)
{
    dm_file_store *self = file_of(store);
    DM_TRY(enter_when_there(self, keys, n, unless, m, wait, err));
    return dm_file_leave(self, DM_OK);
}

static dm_status
file_wait(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
          dm_error *err)
{
    return file_wait_unless(store, keys, n, NULL, 0, wait, err);
}

static dm_status
file_multi_get(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
               dm_bytes *values, dm_error *err)
{
    dm_file_store *self = file_of(store);
    DM_TRY(enter_when_there(self, keys, n, NULL, 0, wait, err));
    for (size_t i = 0; i < n; i++) {
        const dm_kv_entry *entry = dm_kv_find(&self->kv, keys[i], strlen(keys[i]));
        dm_status status =
            dm_bytes_copy(entry->value.data, entry->value.size, &values[i], err);
        if (status != DM_OK) {
            while (i > 0) {
                dm_bytes_free(&values[--i]);
            }
            return dm_file_leave(self, status);
        }
    }
    return dm_file_leave(self, DM_OK);
}

static dm_status
file_get(dm_store *store, const char *key, const dm_wait *wait, dm_bytes *value,
         dm_error *err)
{
    return file_multi_get(store, &key, 1, wait, value, err);
}

static dm_status
file_queue_pop(dm_store *store, const char *key, bool block, const dm_wait *wait,
               dm_bytes *value, dm_error *err)
{
    dm_file_store *self = file_of(store);
    for (;;) {
        DM_TRY(dm_file_enter(self, true, wait, err));
        dm_bytes item;
        if (dm_kv_pop(&self->kv, key, strlen(key), &item)) {
            dm_status status =
                dm_file_write_record(self, DM_RECORD_POP, key, NULL, 0, err);
            if (status == DM_OK) {
                *value = item;
            }
            else {
                dm_bytes_free(&item);
            }
            return dm_file_leave(self, status);
        }
        off_t seen = self->position;
        dm_file_unlock(self);
        if (!block) {
            return dm_error_set(err, DM_ERR_AGAIN, "queue '%.200s' is empty", key);
        }
        dm_status status = sleep_until_it_grows(self, seen, wait, err);
        if (status == DM_ERR_TIMEOUT) {
            return dm_error_set(err, status,
                                "file store '%.200s': timed out waiting for an item in "
                                "queue '%.200s'",
                                self->path, key);
        }
        DM_TRY(status);
    }
}

/* --- life ---------------------------------------------------------------------------------------- */

/* Notes that one more store is done with the file; the last one removes it. Does not
 * wait: where the lock is taken the file stays. */
static void
count_closed(dm_file_store *self)
{
    if (self->world_size <= 0 || dm_file_set_lock(self, F_WRLCK) != 0) {
        return;
    }
    off_t size;
    if (dm_file_catch_up(self, &size, NULL) == DM_OK &&
        (self->position == size || ftruncate(self->fd, self->position) == 0) &&
        dm_file_write_record(self, DM_RECORD_CLOSED, "", NULL, 0, NULL) == DM_OK &&
        ++self->n_closed >= self->world_size) {
        (void)unlink(self->path);
    }
    (void)dm_file_set_lock(self, F_UNLCK);
}

static void
file_close(dm_store *store)
{
    dm_file_store *self = file_of(store);
    pthread_mutex_lock(&self->mutex);
    if (!self->closed) {
        self->closed = true;
        count_closed(self);
    }
    pthread_mutex_unlock(&self->mutex);
}

static void
file_free(dm_store *store)
{
    dm_file_store *self = file_of(store);
    if (store->pid == getpid()) {
        file_close(store);
        pthread_mutex_destroy(&self->mutex);
        dm_kv_fini(&self->kv);
    }
    close(self->fd);
    dm_free(self->path);
    dm_free(self);
}

static const dm_store_ops file_ops = {
    .kind = "file",
    .set = file_set,
    .get = file_get,
    .add = file_add,
    .compare_set = file_compare_set,
    .check = file_check,
    .wait = file_wait,
    .delete_key = file_delete_key,
    .append = file_append,
    .multi_get = file_multi_get,
    .multi_set = file_multi_set,
    .num_keys = file_num_keys,
    .list_keys = file_list_keys,
    .queue_push = file_queue_push,
    .queue_pop = file_queue_pop,
    .queue_len = file_queue_len,
    .wait_unless = file_wait_unless,
    .close = file_close,
    .free = file_free,
};

dm_status
dm_store_file_new(const char *path, int32_t world_size, dm_store **store, dm_error *err)
{
    dm_file_store *self = dm_calloc(1, sizeof(*self));
    char *copy = dm_strdup(path);
    if (self == NULL || copy == NULL) {
        dm_free(self);
        dm_free(copy);
        return dm_error_set_no_memory(err, "a file store");
    }
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) {
        int error = errno;
        dm_free(self);
        dm_free(copy);
        return dm_error_set_errno(err, error, "file store '%.200s'", path);
    }
    dm_store_init(&self->base, &file_ops);
    self->path = copy;
    self->fd = fd;
    self->world_size = world_size;
    dm_kv_init(&self->kv);
    pthread_mutex_init(&self->mutex, NULL);
    *store = &self->base;
    return DM_OK;
}

const char *
dm_store_file_path(const dm_store *store)
{
    return store->ops == &file_ops ? ((const dm_file_store *)store)->path : NULL;
}
