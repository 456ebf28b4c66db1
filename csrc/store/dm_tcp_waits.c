/* The calls of a tcp store that wait: see dm_tcp_calls.h.
 *
 * On our server a wait and what follows it are one request. On torch's the wait comes
 * first; what has come may be gone again when it is read, which reads as empty.
 */
#include "store/dm_tcp_calls.h"

#include <string.h>

#include "base/dm_alloc.h"

enum {
    EXPLAIN_KEYS = 500, /* asked about at once, to name those that are missing */
    EXPLAIN_S = 2,
};

static dm_status
timed_out_at(const dm_tcp_call *call, const char *what, const char *key)
{
    char text[256];
    dm_store_list_missing(&key, NULL, 1, text, sizeof(text));
    return dm_tcp_call_timed_out(call, what, text);
}

/* --- calls: waiting for keys ------------------------------------------------------------------ */

/* WHICH of the keys are there, on our server. */
static dm_status
ours_which(dm_tcp_call *call, const dm_wait *wait, const char *const *keys, size_t n,
           bool *there)
{
    dm_tcp_conn_begin(call->conn, DM_WIRE_WHICH);
    dm_wire_put_keys(dm_tcp_out(call), keys, n);
    DM_TRY(dm_tcp_conn_send(call->conn, wait, NULL));
    uint8_t byte;
    DM_TRY(dm_tcp_conn_read_u8(call->conn, wait, &byte, NULL));
    for (size_t i = 0; i < n; i++) {
        DM_TRY(dm_tcp_conn_read_u8(call->conn, wait, &byte, NULL));
        there[i] = byte == 1;
    }
    return DM_OK;
}

/* The same on torch's: one CHECK for each, all sent at once. */
static dm_status
torch_which(dm_tcp_call *call, const dm_wait *wait, const char *const *keys, size_t n,
            bool *there)
{
    dm_tcp_conn_begin(call->conn, DM_WIRE_CHECK);
    for (size_t i = 0; i < n; i++) {
        if (i > 0) {
            dm_wire_put_u8(dm_tcp_out(call), DM_WIRE_CHECK);
        }
        dm_wire_put_keys(dm_tcp_out(call), &keys[i], 1);
    }
    DM_TRY(dm_tcp_conn_send(call->conn, wait, NULL));
    for (size_t i = 0; i < n; i++) {
        uint8_t byte;
        DM_TRY(dm_tcp_conn_read_u8(call->conn, wait, &byte, NULL));
        there[i] = byte == 0;
    }
    return DM_OK;
}

/* DM_ERR_TIMEOUT with the names of the keys that are missing. The wait has been
 * cancelled; if its connection is still good the server is asked. */
static dm_status
explain_missing(dm_tcp_call *call, const char *const *keys, size_t n)
{
    const dm_wait wait = {dm_clock_deadline(EXPLAIN_S * DM_NS_PER_S), NULL, NULL};
    dm_tcp_conn *conn = call->conn;
    char text[512];
    bool *there = NULL;
    if (!conn->is_broken) {
        there = dm_calloc(n, sizeof(bool));
    }
    for (size_t i = 0; there != NULL && i < n; i += EXPLAIN_KEYS) {
        size_t some = n - i < EXPLAIN_KEYS ? n - i : EXPLAIN_KEYS;
        dm_status status = (conn->is_ours ? ours_which : torch_which)(
            call, &wait, keys + i, some, there + i);
        if (status != DM_OK) {
            conn->is_broken = true;
            dm_free(there);
            there = NULL;
        }
    }
    dm_store_list_missing(keys, there, n, text, sizeof(text));
    dm_free(there);
    return dm_tcp_call_timed_out(call, "waiting for", text);
}

/* Waits until the keys of one request are there. */
static dm_status
wait_chunk(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
           dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_WAITS,
                             DM_WIRE_WAIT, wait, err));
    dm_wire_put_keys(dm_tcp_out(&call), keys, n);
    uint8_t answer = DM_WIRE_OK;
    dm_status status = dm_tcp_call_send_and_await(&call, &answer);
    if (status == DM_ERR_TIMEOUT) {
        status = explain_missing(&call, keys, n);
    }
    else if (status == DM_OK && answer != DM_WIRE_OK) {
        status = dm_tcp_unexpected(&call, answer);
    }
    else if (status == DM_OK) {
        status = dm_tcp_call_finish_wait(&call);
    }
    return dm_tcp_call_end(&call, status);
}

dm_status
dm_tcp_wait(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
            dm_error *err)
{
    while (n > 0) {
        size_t chunk = dm_tcp_chunk(keys, NULL, n);
        DM_TRY(wait_chunk(store, keys, chunk, wait, err));
        keys += chunk;
        n -= chunk;
    }
    return DM_OK;
}

static dm_status
read_values(dm_tcp_call *call, size_t n, dm_bytes *values)
{
    for (size_t i = 0; i < n; i++) {
        dm_status status = dm_tcp_conn_read_bytes(
            call->conn, call->wait, DM_STORE_VALUE_MAX, &values[i], call->err);
        if (status != DM_OK) {
            while (i > 0) {
                dm_bytes_free(&values[--i]);
            }
            return status;
        }
    }
    return DM_OK;
}

static void
free_values(dm_bytes *values, size_t n)
{
    while (n > 0) {
        dm_bytes_free(&values[--n]);
    }
}

static dm_status
ours_get_chunk(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
               dm_bytes *values, dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_WAITS,
                             DM_WIRE_WAIT_GET, wait, err));
    dm_wire_put_keys(dm_tcp_out(&call), keys, n);
    uint8_t answer = DM_WIRE_OK;
    dm_status status = dm_tcp_call_send_and_await(&call, &answer);
    if (status == DM_ERR_TIMEOUT) {
        return dm_tcp_call_end(&call, explain_missing(&call, keys, n));
    }
    if (status == DM_OK) {
        status = dm_tcp_check_answer(&call, answer);
    }
    if (status == DM_OK) {
        status = read_values(&call, n, values);
        if (status == DM_OK) {
            status = dm_tcp_call_finish_wait(&call);
            if (status != DM_OK) {
                free_values(values, n);
            }
        }
    }
    return dm_tcp_call_end(&call, status);
}

/* Waits, then reads: torch's server answers a key that is absent with nothing. */
static dm_status
torch_get_chunk(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
                dm_bytes *values, dm_error *err)
{
    DM_TRY(wait_chunk(store, keys, n, wait, err));
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_ANSWERED,
                             DM_WIRE_MULTI_GET, wait, err));
    dm_wire_put_keys(dm_tcp_out(&call), keys, n);
    dm_status status = dm_tcp_call_send(&call);
    if (status == DM_OK) {
        status = read_values(&call, n, values);
    }
    return dm_tcp_call_end(&call, status);
}

typedef dm_status (*get_chunk)(dm_store *store, const char *const *keys, size_t n,
                               const dm_wait *wait, dm_bytes *values, dm_error *err);

static dm_status
get_by_chunks(get_chunk get, dm_store *store, const char *const *keys, size_t n,
              const dm_wait *wait, dm_bytes *values, dm_error *err)
{
    size_t done = 0;
    while (done < n) {
        size_t chunk = dm_tcp_chunk(keys + done, NULL, n - done);
        dm_status status = get(store, keys + done, chunk, wait, values + done, err);
        if (status != DM_OK) {
            free_values(values, done);
            return status;
        }
        done += chunk;
    }
    return DM_OK;
}

dm_status
dm_tcp_ours_multi_get(dm_store *store, const char *const *keys, size_t n,
                      const dm_wait *wait, dm_bytes *values, dm_error *err)
{
    return get_by_chunks(ours_get_chunk, store, keys, n, wait, values, err);
}

dm_status
dm_tcp_torch_multi_get(dm_store *store, const char *const *keys, size_t n,
                       const dm_wait *wait, dm_bytes *values, dm_error *err)
{
    return get_by_chunks(torch_get_chunk, store, keys, n, wait, values, err);
}

dm_status
dm_tcp_ours_get(dm_store *store, const char *key, const dm_wait *wait, dm_bytes *value,
                dm_error *err)
{
    return ours_get_chunk(store, &key, 1, wait, value, err);
}

dm_status
dm_tcp_torch_get(dm_store *store, const char *key, const dm_wait *wait, dm_bytes *value,
                 dm_error *err)
{
    DM_TRY(wait_chunk(store, &key, 1, wait, err));
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_ANSWERED,
                             DM_WIRE_GET, wait, err));
    dm_wire_put_key(dm_tcp_out(&call), key);
    dm_status status = dm_tcp_call_send(&call);
    if (status == DM_OK) {
        status = dm_tcp_conn_read_bytes(call.conn, call.wait, DM_STORE_VALUE_MAX, value,
                                        err);
    }
    return dm_tcp_call_end(&call, status);
}

dm_status
dm_tcp_ours_wait_unless(dm_store *store, const char *const *keys, size_t n,
                        const char *const *unless, size_t m, const dm_wait *wait,
                        dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_WAITS,
                             DM_WIRE_WAIT_UNLESS, wait, err));
    dm_wire_put_keys(dm_tcp_out(&call), keys, n);
    dm_wire_put_keys(dm_tcp_out(&call), unless, m);
    uint8_t answer = DM_WIRE_OK;
    dm_status status = dm_tcp_call_send_and_await(&call, &answer);
    if (status == DM_ERR_TIMEOUT) {
        return dm_tcp_call_end(&call, explain_missing(&call, keys, n));
    }
    if (status == DM_OK) {
        status = dm_tcp_check_answer(&call, answer);
        dm_status cut = dm_tcp_call_finish_wait(&call);
        status = cut != DM_OK ? cut : status;
    }
    return dm_tcp_call_end(&call, status);
}

dm_status
dm_tcp_ours_barrier(dm_store *store, const char *key, int32_t world,
                    const dm_wait *wait, dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_WAITS,
                             DM_WIRE_WAIT_ALL, wait, err));
    dm_wire_put_key(dm_tcp_out(&call), key);
    dm_wire_put_u64(dm_tcp_out(&call), (uint64_t)world);
    uint8_t answer = DM_WIRE_OK;
    dm_status status = dm_tcp_call_send_and_await(&call, &answer);
    if (status == DM_ERR_TIMEOUT) {
        status = timed_out_at(&call, "in barrier", key);
    }
    else if (status == DM_OK) {
        status = dm_tcp_check_answer(&call, answer);
        dm_status cut = dm_tcp_call_finish_wait(&call);
        status = cut != DM_OK ? cut : status;
    }
    return dm_tcp_call_end(&call, status);
}

/* --- queues ------------------------------------------------------------------------------ */

/* DM_ERR_AGAIN: the queue is empty. */
static dm_status
tcp_try_pop(dm_store *store, const char *key, const dm_wait *wait, dm_bytes *value,
            dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_ANSWERED,
                             DM_WIRE_QUEUE_POP, wait, err));
    dm_wire_put_key(dm_tcp_out(&call), key);
    int64_t taken = 0;
    dm_status status = dm_tcp_call_send(&call);
    if (status == DM_OK) {
        status = dm_tcp_conn_read_i64(call.conn, call.wait, &taken, err);
    }
    if (status == DM_OK && taken > 0) {
        status = dm_tcp_conn_read_bytes(call.conn, call.wait, DM_STORE_VALUE_MAX, value,
                                        err);
    }
    else if (status == DM_OK) {
        status = dm_error_set(err, DM_ERR_AGAIN, "queue '%.200s' is empty", key);
    }
    return dm_tcp_call_end(&call, status);
}

static dm_status
ours_wait_pop(dm_store *store, const char *key, const dm_wait *wait, dm_bytes *value,
              dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_WAITS,
                             DM_WIRE_WAIT_POP, wait, err));
    dm_wire_put_key(dm_tcp_out(&call), key);
    uint8_t answer = DM_WIRE_OK;
    dm_status status = dm_tcp_call_send_and_await(&call, &answer);
    if (status == DM_ERR_TIMEOUT) {
        return dm_tcp_call_end(
            &call, timed_out_at(&call, "waiting for an item in queue", key));
    }
    dm_bytes item;
    if (status == DM_OK) {
        status = dm_tcp_check_answer(&call, answer);
    }
    if (status == DM_OK) {
        status = dm_tcp_conn_read_bytes(call.conn, call.wait, DM_STORE_VALUE_MAX, &item,
                                        err);
    }
    if (status != DM_OK) {
        return dm_tcp_call_end(&call, status);
    }
    status = dm_tcp_call_finish_wait(&call);
    if (status != DM_OK) {
        /* Interrupted in the moment in which it got one: back into the queue. */
        dm_tcp_conn_begin(call.conn, DM_WIRE_QUEUE_PUSH);
        dm_wire_put_key(dm_tcp_out(&call), key);
        dm_wire_put_bytes(dm_tcp_out(&call), item.data, item.size);
        (void)dm_tcp_conn_send(call.conn, &call.conn->grace, NULL);
        dm_bytes_free(&item);
        return dm_tcp_call_end(&call, status);
    }
    *value = item;
    return dm_tcp_call_end(&call, DM_OK);
}

dm_status
dm_tcp_ours_queue_pop(dm_store *store, const char *key, bool block, const dm_wait *wait,
                      dm_bytes *value, dm_error *err)
{
    return block ? ours_wait_pop(store, key, wait, value, err)
                 : tcp_try_pop(store, key, wait, value, err);
}

dm_status
dm_tcp_torch_queue_pop(dm_store *store, const char *key, bool block,
                       const dm_wait *wait, dm_bytes *value, dm_error *err)
{
    for (;;) {
        if (block) {
            DM_TRY(wait_chunk(store, &key, 1, wait, err));
        }
        /* Another client may have been faster. */
        dm_status status = tcp_try_pop(store, key, wait, value, err);
        if (status != DM_ERR_AGAIN || !block) {
            return status;
        }
    }
}
