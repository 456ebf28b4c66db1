/* One connection of a tcp store's client: see dm_tcp_conn.h. */
#include "store/dm_tcp_conn.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/dm_alloc.h"
#include "store/dm_net.h"

enum {
    FIRST_PAUSE_MS = 1,
    LAST_PAUSE_MS = 200,
    GRACE_S = 2, /* for the server to answer a cancelled wait */
};

/* --- sending and reading ------------------------------------------------------------- */

void
dm_tcp_conn_begin(dm_tcp_conn *conn, uint8_t op)
{
    if (conn->out.failed || conn->out.capacity > sizeof(conn->in)) {
        dm_wire_buffer_fini(&conn->out);
    }
    conn->out.size = 0;
    conn->cut = DM_OK;
    dm_wire_put_u8(&conn->out, op);
}

static dm_status
broken(dm_tcp_conn *conn, dm_status status)
{
    if (status != DM_OK) {
        conn->is_broken = true;
    }
    return status;
}

dm_status
dm_tcp_conn_send(dm_tcp_conn *conn, const dm_wait *wait, dm_error *err)
{
    DM_TRY(dm_wire_check(&conn->out, err));
    return broken(conn,
                  dm_net_send(conn->fd, conn->out.data, conn->out.size, wait, err));
}

/* At least `n` bytes in `in`. Breaks nothing: it can be called again. */
static dm_status
fill(dm_tcp_conn *conn, size_t n, const dm_wait *wait, dm_error *err)
{
    assert(n <= sizeof(conn->in));
    if (conn->in_size - conn->in_at < n && conn->in_at != 0) {
        conn->in_size -= conn->in_at;
        memmove(conn->in, conn->in + conn->in_at, conn->in_size);
        conn->in_at = 0;
    }
    while (conn->in_size - conn->in_at < n) {
        size_t got;
        DM_TRY(dm_net_receive(conn->fd, conn->in + conn->in_size,
                              sizeof(conn->in) - conn->in_size, wait, &got, err));
        conn->in_size += got;
    }
    return DM_OK;
}

/* What stands in `in`, then straight from the socket. */
dm_status
dm_tcp_conn_read_raw(dm_tcp_conn *conn, const dm_wait *wait, void *data, size_t size,
                     dm_error *err)
{
    char *to = data;
    while (size > 0) {
        size_t n;
        if (conn->in_at == conn->in_size && size >= sizeof(conn->in)) {
            DM_TRY(broken(conn, dm_net_receive(conn->fd, to, size, wait, &n, err)));
        }
        else {
            DM_TRY(broken(conn, fill(conn, 1, wait, err)));
            n = conn->in_size - conn->in_at;
            n = n < size ? n : size;
            memcpy(to, conn->in + conn->in_at, n);
            conn->in_at += n;
        }
        to += n;
        size -= n;
    }
    return DM_OK;
}

dm_status
dm_tcp_conn_read_u8(dm_tcp_conn *conn, const dm_wait *wait, uint8_t *value,
                    dm_error *err)
{
    return dm_tcp_conn_read_raw(conn, wait, value, 1, err);
}

dm_status
dm_tcp_conn_read_u32(dm_tcp_conn *conn, const dm_wait *wait, uint32_t *value,
                     dm_error *err)
{
    char bytes[4];
    DM_TRY(dm_tcp_conn_read_raw(conn, wait, bytes, sizeof(bytes), err));
    *value = dm_wire_load_u32(bytes);
    return DM_OK;
}

dm_status
dm_tcp_conn_read_i64(dm_tcp_conn *conn, const dm_wait *wait, int64_t *value,
                     dm_error *err)
{
    char bytes[8];
    DM_TRY(dm_tcp_conn_read_raw(conn, wait, bytes, sizeof(bytes), err));
    *value = (int64_t)dm_wire_load_u64(bytes);
    return DM_OK;
}

dm_status
dm_tcp_conn_read_bytes(dm_tcp_conn *conn, const dm_wait *wait, size_t limit,
                       dm_bytes *value, dm_error *err)
{
    int64_t size;
    DM_TRY(dm_tcp_conn_read_i64(conn, wait, &size, err));
    if (size < 0 || (uint64_t)size > limit) {
        conn->is_broken = true;
        return dm_error_set(err, DM_ERR_PROTOCOL,
                            "the server announces %llu bytes, at most %zu are allowed",
                            (unsigned long long)size, limit);
    }
    char *data = dm_malloc_array((size_t)size + 1, 1);
    if (data == NULL) {
        conn->is_broken = true;
        return dm_error_set_no_memory(err, "a store's value");
    }
    dm_status status = dm_tcp_conn_read_raw(conn, wait, data, (size_t)size, err);
    if (status != DM_OK) {
        dm_free(data);
        return status;
    }
    data[size] = '\0';
    *value = (dm_bytes){data, (size_t)size};
    return DM_OK;
}

/* --- waiting ---------------------------------------------------------------------------- */

/* The wait itself ended, not the connection. */
static bool
is_cut(dm_status status)
{
    return status != DM_OK && status != DM_ERR_CONNECTION && status != DM_ERR_SYSTEM;
}

static void
start_grace(dm_tcp_conn *conn)
{
    conn->grace = (dm_wait){dm_clock_deadline(GRACE_S * DM_NS_PER_S), NULL, NULL};
}

dm_status
dm_tcp_conn_read_pong(dm_tcp_conn *conn, const dm_wait *wait, dm_error *err)
{
    enum { PONG_SIZE = 4 };
    dm_status cut = DM_OK;
    dm_status status = fill(conn, PONG_SIZE, wait, err);
    if (is_cut(status)) {
        cut = status;
        start_grace(conn);
        if (fill(conn, PONG_SIZE, &conn->grace, NULL) != DM_OK) {
            return broken(conn, cut);
        }
        status = DM_OK;
    }
    DM_TRY(broken(conn, status));
    uint32_t answer = 0;
    DM_TRY(dm_tcp_conn_read_u32(conn, wait, &answer, err));
    if (answer != DM_TCP_PONG) {
        conn->is_broken = true;
        return dm_error_set(err, DM_ERR_PROTOCOL, "a wrong answer to a ping");
    }
    return cut == DM_ERR_TIMEOUT ? DM_OK : cut;
}

/* The next byte that begins something; a pong is read whole and counted. */
static dm_status
read_beginning(dm_tcp_conn *conn, const dm_wait *wait, uint8_t *byte, dm_error *err)
{
    DM_TRY(fill(conn, 1, wait, err));
    bool pong = (uint8_t)conn->in[conn->in_at] == DM_TCP_PONG;
    DM_TRY(fill(conn, pong ? 4 : 1, wait, err));
    *byte = (uint8_t)conn->in[conn->in_at];
    conn->in_at += pong ? 4 : 1;
    conn->pongs += pong;
    return DM_OK;
}

/* Cancels the wait at the server. True: the connection is usable and `answer` holds
 * what came first, the wait's own answer or DM_WIRE_CANCELLED. */
static bool
cancel(dm_tcp_conn *conn, uint8_t *answer)
{
    start_grace(conn);
    dm_tcp_conn_begin(conn, DM_WIRE_CANCEL_WAIT);
    if (dm_tcp_conn_send(conn, &conn->grace, NULL) != DM_OK) {
        return false;
    }
    do {
        if (read_beginning(conn, &conn->grace, answer, NULL) != DM_OK) {
            return false;
        }
    } while (*answer == DM_TCP_PONG);
    return true;
}

dm_status
dm_tcp_conn_await(dm_tcp_conn *conn, const dm_wait **wait, uint8_t *answer,
                  dm_error *err)
{
    dm_status status = read_beginning(conn, *wait, answer, err);
    if (!is_cut(status)) {
        return broken(conn, status);
    }
    uint8_t first;
    if (!cancel(conn, &first)) {
        return broken(conn, status);
    }
    if (first == DM_WIRE_CANCELLED) {
        return status;
    }
    conn->cut = status;
    *wait = &conn->grace;
    *answer = first;
    return DM_OK;
}

dm_status
dm_tcp_conn_finish_wait(dm_tcp_conn *conn, unsigned pings)
{
    dm_status cut = conn->cut;
    bool cancelled = cut == DM_OK;
    conn->cut = DM_OK;
    if (cancelled && conn->pongs == pings) {
        return DM_OK;
    }
    start_grace(conn);
    while (!cancelled || conn->pongs != pings) {
        uint8_t byte;
        if (read_beginning(conn, &conn->grace, &byte, NULL) != DM_OK ||
            (byte != DM_TCP_PONG && (cancelled || byte != DM_WIRE_CANCELLED))) {
            conn->is_broken = true;
            break;
        }
        cancelled = cancelled || byte == DM_WIRE_CANCELLED;
    }
    return cut == DM_ERR_TIMEOUT ? DM_OK : cut;
}

/* --- opening ---------------------------------------------------------------------------- */

static dm_status
send_token(dm_tcp_conn *conn, const char *token, const dm_wait *wait, dm_error *err)
{
    if (token == NULL) {
        return dm_error_set_native(err, DM_ERR_CONNECTION, EACCES,
                                   "the server asks for a token, and none was given "
                                   "(DEVICEMESH_STORE_TOKEN)");
    }
    dm_tcp_conn_begin(conn, DM_WIRE_TOKEN);
    dm_wire_put_bytes(&conn->out, token, strlen(token));
    DM_TRY(dm_tcp_conn_send(conn, wait, err));
    uint8_t answer;
    DM_TRY(dm_tcp_conn_read_u8(conn, wait, &answer, err));
    if (answer != DM_WIRE_OK) {
        return dm_error_set_native(err, DM_ERR_CONNECTION, EACCES,
                                   "the server does not accept the token "
                                   "(DEVICEMESH_STORE_TOKEN)");
    }
    return DM_OK;
}

static dm_status
shake_hands(dm_tcp_conn *conn, const dm_tcp_target *target, const dm_wait *wait,
            dm_error *err)
{
    uint32_t hello = DM_WIRE_HELLO | (target->secondary ? DM_WIRE_HELLO_SECONDARY : 0);
    dm_tcp_conn_begin(conn, DM_WIRE_VALIDATE);
    dm_wire_put_u32(&conn->out, DM_WIRE_MAGIC);
    dm_wire_put_u8(&conn->out, DM_WIRE_PING);
    dm_wire_put_u32(&conn->out, hello);
    DM_TRY(dm_tcp_conn_send(conn, wait, err));
    uint32_t answer;
    dm_status status = dm_tcp_conn_read_u32(conn, wait, &answer, err);
    if (status == DM_ERR_TIMEOUT) {
        return dm_error_set(err, status,
                            "timed out: connected, but what listens there "
                            "does not answer as a store does");
    }
    DM_TRY(status);
    conn->is_ours = (answer & UINT32_C(0xFFFF0000)) == DM_WIRE_HELLO_OURS;
    if (!conn->is_ours && answer != hello) {
        return dm_error_set(err, DM_ERR_PROTOCOL,
                            "what listens there is no store (it answered 0x%08x)",
                            answer);
    }
    if (conn->is_ours && (answer & DM_WIRE_HELLO_TOKEN) != 0) {
        DM_TRY(send_token(conn, target->token, wait, err));
    }
    return DM_OK;
}

/* One attempt. */
static dm_status
try_open(const dm_tcp_target *target, const dm_wait *wait, dm_tcp_conn *conn,
         dm_error *err)
{
    dm_net_address addresses[DM_NET_MAX_ADDRESSES];
    int n = 0;
    DM_TRY(dm_net_resolve(target->host, target->port, wait, addresses, &n, err));
    DM_TRY(dm_net_connect(addresses, n, wait, &conn->fd, err));
    dm_status status = shake_hands(conn, target, wait, err);
    if (status != DM_OK) {
        close(conn->fd);
        dm_wire_buffer_fini(&conn->out);
        *conn = (dm_tcp_conn){.fd = -1};
    }
    return status;
}

static dm_status
open_with_retries(const dm_tcp_target *target, const dm_wait *wait, dm_tcp_conn *conn,
                  dm_error *err)
{
    int64_t started = dm_clock_now();
    int64_t pause = FIRST_PAUSE_MS * DM_NS_PER_MS;
    for (int attempts = 1;; attempts++) {
        dm_status status = try_open(target, wait, conn, err);
        if (status == DM_OK || !target->retry || !dm_net_may_retry(err)) {
            return status;
        }
        dm_error reason = *err;
        status = dm_net_sleep(pause, wait, err);
        if (status == DM_ERR_TIMEOUT) {
            return dm_error_set(err, status,
                                "timed out after %.3g s and %d attempts: %s",
                                (double)(dm_clock_now() - started) / DM_NS_PER_S,
                                attempts, reason.text);
        }
        DM_TRY(status);
        pause = pause * 2 < LAST_PAUSE_MS * DM_NS_PER_MS ? pause * 2
                                                         : LAST_PAUSE_MS * DM_NS_PER_MS;
    }
}

dm_status
dm_tcp_conn_open(const dm_tcp_target *target, const dm_wait *wait, dm_tcp_conn **out,
                 dm_error *err)
{
    dm_error local; /* retries read the record, and the caller's may be NULL */
    dm_tcp_conn *conn = dm_calloc(1, sizeof(*conn));
    if (conn == NULL) {
        return dm_error_set_no_memory(err, "a store's connection");
    }
    conn->fd = -1;
    dm_status status = open_with_retries(target, wait, conn, &local);
    if (status != DM_OK) {
        if (status != DM_ERR_NO_MEMORY && status != DM_ERR_INTERRUPTED) {
            dm_error_context(&local, "store at %s:%u", target->host, target->port);
        }
        if (err != NULL) {
            *err = local;
        }
        dm_free(conn);
        return status;
    }
    *out = conn;
    return DM_OK;
}

void
dm_tcp_conn_free(dm_tcp_conn *conn)
{
    if (conn == NULL) {
        return;
    }
    close(conn->fd);
    dm_wire_buffer_fini(&conn->out);
    dm_free(conn);
}
