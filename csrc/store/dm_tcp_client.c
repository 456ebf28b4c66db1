/* The tcp store: a client of our server or of torch's.
 *
 * Each call is one request (or a few) over a connection of the pool (dm_tcp_pool.h). Two
 * tables of operations: what our server understands, and torch's protocol alone.
 */
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "base/dm_alloc.h"
#include "store/dm_net.h"
#include "store/dm_tcp_calls.h"

/* --- wills ------------------------------------------------------------------------------------------ */

static dm_status
send_will(dm_tcp_call *call, const char *key, const void *data, size_t size)
{
    uint8_t answer;
    dm_tcp_conn_begin(call->conn, DM_WIRE_WILL);
    dm_wire_put_key(dm_tcp_out(call), key);
    dm_wire_put_bytes(dm_tcp_out(call), data, size);
    DM_TRY(dm_tcp_call_send(call));
    DM_TRY(dm_tcp_conn_read_u8(call->conn, call->wait, &answer, call->err));
    return dm_tcp_check_answer(call, answer);
}

/* Never blocks: one byte always fits. */
static void
say_goodbye(dm_tcp_will *will)
{
    const dm_wait now = {0, NULL, NULL};
    dm_tcp_conn_begin(will->conn, DM_WIRE_GOODBYE);
    (void)dm_tcp_conn_send(will->conn, &now, NULL);
}

static void
free_will(dm_tcp_will *will)
{
    if (will != NULL) {
        dm_tcp_conn_free(will->conn);
        dm_free(will);
    }
}

/* Takes the will of that key off the list; NULL when there is none. */
static dm_tcp_will *
take_will_locked(dm_tcp_store *self, const char *key)
{
    for (dm_tcp_will **link = &self->wills; *link != NULL; link = &(*link)->next) {
        if (strcmp((*link)->key, key) == 0) {
            dm_tcp_will *will = *link;
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
    dm_tcp_store *self = dm_tcp_store_of(store);
    size_t key_size = strlen(key) + 1;
    dm_tcp_will *will = dm_calloc(1, sizeof(*will) + key_size);
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
    dm_tcp_will *old = NULL;
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

static dm_tcp_will *
take_wills(dm_tcp_store *self)
{
    pthread_mutex_lock(&self->mutex);
    dm_tcp_will *wills = self->wills;
    self->wills = NULL;
    pthread_mutex_unlock(&self->mutex);
    return wills;
}

static void
tcp_close(dm_store *store)
{
    dm_tcp_store *self = dm_tcp_store_of(store);
    dm_tcp_pool_close(&self->pool); /* first: no will is added from now on */
    dm_tcp_will *wills = take_wills(self);
    while (wills != NULL) {
        dm_tcp_will *will = wills;
        wills = will->next;
        say_goodbye(will);
        free_will(will);
    }
}

/* In a forked child the descriptors are closed, which ends nothing for the parent. */
static void
tcp_free(dm_store *store)
{
    dm_tcp_store *self = dm_tcp_store_of(store);
    bool forked = store->pid != getpid();
    dm_tcp_pool_fini(&self->pool, forked);
    while (self->wills != NULL) {
        dm_tcp_will *will = self->wills;
        self->wills = will->next;
        free_will(will);
    }
    if (!forked) {
        pthread_mutex_destroy(&self->mutex);
    }
    dm_free(self);
}

#define TCP_COMMON_OPS                                                                 \
    .kind = "tcp", .set = dm_tcp_set, .compare_set = dm_tcp_compare_set,               \
    .check = dm_tcp_check, .wait = dm_tcp_wait, .delete_key = dm_tcp_delete_key,       \
    .multi_set = dm_tcp_multi_set, .num_keys = dm_tcp_num_keys,                        \
    .list_keys = dm_tcp_list_keys, .queue_push = dm_tcp_queue_push,                    \
    .queue_len = dm_tcp_queue_len, .close = tcp_close, .free = tcp_free

static const dm_store_ops ours_ops = {
    TCP_COMMON_OPS,
    .get = dm_tcp_ours_get,
    .add = dm_tcp_ours_add,
    .append = dm_tcp_ours_append,
    .multi_get = dm_tcp_ours_multi_get,
    .queue_pop = dm_tcp_ours_queue_pop,
    .barrier = dm_tcp_ours_barrier,
    .wait_unless = dm_tcp_ours_wait_unless,
    .will = ours_will,
};

static const dm_store_ops torch_ops = {
    TCP_COMMON_OPS,
    .get = dm_tcp_torch_get,
    .add = dm_tcp_torch_add,
    .append = dm_tcp_torch_append,
    .multi_get = dm_tcp_torch_multi_get,
    .queue_pop = dm_tcp_torch_queue_pop,
};

dm_status
dm_store_tcp_new(const char *host, uint16_t port, const char *token,
                 const dm_wait *wait, dm_store **store, dm_error *err)
{
    dm_tcp_store *self = dm_calloc(1, sizeof(*self));
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
    const dm_tcp_store *self = (const dm_tcp_store *)store;
    *port = self->pool.port;
    return self->pool.host;
}

static dm_status
count_workers(dm_store *store, int64_t amount, const dm_wait *wait, int64_t *n,
              dm_error *err)
{
    static const char key[] = "init/"; /* without the '/' that clients put in front */
    dm_tcp_call call;
    DM_TRY(dm_tcp_call_begin(&call, &dm_tcp_store_of(store)->pool, DM_TCP_ANSWERED,
                             DM_WIRE_ADD, wait, err));
    dm_wire_put_bytes(dm_tcp_out(&call), key, sizeof(key) - 1);
    dm_wire_put_u64(dm_tcp_out(&call), (uint64_t)amount);
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
            const dm_tcp_pool *pool = &dm_tcp_store_of(store)->pool;
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
