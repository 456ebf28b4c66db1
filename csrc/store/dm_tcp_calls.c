/* The calls of a tcp store that are answered at once: see dm_tcp_calls.h. */
#include "store/dm_tcp_calls.h"

#include <string.h>

#include "base/dm_alloc.h"

enum { CHUNK_BYTES = DM_WIRE_FRAME_MAX / 2 }; /* of one request of several keys */

/* --- helpers --------------------------------------------------------------------------- */

dm_status
dm_tcp_unexpected(dm_tcp_call *call, uint8_t answer)
{
    call->conn->is_broken = true;
    return dm_error_set(call->err, DM_ERR_PROTOCOL, "an unexpected answer 0x%02x",
                        answer);
}

dm_status
dm_tcp_check_answer(dm_tcp_call *call, uint8_t answer)
{
    if (answer == DM_WIRE_OK) {
        return DM_OK;
    }
    if (answer != DM_WIRE_REFUSED && answer != DM_WIRE_GONE) {
        return dm_tcp_unexpected(call, answer);
    }
    dm_bytes text;
    DM_TRY(dm_tcp_conn_read_bytes(call->conn, call->wait, DM_STORE_VALUE_MAX, &text,
                                  call->err));
    dm_status status = answer == DM_WIRE_GONE ? DM_ERR_PEER : DM_ERR_VALUE;
    dm_error_set(call->err, status, "%s", text.data);
    dm_bytes_free(&text);
    return status;
}

size_t
dm_tcp_chunk(const char *const *keys, const dm_bytes *values, size_t n)
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

/* --- calls ----------------------------------------------------------------------------- */

dm_status
dm_tcp_set(dm_store *store, const char *key, const void *data, size_t size,
           const dm_wait *wait, dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_ONE_WAY,
                             DM_WIRE_SET, wait, err));
    dm_wire_put_key(dm_tcp_out(&call), key);
    dm_wire_put_bytes(dm_tcp_out(&call), data, size);
    return dm_tcp_call_end(&call, dm_tcp_call_send_one_way(&call));
}

dm_status
dm_tcp_multi_set(dm_store *store, const char *const *keys, const dm_bytes *values,
                 size_t n, const dm_wait *wait, dm_error *err)
{
    while (n > 0) {
        size_t chunk = dm_tcp_chunk(keys, values, n);
        dm_tcp_call call;
        DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_ONE_WAY,
                                 DM_WIRE_MULTI_SET, wait, err));
        dm_wire_put_u64(dm_tcp_out(&call), chunk);
        for (size_t i = 0; i < chunk; i++) {
            dm_wire_put_key(dm_tcp_out(&call), keys[i]);
            dm_wire_put_bytes(dm_tcp_out(&call), values[i].data, values[i].size);
        }
        DM_TRY(dm_tcp_call_end(&call, dm_tcp_call_send_one_way(&call)));
        keys += chunk;
        values += chunk;
        n -= chunk;
    }
    return DM_OK;
}

/* Torch's: a key that holds no number makes its server close the connection. */
dm_status
dm_tcp_torch_add(dm_store *store, const char *key, int64_t amount, const dm_wait *wait,
                 int64_t *result, dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_ANSWERED,
                             DM_WIRE_ADD, wait, err));
    dm_wire_put_key(dm_tcp_out(&call), key);
    dm_wire_put_u64(dm_tcp_out(&call), (uint64_t)amount);
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
    dm_status status = dm_tcp_check_answer(call, answer);
    if (status == DM_ERR_VALUE) {
        dm_error_context(call->err, "key '%.200s'", key);
    }
    return status;
}

dm_status
dm_tcp_ours_add(dm_store *store, const char *key, int64_t amount, const dm_wait *wait,
                int64_t *result, dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_ANSWERED,
                             DM_WIRE_TRY_ADD, wait, err));
    dm_wire_put_key(dm_tcp_out(&call), key);
    dm_wire_put_u64(dm_tcp_out(&call), (uint64_t)amount);
    dm_status status = try_request(&call, key);
    if (status == DM_OK) {
        status = dm_tcp_conn_read_i64(call.conn, call.wait, result, err);
    }
    return dm_tcp_call_end(&call, status);
}

dm_status
dm_tcp_torch_append(dm_store *store, const char *key, const void *data, size_t size,
                    const dm_wait *wait, dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_ONE_WAY,
                             DM_WIRE_APPEND, wait, err));
    dm_wire_put_key(dm_tcp_out(&call), key);
    dm_wire_put_bytes(dm_tcp_out(&call), data, size);
    return dm_tcp_call_end(&call, dm_tcp_call_send_one_way(&call));
}

dm_status
dm_tcp_ours_append(dm_store *store, const char *key, const void *data, size_t size,
                   const dm_wait *wait, dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_ANSWERED,
                             DM_WIRE_TRY_APPEND, wait, err));
    dm_wire_put_key(dm_tcp_out(&call), key);
    dm_wire_put_bytes(dm_tcp_out(&call), data, size);
    return dm_tcp_call_end(&call, try_request(&call, key));
}

dm_status
dm_tcp_compare_set(dm_store *store, const char *key, const void *expected,
                   size_t expected_size, const void *desired, size_t desired_size,
                   const dm_wait *wait, dm_bytes *value, dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_ANSWERED,
                             DM_WIRE_COMPARE_SET, wait, err));
    dm_wire_put_key(dm_tcp_out(&call), key);
    dm_wire_put_bytes(dm_tcp_out(&call), expected, expected_size);
    dm_wire_put_bytes(dm_tcp_out(&call), desired, desired_size);
    dm_status status = dm_tcp_call_send(&call);
    if (status == DM_OK) {
        status = dm_tcp_conn_read_bytes(call.conn, call.wait, DM_STORE_VALUE_MAX, value,
                                        err);
    }
    return dm_tcp_call_end(&call, status);
}

dm_status
dm_tcp_check(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
             bool *ready, dm_error *err)
{
    uint8_t missing = 0;
    while (n > 0 && missing == 0) {
        size_t chunk = dm_tcp_chunk(keys, NULL, n);
        dm_tcp_call call;
        DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_ANSWERED,
                                 DM_WIRE_CHECK, wait, err));
        dm_wire_put_keys(dm_tcp_out(&call), keys, chunk);
        dm_status status = dm_tcp_call_send(&call);
        if (status == DM_OK) {
            status = dm_tcp_conn_read_u8(call.conn, call.wait, &missing, err);
        }
        if (status == DM_OK && missing > 1) {
            status = dm_tcp_unexpected(&call, missing);
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
    DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_ANSWERED, op,
                             wait, err));
    if (key != NULL) {
        dm_wire_put_key(dm_tcp_out(&call), key);
    }
    dm_status status = dm_tcp_call_send(&call);
    if (status == DM_OK) {
        status = dm_tcp_conn_read_i64(call.conn, call.wait, number, err);
    }
    return dm_tcp_call_end(&call, status);
}

dm_status
dm_tcp_delete_key(dm_store *store, const char *key, const dm_wait *wait, bool *existed,
                  dm_error *err)
{
    int64_t n = 0;
    DM_TRY(ask_number(store, DM_WIRE_DELETE_KEY, key, wait, &n, err));
    *existed = n != 0;
    return DM_OK;
}

dm_status
dm_tcp_num_keys(dm_store *store, const dm_wait *wait, int64_t *n, dm_error *err)
{
    return ask_number(store, DM_WIRE_NUM_KEYS, NULL, wait, n, err);
}

dm_status
dm_tcp_queue_len(dm_store *store, const char *key, const dm_wait *wait, int64_t *n,
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

dm_status
dm_tcp_list_keys(dm_store *store, const dm_wait *wait, dm_bytes **keys, size_t *n,
                 dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_ANSWERED,
                             DM_WIRE_LIST_KEYS, wait, err));
    dm_status status = dm_tcp_call_send(&call);
    if (status == DM_OK) {
        status = read_keys(&call, keys, n);
    }
    return dm_tcp_call_end(&call, status);
}

dm_status
dm_tcp_queue_push(dm_store *store, const char *key, const void *data, size_t size,
                  const dm_wait *wait, dm_error *err)
{
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_ONE_WAY,
                             DM_WIRE_QUEUE_PUSH, wait, err));
    dm_wire_put_key(dm_tcp_out(&call), key);
    dm_wire_put_bytes(dm_tcp_out(&call), data, size);
    return dm_tcp_call_end(&call, dm_tcp_call_send_one_way(&call));
}
