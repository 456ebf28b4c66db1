/* The tcp store: a client of our server or of torch's.
 *
 * Each call is one request (or a few) over a connection of the pool (dm_tcp_pool.h).
 * Two tables of operations: what our server understands, and torch's protocol alone.
 * A will has a connection of its own, whose end executes it; the mutex guards their
 * list.
 */
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "base/dm_alloc.h"
#include "store/dm_net.h"
#include "store/dm_store.h"
#include "store/dm_tcp_pool.h"
#include "store/dm_wire.h"

enum {
    CHUNK_BYTES = DM_WIRE_FRAME_MAX / 2, /* of one request of several keys */
    EXPLAIN_KEYS = 500, /* asked about at once, to name those that are missing */
    EXPLAIN_S = 2,
};

typedef struct tcp_will {
    struct tcp_will *next;
    dm_tcp_conn *conn;
    char key[];
} tcp_will;

typedef struct tcp_store {
    dm_store base;
    dm_tcp_pool pool;
    pthread_mutex_t mutex;
    tcp_will *wills;
} tcp_store;

static tcp_store *
tcp_of(dm_store *store)
{
    return (tcp_store *)store;
}

static dm_wire_buffer *
out_of(dm_tcp_call *call)
{
    return &call->conn->out;
}

static dm_status
timed_out_at(const dm_tcp_call *call, const char *what, const char *key)
{
    char text[256];
    dm_store_list_missing(&key, NULL, 1, text, sizeof(text));
    return dm_tcp_call_timed_out(call, what, text);
}

static dm_status
unexpected(dm_tcp_call *call, uint8_t answer)
{
    call->conn->is_broken = true;
    return dm_error_set(call->err, DM_ERR_PROTOCOL, "an unexpected answer 0x%02x",
                        answer);
}

/* The rest of an answer of ours that begins with `answer`: refusals become errors. */
static dm_status
check_answer(dm_tcp_call *call, uint8_t answer)
{
    if (answer == DM_WIRE_OK) {
        return DM_OK;
    }
    if (answer != DM_WIRE_REFUSED && answer != DM_WIRE_GONE) {
        return unexpected(call, answer);
    }
    dm_bytes text;
    DM_TRY(dm_tcp_conn_read_bytes(call->conn, call->wait, DM_STORE_VALUE_MAX, &text,
                                  call->err));
    dm_status status = answer == DM_WIRE_GONE ? DM_ERR_PEER : DM_ERR_VALUE;
    dm_error_set(call->err, status, "%s", text.data);
    dm_bytes_free(&text);
    return status;
}

/* How many of the keys (and values, if there are any) go into one request. */
static size_t
chunk_of(const char *const *keys, const dm_bytes *values, size_t n)
{
    size_t bytes = 0;
    size_t i = 0;
    for (; i < n && i < DM_WIRE_KEYS_MAX; i++) {
        bytes += 9 + strlen(keys[i]);
        if (values != NULL) {
            bytes += 8 + values[i].size;
        }
        if (i > 0 && bytes > CHUNK_BYTES) {
            break;
        }
    }
    return i;
}

/* --- calls: keys that are there ------------------------------------------------------------- */

static dm_status
tcp_set(dm_store *store, const char *key, const void *data, size_t size,
        const dm_wait *wait, dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_ONE_WAY, DM_WIRE_SET,
                             wait, err));
    dm_wire_put_key(out_of(&call), key);
    dm_wire_put_bytes(out_of(&call), data, size);
    return dm_tcp_call_end(&call, dm_tcp_call_send_one_way(&call));
}

static dm_status
tcp_multi_set(dm_store *store, const char *const *keys, const dm_bytes *values,
              size_t n, const dm_wait *wait, dm_error *err)
{
    while (n > 0) {
        size_t chunk = chunk_of(keys, values, n);
        dm_tcp_call call;
        DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_ONE_WAY,
                                 DM_WIRE_MULTI_SET, wait, err));
        dm_wire_put_u64(out_of(&call), chunk);
        for (size_t i = 0; i < chunk; i++) {
            dm_wire_put_key(out_of(&call), keys[i]);
            dm_wire_put_bytes(out_of(&call), values[i].data, values[i].size);
        }
        DM_TRY(dm_tcp_call_end(&call, dm_tcp_call_send_one_way(&call)));
        keys += chunk;
        values += chunk;
        n -= chunk;
    }
    return DM_OK;
}

/* Torch's: a key that holds no number makes its server close the connection. */
static dm_status
torch_add(dm_store *store, const char *key, int64_t amount, const dm_wait *wait,
          int64_t *result, dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_ANSWERED, DM_WIRE_ADD,
                             wait, err));
    dm_wire_put_key(out_of(&call), key);
    dm_wire_put_u64(out_of(&call), (uint64_t)amount);
    dm_status status = dm_tcp_call_send(&call);
    if (status == DM_OK) {
        status = dm_tcp_conn_read_i64(call.conn, call.wait, result, err);
        if (status == DM_ERR_CONNECTION) {
            dm_error_context(err, "add to key '%.200s' (does it hold a number?)", key);
        }
    }
    return dm_tcp_call_end(&call, status);
}

/* TRY_ADD and TRY_APPEND have been built: sends and looks at the first byte. */
static dm_status
try_request(dm_tcp_call *call, const char *key)
{
    uint8_t answer;
    DM_TRY(dm_tcp_call_send(call));
    DM_TRY(dm_tcp_conn_read_u8(call->conn, call->wait, &answer, call->err));
    dm_status status = check_answer(call, answer);
    if (status == DM_ERR_VALUE) {
        dm_error_context(call->err, "key '%.200s'", key);
    }
    return status;
}

static dm_status
ours_add(dm_store *store, const char *key, int64_t amount, const dm_wait *wait,
         int64_t *result, dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_ANSWERED,
                             DM_WIRE_TRY_ADD, wait, err));
    dm_wire_put_key(out_of(&call), key);
    dm_wire_put_u64(out_of(&call), (uint64_t)amount);
    dm_status status = try_request(&call, key);
    if (status == DM_OK) {
        status = dm_tcp_conn_read_i64(call.conn, call.wait, result, err);
    }
    return dm_tcp_call_end(&call, status);
}

static dm_status
torch_append(dm_store *store, const char *key, const void *data, size_t size,
             const dm_wait *wait, dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_ONE_WAY,
                             DM_WIRE_APPEND, wait, err));
    dm_wire_put_key(out_of(&call), key);
    dm_wire_put_bytes(out_of(&call), data, size);
    return dm_tcp_call_end(&call, dm_tcp_call_send_one_way(&call));
}

static dm_status
ours_append(dm_store *store, const char *key, const void *data, size_t size,
            const dm_wait *wait, dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_ANSWERED,
                             DM_WIRE_TRY_APPEND, wait, err));
    dm_wire_put_key(out_of(&call), key);
    dm_wire_put_bytes(out_of(&call), data, size);
    return dm_tcp_call_end(&call, try_request(&call, key));
}

static dm_status
tcp_compare_set(dm_store *store, const char *key, const void *expected,
                size_t expected_size, const void *desired, size_t desired_size,
                const dm_wait *wait, dm_bytes *value, dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_ANSWERED,
                             DM_WIRE_COMPARE_SET, wait, err));
    dm_wire_put_key(out_of(&call), key);
    dm_wire_put_bytes(out_of(&call), expected, expected_size);
    dm_wire_put_bytes(out_of(&call), desired, desired_size);
    dm_status status = dm_tcp_call_send(&call);
    if (status == DM_OK) {
        status = dm_tcp_conn_read_bytes(call.conn, call.wait, DM_STORE_VALUE_MAX, value,
                                        err);
    }
    return dm_tcp_call_end(&call, status);
}

static dm_status
tcp_check(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
          bool *ready, dm_error *err)
{
    uint8_t missing = 0;
    while (n > 0 && missing == 0) {
        size_t chunk = chunk_of(keys, NULL, n);
        dm_tcp_call call;
        DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_ANSWERED,
                                 DM_WIRE_CHECK, wait, err));
        dm_wire_put_keys(out_of(&call), keys, chunk);
        dm_status status = dm_tcp_call_send(&call);
        if (status == DM_OK) {
            status = dm_tcp_conn_read_u8(call.conn, call.wait, &missing, err);
        }
        if (status == DM_OK && missing > 1) {
            status = unexpected(&call, missing);
        }
        DM_TRY(dm_tcp_call_end(&call, status));
        keys += chunk;
        n -= chunk;
    }
    *ready = missing == 0;
    return DM_OK;
}

/* Requests of one key (or none) that are answered by a number. */
static dm_status
ask_number(dm_store *store, uint8_t op, const char *key, const dm_wait *wait,
           int64_t *number, dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(
        dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_ANSWERED, op, wait, err));
    if (key != NULL) {
        dm_wire_put_key(out_of(&call), key);
    }
    dm_status status = dm_tcp_call_send(&call);
    if (status == DM_OK) {
        status = dm_tcp_conn_read_i64(call.conn, call.wait, number, err);
    }
    return dm_tcp_call_end(&call, status);
}

static dm_status
tcp_delete_key(dm_store *store, const char *key, const dm_wait *wait, bool *existed,
               dm_error *err)
{
    int64_t n = 0;
    DM_TRY(ask_number(store, DM_WIRE_DELETE_KEY, key, wait, &n, err));
    *existed = n != 0;
    return DM_OK;
}

static dm_status
tcp_num_keys(dm_store *store, const dm_wait *wait, int64_t *n, dm_error *err)
{
    return ask_number(store, DM_WIRE_NUM_KEYS, NULL, wait, n, err);
}

static dm_status
tcp_queue_len(dm_store *store, const char *key, const dm_wait *wait, int64_t *n,
              dm_error *err)
{
    return ask_number(store, DM_WIRE_QUEUE_LEN, key, wait, n, err);
}

static void
free_keys(dm_bytes *keys, size_t n)
{
    while (n > 0) {
        dm_bytes_free(&keys[--n]);
    }
    dm_free(keys);
}

/* Reads one key and takes the '/' off that clients put in front. */
static dm_status
read_key(dm_tcp_call *call, dm_bytes *key)
{
    DM_TRY(dm_tcp_conn_read_bytes(call->conn, call->wait, DM_STORE_KEY_MAX, key,
                                  call->err));
    if (key->size != 0 && key->data[0] == '/') {
        memmove(key->data, key->data + 1, key->size);
        key->size--;
    }
    return DM_OK;
}

/* The array grows as keys come: the number that was announced proves nothing. */
static dm_status
read_keys(dm_tcp_call *call, dm_bytes **keys, size_t *n)
{
    int64_t count;
    DM_TRY(dm_tcp_conn_read_i64(call->conn, call->wait, &count, call->err));
    dm_bytes *list = NULL;
    size_t size = 0;
    size_t capacity = 0;
    dm_status status = DM_OK;
    while (status == DM_OK && (int64_t)size < count) {
        if (size == capacity) {
            capacity = capacity != 0 ? capacity * 2 : 64;
            dm_bytes *larger = dm_realloc_array(list, capacity, sizeof(dm_bytes));
            if (larger == NULL) {
                call->conn->is_broken = true;
                status = dm_error_set_no_memory(call->err, "a list of keys");
                break;
            }
            list = larger;
        }
        status = read_key(call, &list[size]);
        size += status == DM_OK;
    }
    if (status == DM_OK && list == NULL) {
        list = dm_malloc_array(0, sizeof(dm_bytes));
        if (list == NULL) {
            status = dm_error_set_no_memory(call->err, "a list of keys");
        }
    }
    if (status != DM_OK) {
        free_keys(list, size);
        return status;
    }
    *keys = list;
    *n = size;
    return DM_OK;
}

static dm_status
tcp_list_keys(dm_store *store, const dm_wait *wait, dm_bytes **keys, size_t *n,
              dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_ANSWERED,
                             DM_WIRE_LIST_KEYS, wait, err));
    dm_status status = dm_tcp_call_send(&call);
    if (status == DM_OK) {
        status = read_keys(&call, keys, n);
    }
    return dm_tcp_call_end(&call, status);
}

/* --- calls: waiting for keys ------------------------------------------------------------------ */

/* WHICH of the keys are there, on our server. */
static dm_status
ours_which(dm_tcp_call *call, const dm_wait *wait, const char *const *keys, size_t n,
           bool *there)
{
    dm_tcp_conn_begin(call->conn, DM_WIRE_WHICH);
    dm_wire_put_keys(out_of(call), keys, n);
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
            dm_wire_put_u8(out_of(call), DM_WIRE_CHECK);
        }
        dm_wire_put_keys(out_of(call), &keys[i], 1);
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
    DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_WAITS, DM_WIRE_WAIT,
                             wait, err));
    dm_wire_put_keys(out_of(&call), keys, n);
    uint8_t answer = DM_WIRE_OK;
    dm_status status = dm_tcp_call_send_and_await(&call, &answer);
    if (status == DM_ERR_TIMEOUT) {
        status = explain_missing(&call, keys, n);
    }
    else if (status == DM_OK && answer != DM_WIRE_OK) {
        status = unexpected(&call, answer);
    }
    else if (status == DM_OK) {
        status = dm_tcp_call_finish_wait(&call);
    }
    return dm_tcp_call_end(&call, status);
}

static dm_status
tcp_wait(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
         dm_error *err)
{
    while (n > 0) {
        size_t chunk = chunk_of(keys, NULL, n);
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
    DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_WAITS,
                             DM_WIRE_WAIT_GET, wait, err));
    dm_wire_put_keys(out_of(&call), keys, n);
    uint8_t answer = DM_WIRE_OK;
    dm_status status = dm_tcp_call_send_and_await(&call, &answer);
    if (status == DM_ERR_TIMEOUT) {
        return dm_tcp_call_end(&call, explain_missing(&call, keys, n));
    }
    if (status == DM_OK) {
        status = check_answer(&call, answer);
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
    DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_ANSWERED,
                             DM_WIRE_MULTI_GET, wait, err));
    dm_wire_put_keys(out_of(&call), keys, n);
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
        size_t chunk = chunk_of(keys + done, NULL, n - done);
        dm_status status = get(store, keys + done, chunk, wait, values + done, err);
        if (status != DM_OK) {
            free_values(values, done);
            return status;
        }
        done += chunk;
    }
    return DM_OK;
}

static dm_status
ours_multi_get(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
               dm_bytes *values, dm_error *err)
{
    return get_by_chunks(ours_get_chunk, store, keys, n, wait, values, err);
}

static dm_status
torch_multi_get(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
                dm_bytes *values, dm_error *err)
{
    return get_by_chunks(torch_get_chunk, store, keys, n, wait, values, err);
}

static dm_status
ours_get(dm_store *store, const char *key, const dm_wait *wait, dm_bytes *value,
         dm_error *err)
{
    return ours_get_chunk(store, &key, 1, wait, value, err);
}

static dm_status
torch_get(dm_store *store, const char *key, const dm_wait *wait, dm_bytes *value,
          dm_error *err)
{
    DM_TRY(wait_chunk(store, &key, 1, wait, err));
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_ANSWERED, DM_WIRE_GET,
                             wait, err));
    dm_wire_put_key(out_of(&call), key);
    dm_status status = dm_tcp_call_send(&call);
    if (status == DM_OK) {
        status = dm_tcp_conn_read_bytes(call.conn, call.wait, DM_STORE_VALUE_MAX, value,
                                        err);
    }
    return dm_tcp_call_end(&call, status);
}

static dm_status
ours_wait_unless(dm_store *store, const char *const *keys, size_t n,
                 const char *const *unless, size_t m, const dm_wait *wait,
                 dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_WAITS,
                             DM_WIRE_WAIT_UNLESS, wait, err));
    dm_wire_put_keys(out_of(&call), keys, n);
    dm_wire_put_keys(out_of(&call), unless, m);
    uint8_t answer = DM_WIRE_OK;
    dm_status status = dm_tcp_call_send_and_await(&call, &answer);
    if (status == DM_ERR_TIMEOUT) {
        return dm_tcp_call_end(&call, explain_missing(&call, keys, n));
    }
    if (status == DM_OK) {
        status = check_answer(&call, answer);
        dm_status cut = dm_tcp_call_finish_wait(&call);
        status = cut != DM_OK ? cut : status;
    }
    return dm_tcp_call_end(&call, status);
}

static dm_status
ours_barrier(dm_store *store, const char *key, int32_t world, const dm_wait *wait,
             dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_WAITS,
                             DM_WIRE_WAIT_ALL, wait, err));
    dm_wire_put_key(out_of(&call), key);
    dm_wire_put_u64(out_of(&call), (uint64_t)world);
    uint8_t answer = DM_WIRE_OK;
    dm_status status = dm_tcp_call_send_and_await(&call, &answer);
    if (status == DM_ERR_TIMEOUT) {
        status = timed_out_at(&call, "in barrier", key);
    }
    else if (status == DM_OK) {
        status = check_answer(&call, answer);
        dm_status cut = dm_tcp_call_finish_wait(&call);
        status = cut != DM_OK ? cut : status;
    }
    return dm_tcp_call_end(&call, status);
}

/* --- calls: queues ------------------------------------------------------------------------------ */

static dm_status
tcp_queue_push(dm_store *store, const char *key, const void *data, size_t size,
               const dm_wait *wait, dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_ONE_WAY,
                             DM_WIRE_QUEUE_PUSH, wait, err));
    dm_wire_put_key(out_of(&call), key);
    dm_wire_put_bytes(out_of(&call), data, size);
    return dm_tcp_call_end(&call, dm_tcp_call_send_one_way(&call));
}

/* DM_ERR_AGAIN: the queue is empty. */
static dm_status
tcp_try_pop(dm_store *store, const char *key, const dm_wait *wait, dm_bytes *value,
            dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_ANSWERED,
                             DM_WIRE_QUEUE_POP, wait, err));
    dm_wire_put_key(out_of(&call), key);
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
    DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_WAITS,
                             DM_WIRE_WAIT_POP, wait, err));
    dm_wire_put_key(out_of(&call), key);
    uint8_t answer = DM_WIRE_OK;
    dm_status status = dm_tcp_call_send_and_await(&call, &answer);
    if (status == DM_ERR_TIMEOUT) {
        return dm_tcp_call_end(
            &call, timed_out_at(&call, "waiting for an item in queue", key));
    }
    dm_bytes item;
    if (status == DM_OK) {
        status = check_answer(&call, answer);
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
        dm_wire_put_key(out_of(&call), key);
        dm_wire_put_bytes(out_of(&call), item.data, item.size);
        (void)dm_tcp_conn_send(call.conn, &call.conn->grace, NULL);
        dm_bytes_free(&item);
        return dm_tcp_call_end(&call, status);
    }
    *value = item;
    return dm_tcp_call_end(&call, DM_OK);
}

static dm_status
ours_queue_pop(dm_store *store, const char *key, bool block, const dm_wait *wait,
               dm_bytes *value, dm_error *err)
{
    return block ? ours_wait_pop(store, key, wait, value, err)
                 : tcp_try_pop(store, key, wait, value, err);
}

static dm_status
torch_queue_pop(dm_store *store, const char *key, bool block, const dm_wait *wait,
                dm_bytes *value, dm_error *err)
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

/* --- wills ------------------------------------------------------------------------------------------ */

static dm_status
send_will(dm_tcp_call *call, const char *key, const void *data, size_t size)
{
    uint8_t answer;
    dm_tcp_conn_begin(call->conn, DM_WIRE_WILL);
    dm_wire_put_key(out_of(call), key);
    dm_wire_put_bytes(out_of(call), data, size);
    DM_TRY(dm_tcp_call_send(call));
    DM_TRY(dm_tcp_conn_read_u8(call->conn, call->wait, &answer, call->err));
    return check_answer(call, answer);
}

/* Never blocks: one byte always fits. */
static void
say_goodbye(tcp_will *will)
{
    const dm_wait now = {0, NULL, NULL};
    dm_tcp_conn_begin(will->conn, DM_WIRE_GOODBYE);
    (void)dm_tcp_conn_send(will->conn, &now, NULL);
}

static void
free_will(tcp_will *will)
{
    if (will != NULL) {
        dm_tcp_conn_free(will->conn);
        dm_free(will);
    }
}

/* Takes the will of that key off the list; NULL when there is none. */
static tcp_will *
take_will_locked(tcp_store *self, const char *key)
{
    for (tcp_will **link = &self->wills; *link != NULL; link = &(*link)->next) {
        if (strcmp((*link)->key, key) == 0) {
            tcp_will *will = *link;
            *link = will->next;
            return will;
        }
    }
    return NULL;
}

static dm_status
ours_will(dm_store *store, const char *key, const void *data, size_t size,
          const dm_wait *wait, dm_error *err)
{
    tcp_store *self = tcp_of(store);
    size_t key_size = strlen(key) + 1;
    tcp_will *will = dm_calloc(1, sizeof(*will) + key_size);
    if (will == NULL) {
        return dm_error_set_no_memory(err, "a will");
    }
    memcpy(will->key, key, key_size);

    dm_tcp_call call;
    dm_status status = dm_tcp_call_begin_apart(&call, &self->pool, wait, err);
    if (status == DM_OK) {
        will->conn = call.conn;
        status = dm_tcp_call_explain(&call, send_will(&call, key, data, size));
    }
    if (status != DM_OK) {
        free_will(will);
        return status;
    }
    pthread_mutex_lock(&self->mutex);
    tcp_will *old = NULL;
    status = dm_tcp_pool_check_open(&self->pool, err);
    if (status == DM_OK) {
        old = take_will_locked(self, key);
        will->next = self->wills;
        self->wills = will;
    }
    else {
        old = will; /* closed meanwhile */
    }
    pthread_mutex_unlock(&self->mutex);
    if (old != NULL) {
        say_goodbye(old);
        free_will(old);
    }
    return status;
}

/* --- life ---------------------------------------------------------------------------- */

static tcp_will *
take_wills(tcp_store *self)
{
    pthread_mutex_lock(&self->mutex);
    tcp_will *wills = self->wills;
    self->wills = NULL;
    pthread_mutex_unlock(&self->mutex);
    return wills;
}

static void
tcp_close(dm_store *store)
{
    tcp_store *self = tcp_of(store);
    dm_tcp_pool_close(&self->pool); /* first: no will is added from now on */
    tcp_will *wills = take_wills(self);
    while (wills != NULL) {
        tcp_will *will = wills;
        wills = will->next;
        say_goodbye(will);
        free_will(will);
    }
}

/* In a forked child the descriptors are closed, which ends nothing for the parent. */
static void
tcp_free(dm_store *store)
{
    tcp_store *self = tcp_of(store);
    bool forked = store->pid != getpid();
    dm_tcp_pool_fini(&self->pool, forked);
    while (self->wills != NULL) {
        tcp_will *will = self->wills;
        self->wills = will->next;
        free_will(will);
    }
    if (!forked) {
        pthread_mutex_destroy(&self->mutex);
    }
    dm_free(self);
}

#define TCP_COMMON_OPS                                                                 \
    .kind = "tcp", .set = tcp_set, .compare_set = tcp_compare_set, .check = tcp_check, \
    .wait = tcp_wait, .delete_key = tcp_delete_key, .multi_set = tcp_multi_set,        \
    .num_keys = tcp_num_keys, .list_keys = tcp_list_keys,                              \
    .queue_push = tcp_queue_push, .queue_len = tcp_queue_len, .close = tcp_close,      \
    .free = tcp_free

static const dm_store_ops ours_ops = {
    TCP_COMMON_OPS,
    .get = ours_get,
    .add = ours_add,
    .append = ours_append,
    .multi_get = ours_multi_get,
    .queue_pop = ours_queue_pop,
    .barrier = ours_barrier,
    .wait_unless = ours_wait_unless,
    .will = ours_will,
};

static const dm_store_ops torch_ops = {
    TCP_COMMON_OPS,
    .get = torch_get,
    .add = torch_add,
    .append = torch_append,
    .multi_get = torch_multi_get,
    .queue_pop = torch_queue_pop,
};

dm_status
dm_store_tcp_new(const char *host, uint16_t port, const char *token,
                 const dm_wait *wait, dm_store **store, dm_error *err)
{
    tcp_store *self = dm_calloc(1, sizeof(*self));
    if (self == NULL) {
        return dm_error_set_no_memory(err, "a tcp store");
    }
    bool is_ours = false;
    dm_status status =
        dm_tcp_pool_init(&self->pool, host, port, token, wait, &is_ours, err);
    if (status != DM_OK) {
        dm_free(self);
        return status;
    }
    dm_store_init(&self->base, is_ours ? &ours_ops : &torch_ops);
    pthread_mutex_init(&self->mutex, NULL);
    *store = &self->base;
    return DM_OK;
}

const char *
dm_store_tcp_address(const dm_store *store, uint16_t *port)
{
    if (store->ops != &ours_ops && store->ops != &torch_ops) {
        return NULL;
    }
    const tcp_store *self = (const tcp_store *)store;
    *port = self->pool.port;
    return self->pool.host;
}

static dm_status
count_workers(dm_store *store, int64_t amount, const dm_wait *wait, int64_t *n,
              dm_error *err)
{
    static const char key[] = "init/"; /* without the '/' that clients put in front */
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &tcp_of(store)->pool, DM_TCP_ANSWERED, DM_WIRE_ADD,
                             wait, err));
    dm_wire_put_bytes(out_of(&call), key, sizeof(key) - 1);
    dm_wire_put_u64(out_of(&call), (uint64_t)amount);
    dm_status status = dm_tcp_call_send(&call);
    if (status == DM_OK) {
        status = dm_tcp_conn_read_i64(call.conn, call.wait, n, err);
    }
    return dm_tcp_call_end(&call, status);
}

dm_status
dm_store_tcp_meet_workers(dm_store *store, int64_t world, bool is_master,
                          const dm_wait *wait, dm_error *err)
{
    int64_t n = 0;
    DM_TRY(count_workers(store, 1, wait, &n, err));
    /* Nothing tells when a number is reached, and torch's clients only add. */
    for (int64_t ms = 1; is_master && n < world; ms = ms < 8 ? ms * 2 : ms) {
        dm_status status = dm_net_sleep(ms * DM_NS_PER_MS, wait, err);
        if (status == DM_ERR_TIMEOUT) {
            const dm_tcp_pool *pool = &tcp_of(store)->pool;
            dm_error_set(err, status,
                         "store at %s:%u: timed out waiting for workers: %lld of %lld "
                         "have come",
                         pool->host, pool->port, (long long)n, (long long)world);
        }
        DM_TRY(status);
        DM_TRY(count_workers(store, 0, wait, &n, err));
    }
    return DM_OK;
}
