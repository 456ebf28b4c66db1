/* The file of a file store: a log of changes, and the table that they make.
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
#ifndef DM_FILE_LOG_H
#define DM_FILE_LOG_H

#include <pthread.h>
#include <sys/types.h>

#include "store/dm_kv.h"
#include "store/dm_store.h"
#include "store/dm_wire.h"

enum dm_record_kind {
    DM_RECORD_SET = 1,
    DM_RECORD_APPEND = 2,
    DM_RECORD_DELETE = 3,
    DM_RECORD_PUSH = 4,
    DM_RECORD_POP = 5,
    DM_RECORD_CLOSED = 6, /* a store on this file is done */
};

typedef struct dm_file_store {
    dm_store base;
    char *path;
    int32_t world_size; /* 0: the file stays */
    int fd;
    pthread_mutex_t mutex; /* guards all below */
    bool closed;
    bool must_reread; /* the table holds what could not be written */
    off_t position;   /* records before it are in the table */
    int64_t n_closed; /* RECORD_CLOSED seen */
    dm_kv kv;
} dm_file_store;

/* Takes the mutex and the file's lock and brings the table up to date; holds neither
 * on failure. DM_ERR_CLOSED, DM_ERR_TIMEOUT (the lock), DM_ERR_CONNECTION (the file has
 * been removed), DM_ERR_PROTOCOL (damaged, or no store), DM_ERR_SYSTEM. */
dm_status
dm_file_enter(dm_file_store *self, bool exclusive, const dm_wait *wait, dm_error *err);

void
dm_file_unlock(dm_file_store *self);

/* Unlocks and returns `status`. */
dm_status
dm_file_leave(dm_file_store *self, dm_status status);

/* Begins what will be one write, in the empty buffer `out`. Entered exclusively. */
void
dm_file_begin_records(const dm_file_store *self, dm_wire_buffer *out);

void
dm_file_put_record(dm_wire_buffer *out, enum dm_record_kind kind, const char *key,
                   const void *value, size_t size);

/* Appends the records of a change that the table already has; frees them. On failure
 * the table is made anew from the file by the next call. */
dm_status
dm_file_end_records(dm_file_store *self, dm_wire_buffer *out, dm_error *err);

/* All three with one record. */
dm_status
dm_file_write_record(dm_file_store *self, enum dm_record_kind kind, const char *key,
                     const void *value, size_t size, dm_error *err);

/* For closing, with the mutex held: the file's lock alone (F_WRLCK or F_UNLCK) without
 * waiting, 0 or an errno; and what enter does when it has locked. */
int
dm_file_set_lock(const dm_file_store *self, short type);

dm_status
dm_file_catch_up(dm_file_store *self, off_t *size, dm_error *err);

/* Polls the wait, sleeps `*pause_us` at most and doubles it (up to some milliseconds). */
enum { DM_FILE_FIRST_PAUSE_US = 50 };

dm_status
dm_file_sleep(int64_t *pause_us, const dm_wait *wait, dm_error *err);

#endif
