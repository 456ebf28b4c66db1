/* The file of a file store: see dm_file_log.h. */
#include "store/dm_file_log.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/dm_alloc.h"

static const char magic[8] = {'d', 'm', 's', 't', 'o', 'r', 'e', '1'};

enum {
    RECORD_HEAD = 9, /* size, kind, key size */
    RECORD_MAX = 5 + DM_STORE_KEY_MAX + DM_STORE_VALUE_MAX,
    READ_SIZE = 64 * 1024, /* at least so much at once */
    LAST_PAUSE_US = 10000,
};

/* --- locks ------------------------------------------------------------------------------ */

int
dm_file_set_lock(const dm_file_store *self, short type)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET};
    return fcntl(self->fd, F_OFD_SETLK, &lock) == 0 ? 0 : errno;
}

dm_status
dm_file_sleep(int64_t *pause_us, const dm_wait *wait, dm_error *err)
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
system_error(const dm_file_store *self, const char *what, dm_error *err)
{
    return dm_error_set_errno(err, errno, "file store '%.200s': %s", self->path, what);
}

/* Both locks, the mutex first. */
static dm_status
dm_file_lock(dm_file_store *self, bool exclusive, const dm_wait *wait, dm_error *err)
{
    int64_t pause_us = DM_FILE_FIRST_PAUSE_US;
    for (;;) {
        pthread_mutex_lock(&self->mutex);
        if (self->closed) {
            pthread_mutex_unlock(&self->mutex);
            return dm_error_set(err, DM_ERR_CLOSED, "file store '%.200s' is closed",
                                self->path);
        }
        int error = dm_file_set_lock(self, exclusive ? F_WRLCK : F_RDLCK);
        if (error == 0) {
            return DM_OK;
        }
        pthread_mutex_unlock(&self->mutex);
        if (error != EAGAIN && error != EACCES && error != EINTR) {
            return dm_error_set_errno(err, error, "file store '%.200s': locking",
                                      self->path);
        }
        dm_status status = dm_file_sleep(&pause_us, wait, err);
        if (status == DM_ERR_TIMEOUT) {
            return dm_error_set(err, status,
                                "file store '%.200s': timed out waiting for its lock",
                                self->path);
        }
        DM_TRY(status);
    }
}

void
dm_file_unlock(dm_file_store *self)
{
    (void)dm_file_set_lock(self, F_UNLCK);
    pthread_mutex_unlock(&self->mutex);
}

/* --- reading ----------------------------------------------------------------------------- */

/* Puts one record into the table. */
static dm_status
apply(dm_file_store *self, uint8_t kind, const char *key, size_t key_size,
      const char *value, size_t size, dm_error *err)
{
    dm_kv_entry *entry;
    dm_bytes item;
    switch ((enum dm_record_kind)kind) {
    case DM_RECORD_SET:
        return dm_kv_set(&self->kv, key, key_size, value, size, &entry, err);
    case DM_RECORD_APPEND:
        return dm_kv_append(&self->kv, key, key_size, value, size, &entry, err);
    case DM_RECORD_DELETE:
        dm_kv_delete(&self->kv, key, key_size);
        return DM_OK;
    case DM_RECORD_PUSH:
        return dm_kv_push(&self->kv, key, key_size, value, size, &entry, err);
    case DM_RECORD_POP:
        if (dm_kv_pop(&self->kv, key, key_size, &item)) {
            dm_bytes_free(&item);
        }
        return DM_OK;
    case DM_RECORD_CLOSED:
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
apply_all(dm_file_store *self, const char *data, size_t size, size_t *used,
          size_t *want, dm_error *err)
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
check_magic(dm_file_store *self, off_t size, dm_error *err)
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
forget_table(dm_file_store *self)
{
    dm_kv_fini(&self->kv);
    dm_kv_init(&self->kv);
    self->position = 0;
    self->n_closed = 0;
    self->must_reread = false;
}

static dm_status
read_records(dm_file_store *self, off_t size, dm_error *err)
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

dm_status
dm_file_catch_up(dm_file_store *self, off_t *size, dm_error *err)
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
    if (self->must_reread) {
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

dm_status
dm_file_enter(dm_file_store *self, bool exclusive, const dm_wait *wait, dm_error *err)
{
    DM_TRY(dm_file_lock(self, exclusive, wait, err));
    off_t size = 0;
    dm_status status = dm_file_catch_up(self, &size, err);
    if (status == DM_OK && exclusive && self->position < size &&
        ftruncate(self->fd, self->position) != 0) {
        status = system_error(self, "cutting off an unfinished record", err);
    }
    if (status != DM_OK) {
        dm_file_unlock(self);
    }
    return status;
}

dm_status
dm_file_leave(dm_file_store *self, dm_status status)
{
    dm_file_unlock(self);
    return status;
}

/* --- writing ------------------------------------------------------------------------------- */

void
dm_file_begin_records(const dm_file_store *self, dm_wire_buffer *out)
{
    *out = (dm_wire_buffer){0};
    if (self->position == 0) {
        dm_wire_put_raw(out, magic, sizeof(magic));
    }
}

void
dm_file_put_record(dm_wire_buffer *out, enum dm_record_kind kind, const char *key,
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
write_at(const dm_file_store *self, const char *data, size_t size, off_t position,
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

dm_status
dm_file_end_records(dm_file_store *self, dm_wire_buffer *out, dm_error *err)
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
        self->must_reread = true;
    }
    dm_wire_buffer_fini(out);
    return status;
}

dm_status
dm_file_write_record(dm_file_store *self, enum dm_record_kind kind, const char *key,
                     const void *value, size_t size, dm_error *err)
{
    dm_wire_buffer out;
    dm_file_begin_records(self, &out);
    dm_file_put_record(&out, kind, key, value, size);
    return dm_file_end_records(self, &out, err);
}
