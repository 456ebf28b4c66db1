/* The file store: a log of changes in a file, and the table that they make.
 *
 * File: 8 bytes of magic, then records: u32 size of what follows, u8 kind, u32 key
 * size, key, value; little-endian. A record is appended by one write under an exclusive
 * lock of the file (an open-file-description lock: it excludes other processes and other
 * stores of this one alike, and ends with its process). A record that a dying writer
 * has left unfinished is cut off by the next one.
 *
 * Each store keeps the table of the records up to `position` and reads on from there
 * under a shared lock. The mutex guards the store; neither it nor the file's lock is
 * held while a call sleeps or polls its wait.
 */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/dm_alloc.h"
#include "store/dm_kv.h"
#include "store/dm_store.h"
#include "store/dm_wire.h"

static const char magic[8] = {'d', 'm', 's', 't', 'o', 'r', 'e', '1'};

enum {
    RECORD_HEAD = 9, /* size, kind, key size */
    RECORD_MAX = 5 + DM_STORE_KEY_MAX + DM_STORE_VALUE_MAX,
    READ_SIZE = 64 * 1024, /* at least so much at once */
    FIRST_PAUSE_US = 50,
    LAST_PAUSE_US = 10000,
    LOOK_ANYWAY_MS = 100, /* a network file system may tell of growth late */
};

enum record_kind {
    RECORD_SET = 1,
    RECORD_APPEND = 2,
    RECORD_DELETE = 3,
    RECORD_PUSH = 4,
    RECORD_POP = 5,
    RECORD_CLOSED = 6, /* a store on this file is done */
};

typedef struct file_store {
    dm_store base;
    char *path;
    int32_t world_size; /* 0: the file stays */
    int fd;
    pthread_mutex_t mutex; /* guards all below */
    bool closed;
    bool waits_to_reset; /* the table holds what could not be written */
    off_t position;      /* records before it are in the table */
    int64_t n_closed;    /* RECORD_CLOSED seen */
    dm_kv kv;
} file_store;

static file_store *
file_of(dm_store *store)
{
    return (file_store *)store;
}

/* --- locks ------------------------------------------------------------------------------ */

static int
set_lock(const file_store *self, short type)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET};
    return fcntl(self->fd, F_OFD_SETLK, &lock) == 0 ? 0 : errno;
}

/* Sleeps `*pause_us` at most and doubles it; polls the wait first. */
static dm_status
sleep_some(int64_t *pause_us, const dm_wait *wait, dm_error *err)
{
    DM_TRY(dm_wait_poll(wait, err));
    int64_t ns = *pause_us * 1000;
    int64_t left = dm_clock_left(wait->deadline);
    ns = ns < left ? ns : left;
    const struct timespec ts = {ns / DM_NS_PER_S, ns % DM_NS_PER_S};
    nanosleep(&ts, NULL);
    *pause_us = *pause_us * 2 < LAST_PAUSE_US ? *pause_us * 2 : LAST_PAUSE_US;
    return DM_OK;
}

static dm_status
system_error(const file_store *self, const char *what, dm_error *err)
{
    return dm_error_set_errno(err, errno, "file store '%.200s': %s", self->path, what);
}

/* Both locks, the mutex first. */
static dm_status
lock(file_store *self, bool exclusive, const dm_wait *wait, dm_error *err)
{
    int64_t pause_us = FIRST_PAUSE_US;
    for (;;) {
        pthread_mutex_lock(&self->mutex);
        if (self->closed) {
            pthread_mutex_unlock(&self->mutex);
            return dm_error_set(err, DM_ERR_CLOSED, "file store '%.200s' is closed",
                                self->path);
        }
        int error = set_lock(self, exclusive ? F_WRLCK : F_RDLCK);
        if (error == 0) {
            return DM_OK;
        }
        pthread_mutex_unlock(&self->mutex);
        if (error != EAGAIN && error != EACCES && error != EINTR) {
            return dm_error_set_errno(err, error, "file store '%.200s': locking",
                                      self->path);
        }
        dm_status status = sleep_some(&pause_us, wait, err);
        if (status == DM_ERR_TIMEOUT) {
            return dm_error_set(err, status,
                                "file store '%.200s': timed out waiting for its lock",
                                self->path);
        }
        DM_TRY(status);
    }
}

static void
unlock(file_store *self)
{
    (void)set_lock(self, F_UNLCK);
    pthread_mutex_unlock(&self->mutex);
}

/* --- reading ----------------------------------------------------------------------------- */

/* Puts one record into the table. */
static dm_status
apply(file_store *self, uint8_t kind, const char *key, size_t key_size,
      const char *value, size_t size, dm_error *err)
{
    dm_kv_entry *entry;
    dm_bytes item;
    switch ((enum record_kind)kind) {
    case RECORD_SET:
        return dm_kv_set(&self->kv, key, key_size, value, size, &entry, err);
    case RECORD_APPEND:
        return dm_kv_append(&self->kv, key, key_size, value, size, &entry, err);
    case RECORD_DELETE:
        dm_kv_delete(&self->kv, key, key_size);
        return DM_OK;
    case RECORD_PUSH:
        return dm_kv_push(&self->kv, key, key_size, value, size, &entry, err);
    case RECORD_POP:
        if (dm_kv_pop(&self->kv, key, key_size, &item)) {
            dm_bytes_free(&item);
        }
        return DM_OK;
    case RECORD_CLOSED:
        self->n_closed++;
        return DM_OK;
    }
    return dm_error_set(err, DM_ERR_PROTOCOL,
                        "file store '%.200s' is damaged: a record of kind %u at %lld",
                        self->path, kind, (long long)self->position);
}

/* Applies the records in `data`; `*used` bytes are done with. `*want` is how many the
 * record behind them needs at least. */
static dm_status
apply_all(file_store *self, const char *data, size_t size, size_t *used, size_t *want,
          dm_error *err)
{
    *used = 0;
    for (;;) {
        const char *record = data + *used;
        size_t left = size - *used;
        *want = RECORD_HEAD;
        if (left < RECORD_HEAD) {
            return DM_OK;
        }
        size_t body = dm_wire_load_u32(record);
        size_t key_size = dm_wire_load_u32(record + 5);
        if (body < RECORD_HEAD - 4 || body > RECORD_MAX ||
            key_size > body - (RECORD_HEAD - 4)) {
            return dm_error_set(err, DM_ERR_PROTOCOL,
                                "file store '%.200s' is damaged at %lld", self->path,
                                (long long)self->position);
        }
        *want = 4 + body;
        if (left < *want) {
            return DM_OK;
        }
        const char *key = record + RECORD_HEAD;
        DM_TRY(apply(self, (uint8_t)record[4], key, key_size, key + key_size,
                     4 + body - RECORD_HEAD - key_size, err));
        *used += *want;
        self->position += (off_t)*want;
    }
}

static dm_status
check_magic(file_store *self, off_t size, dm_error *err)
{
    char start[sizeof(magic)];
    ssize_t n = pread(self->fd, start, sizeof(start), 0);
    if (n < 0) {
        return system_error(self, "reading", err);
    }
    if ((size_t)n < sizeof(magic) && memcmp(start, magic, (size_t)n) == 0) {
        return DM_OK; /* nobody has written yet, or died at it */
    }
    if (memcmp(start, magic, sizeof(magic)) != 0) {
        return dm_error_set(err, DM_ERR_PROTOCOL,
                            "file '%.200s' (%lld bytes) is no store of devicemesh",
                            self->path, (long long)size);
    }
    self->position = sizeof(magic);
    return DM_OK;
}

static void
forget_table(file_store *self)
{
    dm_kv_fini(&self->kv);
    dm_kv_init(&self->kv);
    self->position = 0;
    self->n_closed = 0;
    self->waits_to_reset = false;
}

static dm_status
read_records(file_store *self, off_t size, dm_error *err)
{
    dm_wire_buffer buffer = {0};
    size_t want = RECORD_HEAD;
    dm_status status = DM_OK;
    while (status == DM_OK && self->position + (off_t)want <= size) {
        size_t some = want > READ_SIZE ? want : READ_SIZE;
        buffer.size = 0;
        if (!dm_wire_reserve(&buffer, some)) {
            status = dm_error_set_no_memory(err, "a file store's records");
            break;
        }
        ssize_t n = pread(self->fd, buffer.data, some, self->position);
        if (n < 0) {
            status = errno == EINTR ? DM_OK : system_error(self, "reading", err);
            continue;
        }
        size_t used;
        status = apply_all(self, buffer.data, (size_t)n, &used, &want, err);
        if (n == 0) {
            break; /* cut off by somebody who does not lock */
        }
    }
    dm_wire_buffer_fini(&buffer);
    return status;
}

/* Brings the table up to the file's end; `*size` is that end. */
static dm_status
catch_up(file_store *self, off_t *size, dm_error *err)
{
    struct stat info;
    if (fstat(self->fd, &info) != 0) {
        return system_error(self, "fstat", err);
    }
    if (info.st_nlink == 0) {
        return dm_error_set(err, DM_ERR_CONNECTION,
                            "file store '%.200s': the file has been removed",
                            self->path);
    }
    *size = info.st_size;
    if (self->waits_to_reset) {
        forget_table(self);
    }
    if (self->position == 0 && info.st_size > 0) {
        DM_TRY(check_magic(self, info.st_size, err));
    }
    if (self->position == 0 || self->position >= info.st_size) {
        return DM_OK;
    }
    return read_records(self, info.st_size, err);
}

/* Locked and up to date; not locked on failure. */
static dm_status
enter(file_store *self, bool exclusive, const dm_wait *wait, dm_error *err)
{
    DM_TRY(lock(self, exclusive, wait, err));
    off_t size = 0;
    dm_status status = catch_up(self, &size, err);
    if (status == DM_OK && exclusive && self->position < size &&
        ftruncate(self->fd, self->position) != 0) {
        status = system_error(self, "cutting off an unfinished record", err);
    }
    if (status != DM_OK) {
        unlock(self);
    }
    return status;
}

static dm_status
leave(file_store *self, dm_status status)
{
    unlock(self);
    return status;
}

/* --- writing ------------------------------------------------------------------------------- */

/* Begins what will be one write. */
static void
begin_records(const file_store *self, dm_wire_buffer *out)
{
    *out = (dm_wire_buffer){0};
    if (self->position == 0) {
        dm_wire_put_raw(out, magic, sizeof(magic));
    }
}

static void
put_record(dm_wire_buffer *out, enum record_kind kind, const char *key,
           const void *value, size_t size)
{
    size_t key_size = strlen(key);
    dm_wire_put_u32(out, (uint32_t)(RECORD_HEAD - 4 + key_size + size));
    dm_wire_put_u8(out, (uint8_t)kind);
    dm_wire_put_u32(out, (uint32_t)key_size);
    dm_wire_put_raw(out, key, key_size);
    dm_wire_put_raw(out, value, size);
}

static dm_status
write_at(const file_store *self, const char *data, size_t size, off_t position,
         dm_error *err)
{
    while (size > 0) {
        ssize_t n = pwrite(self->fd, data, size, position);
        if (n < 0 && errno != EINTR) {
            return system_error(self, "writing", err);
        }
        if (n > 0) {
            data += n;
            position += n;
            size -= (size_t)n;
        }
    }
    return DM_OK;
}

/* Appends the records of a change that the table already has; frees them. On failure
 * the table is made anew from the file by the next call. */
static dm_status
end_records(file_store *self, dm_wire_buffer *out, dm_error *err)
{
    dm_status status = dm_wire_check(out, err);
    if (status == DM_OK) {
        status = write_at(self, out->data, out->size, self->position, err);
        if (status != DM_OK) {
            (void)!ftruncate(self->fd, self->position);
        }
    }
    if (status == DM_OK) {
        self->position += (off_t)out->size;
    }
    else {
        self->waits_to_reset = true;
    }
    dm_wire_buffer_fini(out);
    return status;
}

static dm_status
write_record(file_store *self, enum record_kind kind, const char *key,
             const void *value, size_t size, dm_error *err)
{
    dm_wire_buffer out;
    begin_records(self, &out);
    put_record(&out, kind, key, value, size);
    return end_records(self, &out, err);
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
    file_store *self = file_of(store);
    DM_TRY(enter(self, true, wait, err));
    dm_wire_buffer out;
    begin_records(self, &out);
    for (size_t i = 0; i < n; i++) {
        dm_kv_entry *entry;
        dm_status status = dm_kv_set(&self->kv, keys[i], strlen(keys[i]),
                                     values[i].data, values[i].size, &entry, err);
        if (status != DM_OK) {
            self->waits_to_reset = true;
            dm_wire_buffer_fini(&out);
            return leave(self, status);
        }
        put_record(&out, RECORD_SET, keys[i], values[i].data, values[i].size);
    }
    return leave(self, end_records(self, &out, err));
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
    file_store *self = file_of(store);
    DM_TRY(enter(self, true, wait, err));
    dm_kv_entry *entry;
    int64_t sum;
    dm_status status =
        dm_kv_add(&self->kv, key, strlen(key), amount, &sum, &entry, err);
    if (status == DM_OK) {
        status = write_record(self, RECORD_SET, key, entry->value.data,
                              entry->value.size, err);
    }
    if (status == DM_OK) {
        *result = sum;
    }
    return leave(self, name_key(status, key, err));
}

static dm_status
file_append(dm_store *store, const char *key, const void *data, size_t size,
            const dm_wait *wait, dm_error *err)
{
    file_store *self = file_of(store);
    DM_TRY(enter(self, true, wait, err));
    dm_kv_entry *entry;
    dm_status status =
        dm_kv_append(&self->kv, key, strlen(key), data, size, &entry, err);
    if (status == DM_OK) {
        status = write_record(self, RECORD_APPEND, key, data, size, err);
    }
    return leave(self, name_key(status, key, err));
}

static dm_status
file_compare_set(dm_store *store, const char *key, const void *expected,
                 size_t expected_size, const void *desired, size_t desired_size,
                 const dm_wait *wait, dm_bytes *value, dm_error *err)
{
    file_store *self = file_of(store);
    DM_TRY(enter(self, true, wait, err));
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
            self->waits_to_reset = true;
        }
    }
    if (status == DM_OK && entry != NULL) {
        status = write_record(self, RECORD_SET, key, desired, desired_size, err);
    }
    if (status == DM_OK) {
        *value = answer;
    }
    else {
        dm_bytes_free(&answer);
    }
    return leave(self, status);
}

static dm_status
file_delete_key(dm_store *store, const char *key, const dm_wait *wait, bool *existed,
                dm_error *err)
{
    file_store *self = file_of(store);
    DM_TRY(enter(self, true, wait, err));
    bool there = dm_kv_delete(&self->kv, key, strlen(key));
    dm_status status =
        there ? write_record(self, RECORD_DELETE, key, NULL, 0, err) : DM_OK;
    if (status == DM_OK) {
        *existed = there;
    }
    return leave(self, status);
}

static dm_status
file_queue_push(dm_store *store, const char *key, const void *data, size_t size,
                const dm_wait *wait, dm_error *err)
{
    file_store *self = file_of(store);
    DM_TRY(enter(self, true, wait, err));
    dm_kv_entry *entry;
    dm_status status = dm_kv_push(&self->kv, key, strlen(key), data, size, &entry, err);
    if (status == DM_OK) {
        status = write_record(self, RECORD_PUSH, key, data, size, err);
    }
    return leave(self, status);
}

/* --- calls: looking ------------------------------------------------------------------------- */

static size_t
count_there(const file_store *self, const char *const *keys, size_t n, bool *there)
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
    file_store *self = file_of(store);
    DM_TRY(enter(self, false, wait, err));
    *ready = count_there(self, keys, n, NULL) == n;
    return leave(self, DM_OK);
}

static dm_status
file_num_keys(dm_store *store, const dm_wait *wait, int64_t *n, dm_error *err)
{
    file_store *self = file_of(store);
    DM_TRY(enter(self, false, wait, err));
    *n = (int64_t)self->kv.n_values;
    return leave(self, DM_OK);
}

static dm_status
file_list_keys(dm_store *store, const dm_wait *wait, dm_bytes **keys, size_t *n,
               dm_error *err)
{
    file_store *self = file_of(store);
    DM_TRY(enter(self, false, wait, err));
    return leave(self, dm_kv_list(&self->kv, 0, keys, n, err));
}

static dm_status
file_queue_len(dm_store *store, const char *key, const dm_wait *wait, int64_t *n,
               dm_error *err)
{
    file_store *self = file_of(store);
    DM_TRY(enter(self, false, wait, err));
    const dm_kv_entry *entry = dm_kv_find(&self->kv, key, strlen(key));
    *n = entry != NULL ? (int64_t)entry->items : 0;
    return leave(self, DM_OK);
}

/* --- calls: waiting --------------------------------------------------------------------------- */

/* Sleeps until the file seems to have more than the records before `seen`, or for a
 * while. */
static dm_status
sleep_until_it_grows(file_store *self, off_t seen, const dm_wait *wait, dm_error *err)
{
    int64_t look_anyway = dm_clock_deadline(LOOK_ANYWAY_MS * DM_NS_PER_MS);
    int64_t pause_us = FIRST_PAUSE_US;
    for (;;) {
        DM_TRY(sleep_some(&pause_us, wait, err));
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
timed_out(file_store *self, const char *const *keys, size_t n, dm_error *err)
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
enter_when_there(file_store *self, const char *const *keys, size_t n,
                 const char *const *unless, size_t m, const dm_wait *wait,
                 dm_error *err)
{
    for (;;) {
        DM_TRY(enter(self, false, wait, err));
        if (count_there(self, keys, n, NULL) == n) {
            return DM_OK;
        }
        for (size_t i = 0; i < m; i++) {
            const dm_kv_entry *entry =
                dm_kv_find(&self->kv, unless[i], strlen(unless[i]));
            if (entry != NULL && entry->has_value) {
                dm_error_set(err, DM_ERR_PEER, "%s", entry->value.data);
                return leave(self, DM_ERR_PEER);
            }
        }
        off_t seen = self->position;
        unlock(self);
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
    file_store *self = file_of(store);
    DM_TRY(enter_when_there(self, keys, n, unless, m, wait, err));
    return leave(self, DM_OK);
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
    file_store *self = file_of(store);
    DM_TRY(enter_when_there(self, keys, n, NULL, 0, wait, err));
    for (size_t i = 0; i < n; i++) {
        const dm_kv_entry *entry = dm_kv_find(&self->kv, keys[i], strlen(keys[i]));
        dm_status status =
            dm_bytes_copy(entry->value.data, entry->value.size, &values[i], err);
        if (status != DM_OK) {
            while (i > 0) {
                dm_bytes_free(&values[--i]);
            }
            return leave(self, status);
        }
    }
    return leave(self, DM_OK);
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
    file_store *self = file_of(store);
    for (;;) {
        DM_TRY(enter(self, true, wait, err));
        dm_bytes item;
        if (dm_kv_pop(&self->kv, key, strlen(key), &item)) {
            dm_status status = write_record(self, RECORD_POP, key, NULL, 0, err);
            if (status == DM_OK) {
                *value = item;
            }
            else {
                dm_bytes_free(&item);
            }
            return leave(self, status);
        }
        off_t seen = self->position;
        unlock(self);
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
count_closed(file_store *self)
{
    if (self->world_size <= 0 || set_lock(self, F_WRLCK) != 0) {
        return;
    }
    off_t size;
    if (catch_up(self, &size, NULL) == DM_OK &&
        (self->position == size || ftruncate(self->fd, self->position) == 0) &&
        write_record(self, RECORD_CLOSED, "", NULL, 0, NULL) == DM_OK &&
        ++self->n_closed >= self->world_size) {
        (void)unlink(self->path);
    }
    (void)set_lock(self, F_UNLCK);
}

static void
file_close(dm_store *store)
{
    file_store *self = file_of(store);
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
    file_store *self = file_of(store);
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
    file_store *self = dm_calloc(1, sizeof(*self));
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
    return store->ops == &file_ops ? ((const file_store *)store)->path : NULL;
}
