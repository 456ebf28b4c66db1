/* The calls of a tcp store, among the files that implement it: dm_tcp_client.c is the
 * store, dm_tcp_calls.c has what is answered at once, dm_tcp_waits.c what waits.
 *
 * `ours` calls use what only our server understands, `torch` ones its protocol alone;
 * the others are for both. Contracts as in dm_store.h.
 */
#ifndef DM_TCP_CALLS_H
#define DM_TCP_CALLS_H

#include "store/dm_store.h"
#include "store/dm_tcp_pool.h"

/* Leaves a connection of its own open, whose end executes it. */
typedef struct dm_tcp_will {
    struct dm_tcp_will *next;
    dm_tcp_conn *conn;
    char key[];
} dm_tcp_will;

typedef struct dm_tcp_store {
    dm_store base;
    dm_tcp_pool pool;
    pthread_mutex_t mutex;
    dm_tcp_will *wills; /* guarded by the mutex */
} dm_tcp_store;

static inline dm_tcp_store *
dm_tcp_store_of(dm_store *store)
{
    return (dm_tcp_store *)store;
}

/* Where a call's request is built. */
static inline dm_wire_buffer *
dm_tcp_out(dm_tcp_call *call)
{
    return &call->conn->out;
}

/* --- helpers --------------------------------------------------------------------------- */

/* DM_ERR_PROTOCOL; the connection is broken. */
dm_status
dm_tcp_unexpected(dm_tcp_call *call, uint8_t answer);

/* The rest of an answer of ours that begins with `answer`: DM_OK, DM_ERR_PEER or
 * DM_ERR_VALUE with the server's text. */
dm_status
dm_tcp_check_answer(dm_tcp_call *call, uint8_t answer);

/* How many of the keys (and values, if there are any) go into one request. */
size_t
dm_tcp_chunk(const char *const *keys, const dm_bytes *values, size_t n);

/* --- calls ----------------------------------------------------------------------------- */

dm_status
dm_tcp_set(dm_store *store, const char *key, const void *data, size_t size,
           const dm_wait *wait, dm_error *err);

dm_status
dm_tcp_multi_set(dm_store *store, const char *const *keys, const dm_bytes *values,
                 size_t n, const dm_wait *wait, dm_error *err);

dm_status
dm_tcp_torch_add(dm_store *store, const char *key, int64_t amount, const dm_wait *wait,
                 int64_t *result, dm_error *err);

dm_status
dm_tcp_ours_add(dm_store *store, const char *key, int64_t amount, const dm_wait *wait,
                int64_t *result, dm_error *err);

dm_status
dm_tcp_torch_append(dm_store *store, const char *key, const void *data, size_t size,
                    const dm_wait *wait, dm_error *err);

dm_status
dm_tcp_ours_append(dm_store *store, const char *key, const void *data, size_t size,
                   const dm_wait *wait, dm_error *err);

dm_status
dm_tcp_compare_set(dm_store *store, const char *key, const void *expected,
                   size_t expected_size, const void *desired, size_t desired_size,
                   const dm_wait *wait, dm_bytes *value, dm_error *err);

dm_status
dm_tcp_check(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
             bool *ready, dm_error *err);

dm_status
dm_tcp_delete_key(dm_store *store, const char *key, const dm_wait *wait, bool *existed,
                  dm_error *err);

dm_status
dm_tcp_num_keys(dm_store *store, const dm_wait *wait, int64_t *n, dm_error *err);

dm_status
dm_tcp_queue_len(dm_store *store, const char *key, const dm_wait *wait, int64_t *n,
                 dm_error *err);

dm_status
dm_tcp_list_keys(dm_store *store, const dm_wait *wait, dm_bytes **keys, size_t *n,
                 dm_error *err);

dm_status
dm_tcp_queue_push(dm_store *store, const char *key, const void *data, size_t size,
                  const dm_wait *wait, dm_error *err);

dm_status
dm_tcp_wait(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
            dm_error *err);

dm_status
dm_tcp_ours_multi_get(dm_store *store, const char *const *keys, size_t n,
                      const dm_wait *wait, dm_bytes *values, dm_error *err);

dm_status
dm_tcp_torch_multi_get(dm_store *store, const char *const *keys, size_t n,
                       const dm_wait *wait, dm_bytes *values, dm_error *err);

dm_status
dm_tcp_ours_get(dm_store *store, const char *key, const dm_wait *wait, dm_bytes *value,
                dm_error *err);

dm_status
dm_tcp_torch_get(dm_store *store, const char *key, const dm_wait *wait, dm_bytes *value,
                 dm_error *err);

dm_status
dm_tcp_ours_wait_unless(dm_store *store, const char *const *keys, size_t n,
                        const char *const *unless, size_t m, const dm_wait *wait,
                        dm_error *err);

dm_status
dm_tcp_ours_barrier(dm_store *store, const char *key, int32_t world,
                    const dm_wait *wait, dm_error *err);

dm_status
dm_tcp_ours_queue_pop(dm_store *store, const char *key, bool block, const dm_wait *wait,
                      dm_bytes *value, dm_error *err);

dm_status
dm_tcp_torch_queue_pop(dm_store *store, const char *key, bool block,
                       const dm_wait *wait, dm_bytes *value, dm_error *err);

#endif
