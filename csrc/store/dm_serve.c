/* What the server does, without sockets: see dm_serve.h. */
#include "store/dm_serve_waits.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "base/dm_alloc.h"

struct dm_will {
    dm_will *next;
    dm_bytes key;
    dm_bytes value;
};

/* --- requests: waiting -------------------------------------------------------------------- */

/* WAIT, WAIT_GET and WAIT_UNLESS. */
static dm_status
wait_for_keys(dm_session *session, const dm_wire_request *request, dm_error *err)
{
    dm_kv *kv = &session->serve->kv;
    dm_wire_slice items = request->items;
    dm_wire_slice key;
    session->waiting = request->op;
    while (dm_wire_next(&items, &key)) {
        if (!dm_kv_is_there(dm_kv_find(kv, key.data, key.size))) {
            DM_TRY(dm_session_watch(session, kv, key, DM_WATCH_KEY, err));
            session->missing++;
        }
    }
    if (request->op == DM_WIRE_WAIT_GET) {
        DM_TRY(dm_session_ask(session, request->items, err));
    }
    if (session->missing == 0) {
        dm_session_complete(session);
        return DM_OK;
    }
    items = request->unless;
    while (dm_wire_next(&items, &key)) {
        const dm_kv_entry *entry = dm_kv_find(kv, key.data, key.size);
        if (entry != NULL && entry->has_value) {
            dm_session_complete_gone(session, &entry->value);
            return DM_OK;
        }
        DM_TRY(dm_session_watch(session, kv, key, DM_WATCH_UNLESS, err));
    }
    return DM_OK;
}

static dm_status
wait_for_item(dm_session *session, const dm_wire_request *request, dm_error *err)
{
    dm_kv *kv = &session->serve->kv;
    const dm_kv_entry *entry = dm_kv_find(kv, request->key.data, request->key.size);
    if (entry != NULL && entry->items != 0) {
        dm_session_complete_pop(session, entry);
        return DM_OK;
    }
    session->waiting = request->op;
    return dm_session_watch(session, kv, request->key, DM_WATCH_POP, err);
}

/* Torch's: counts in the key for ever, so that it can be used once. */
static dm_status
wait_for_count(dm_session *session, const dm_wire_request *request, dm_error *err)
{
    dm_kv *kv = &session->serve->kv;
    dm_kv_entry *entry;
    int64_t count;
    DM_TRY(dm_kv_add(kv, request->key.data, request->key.size, 1, &count, &entry, err));
    dm_serve_value_has_come(entry);
    session->waiting = request->op;
    session->world = request->number;
    if (count < request->number) {
        return dm_session_watch(session, kv, request->key, DM_WATCH_COUNT, err);
    }
    dm_session_complete(session);
    dm_watch *self = entry->watcher;
    while (self != NULL) {
        dm_watch *next = self->next;
        /* A session that waits in a barrier has no other watch. */
        if (self->kind == DM_WATCH_COUNT && self->session->world <= count) {
            dm_session_complete(self->session);
        }
        self = next;
    }
    return DM_OK;
}

/* Ours: who leaves before the last has come (time-out, lost connection) has not come. */
static dm_status
wait_for_all(dm_session *session, const dm_wire_request *request, dm_error *err)
{
    dm_kv *barriers = &session->serve->barriers;
    session->waiting = request->op;
    session->world = request->number;
    DM_TRY(dm_session_watch(session, barriers, request->key, DM_WATCH_ARRIVAL, err));
    dm_kv_entry *entry = session->watches->entry;
    if ((int64_t)entry->n_watchers < request->number) {
        return DM_OK;
    }
    /* The last one takes the entry with it. */
    for (size_t n = entry->n_watchers; n > 0; n--) {
        dm_session_complete(((dm_watch *)entry->watcher)->session);
    }
    return DM_OK;
}

static void
cancel_wait(dm_session *session)
{
    if (session->waiting != 0) {
        dm_session_stop_waiting(session);
        dm_session_forget_asked(session);
    }
    dm_wire_put_u8(&session->out, DM_WIRE_CANCELLED);
}

/* --- requests: the others ------------------------------------------------------------------ */

static dm_status
set_value(dm_serve *serve, dm_wire_slice key, dm_wire_slice value, dm_error *err)
{
    dm_kv_entry *entry;
    DM_TRY(
        dm_kv_set(&serve->kv, key.data, key.size, value.data, value.size, &entry, err));
    dm_serve_value_has_come(entry);
    return DM_OK;
}

static dm_status
multi_set(dm_serve *serve, dm_wire_slice items, dm_error *err)
{
    dm_wire_slice key, value;
    while (dm_wire_next(&items, &key) && dm_wire_next(&items, &value)) {
        DM_TRY(set_value(serve, key, value, err));
    }
    return DM_OK;
}

static dm_status
compare_set(dm_session *session, const dm_wire_request *request, dm_error *err)
{
    const dm_bytes expected = {(char *)request->expected.data, request->expected.size};
    const dm_bytes desired = {(char *)request->value.data, request->value.size};
    dm_bytes now;
    dm_kv_entry *entry;
    DM_TRY(dm_kv_compare_set(&session->serve->kv, request->key.data, request->key.size,
                             &expected, &desired, &now, &entry, err));
    dm_wire_put_bytes(&session->out, now.data, now.size);
    if (entry != NULL) {
        dm_serve_value_has_come(entry);
    }
    return DM_OK;
}

/* Answers a failure that is the argument's fault; passes others on. */
static dm_status
refuse(dm_session *session, dm_status status, const dm_error *err)
{
    if (status == DM_ERR_VALUE) {
        dm_wire_put_u8(&session->out, DM_WIRE_REFUSED);
        dm_wire_put_bytes(&session->out, err->text, strlen(err->text));
        return DM_OK;
    }
    return status;
}

/* ADD and TRY_ADD. Torch's has no way to answer that it failed. */
static dm_status
add(dm_session *session, const dm_wire_request *request, dm_error *err)
{
    bool ours = request->op == DM_WIRE_TRY_ADD;
    dm_kv_entry *entry;
    int64_t sum;
    dm_status status = dm_kv_add(&session->serve->kv, request->key.data,
                                 request->key.size, request->number, &sum, &entry, err);
    if (status != DM_OK) {
        return ours ? refuse(session, status, err) : status;
    }
    if (ours) {
        dm_wire_put_u8(&session->out, DM_WIRE_OK);
    }
    dm_wire_put_u64(&session->out, (uint64_t)sum);
    dm_serve_value_has_come(entry);
    return DM_OK;
}

/* APPEND and TRY_APPEND. */
static dm_status
append(dm_session *session, const dm_wire_request *request, dm_error *err)
{
    bool ours = request->op == DM_WIRE_TRY_APPEND;
    dm_kv_entry *entry;
    dm_status status =
        dm_kv_append(&session->serve->kv, request->key.data, request->key.size,
                     request->value.data, request->value.size, &entry, err);
    if (status != DM_OK) {
        return ours ? refuse(session, status, err) : status;
    }
    if (ours) {
        dm_wire_put_u8(&session->out, DM_WIRE_OK);
    }
    dm_serve_value_has_come(entry);
    return DM_OK;
}

static void
check(dm_session *session, dm_wire_slice items)
{
    dm_wire_slice key;
    bool missing = false;
    while (!missing && dm_wire_next(&items, &key)) {
        missing = !dm_kv_is_there(dm_kv_find(&session->serve->kv, key.data, key.size));
    }
    dm_wire_put_u8(&session->out, missing);
}

static void
which(dm_session *session, dm_wire_slice items)
{
    dm_wire_slice key;
    dm_wire_put_u8(&session->out, DM_WIRE_OK);
    while (dm_wire_next(&items, &key)) {
        dm_wire_put_u8(&session->out, dm_kv_is_there(dm_kv_find(&session->serve->kv,
                                                                key.data, key.size)));
    }
}

static bool
put_key(void *arg, const dm_kv_entry *entry)
{
    dm_wire_put_bytes(arg, entry->key, entry->key_size);
    return true;
}

static dm_status
queue_push(dm_session *session, const dm_wire_request *request, dm_error *err)
{
    dm_kv_entry *entry;
    DM_TRY(dm_kv_push(&session->serve->kv, request->key.data, request->key.size,
                      request->value.data, request->value.size, &entry, err));
    dm_serve_item_has_come(entry);
    return DM_OK;
}

static void
queue_pop(dm_session *session, dm_wire_slice key)
{
    dm_bytes value;
    bool taken = dm_kv_pop(&session->serve->kv, key.data, key.size, &value);
    dm_wire_put_u64(&session->out, taken);
    if (taken) {
        dm_wire_put_bytes(&session->out, value.data, value.size);
        dm_bytes_free(&value);
    }
}

/* --- wills --------------------------------------------------------------------------------- */

static void
free_will(dm_will *will)
{
    dm_bytes_free(&will->key);
    dm_bytes_free(&will->value);
    dm_free(will);
}

static dm_status
add_will(dm_session *session, const dm_wire_request *request, dm_error *err)
{
    dm_will *will = dm_calloc(1, sizeof(*will));
    if (will == NULL) {
        return dm_error_set_no_memory(err, "a will");
    }
    dm_status status;
    DM_TRY_GOTO(status,
                dm_bytes_copy(request->key.data, request->key.size, &will->key, err),
                free_will);
    DM_TRY_GOTO(
        status,
        dm_bytes_copy(request->value.data, request->value.size, &will->value, err),
        free_will);
    for (dm_will **link = &session->wills; *link != NULL; link = &(*link)->next) {
        dm_will *old = *link;
        if (old->key.size == will->key.size &&
            memcmp(old->key.data, will->key.data, will->key.size) == 0) {
            *link = old->next;
            free_will(old);
            break;
        }
    }
    will->next = session->wills;
    session->wills = will;
    dm_wire_put_u8(&session->out, DM_WIRE_OK);
    return DM_OK;

free_will:
    free_will(will);
    return status;
}

/* Executes or only forgets them. */
static void
end_wills(dm_session *session, bool execute)
{
    while (session->wills != NULL) {
        dm_will *will = session->wills;
        session->wills = will->next;
        if (execute) {
            dm_wire_slice key = {will->key.data, will->key.size};
            dm_wire_slice value = {will->value.data, will->value.size};
            (void)set_value(session->serve, key, value, NULL);
        }
        free_will(will);
    }
}

/* --- opening ------------------------------------------------------------------------------- */

static void
count(dm_session *session, bool counts)
{
    if (session->is_counted != counts) {
        session->is_counted = counts;
        session->serve->clients += counts ? 1 : -1;
    }
}

static dm_status
validate(dm_session *session, int64_t magic, dm_error *err)
{
    if (magic != DM_WIRE_MAGIC) {
        return dm_error_set(err, DM_ERR_PROTOCOL, "wrong magic 0x%08" PRIx64,
                            (uint64_t)magic);
    }
    session->is_valid = true;
    count(session, true);
    return DM_OK;
}

static void
ping(dm_session *session, uint32_t nonce)
{
    uint32_t answer = nonce;
    if ((nonce & UINT32_C(0xFFFF0000)) == DM_WIRE_HELLO) {
        answer = DM_WIRE_HELLO_OURS;
        if (session->serve->token != NULL) {
            answer |= DM_WIRE_HELLO_TOKEN;
        }
        if ((nonce & DM_WIRE_HELLO_SECONDARY) != 0) {
            count(session, false);
        }
    }
    dm_wire_put_u32(&session->out, answer);
}

/* Takes as long for any token of one length, right or wrong. */
static bool
token_is_right(const dm_serve *serve, dm_wire_slice given)
{
    size_t size = strlen(serve->token);
    volatile unsigned char differs = size != given.size;
    for (size_t i = 0; i < given.size; i++) {
        unsigned char right = size != 0 ? (unsigned char)serve->token[i % size] : 0;
        differs |= (unsigned char)(right ^ (unsigned char)given.data[i]);
    }
    return differs == 0;
}

static dm_status
take_token(dm_session *session, dm_wire_slice given)
{
    if (session->serve->token == NULL || token_is_right(session->serve, given)) {
        session->is_authorised = true;
        dm_wire_put_u8(&session->out, DM_WIRE_OK);
    }
    else {
        static const char text[] = "wrong token";
        dm_wire_put_u8(&session->out, DM_WIRE_REFUSED);
        dm_wire_put_bytes(&session->out, text, sizeof(text) - 1);
    }
    return DM_OK;
}

static dm_status
check_allowed(const dm_session *session, uint8_t op, dm_error *err)
{
    if (op == DM_WIRE_VALIDATE) {
        return DM_OK;
    }
    if (!session->is_valid) {
        return dm_error_set(err, DM_ERR_PROTOCOL, "opcode 0x%02x before the magic", op);
    }
    if (!session->is_authorised && op != DM_WIRE_PING && op != DM_WIRE_TOKEN) {
        return dm_error_set(err, DM_ERR_PROTOCOL, "opcode 0x%02x before the token", op);
    }
    return DM_OK;
}

/* --- one request ------------------------------------------------------------------------------ */

static dm_status
handle(dm_session *session, const dm_wire_request *request, dm_error *err)
{
    DM_TRY(check_allowed(session, request->op, err));
    dm_serve *serve = session->serve;
    dm_wire_buffer *out = &session->out;
    const dm_wire_slice key = request->key;
    const dm_kv_entry *entry;
    dm_wire_slice value;
    switch ((enum dm_wire_op)request->op) {
    case DM_WIRE_VALIDATE:
        return validate(session, request->number, err);
    case DM_WIRE_PING:
        ping(session, (uint32_t)request->number);
        return DM_OK;
    case DM_WIRE_TOKEN:
        return take_token(session, request->value);
    case DM_WIRE_SET:
        return set_value(serve, key, request->value, err);
    case DM_WIRE_MULTI_SET:
        return multi_set(serve, request->items, err);
    case DM_WIRE_COMPARE_SET:
        return compare_set(session, request, err);
    case DM_WIRE_GET:
        value = dm_serve_value_of(serve, key);
        dm_wire_put_bytes(out, value.data, value.size);
        return DM_OK;
    case DM_WIRE_MULTI_GET:
        DM_TRY(dm_session_ask(session, request->items, err));
        dm_session_send_values(session);
        return DM_OK;
    case DM_WIRE_ADD:
    case DM_WIRE_TRY_ADD:
        return add(session, request, err);
    case DM_WIRE_APPEND:
    case DM_WIRE_TRY_APPEND:
        return append(session, request, err);
    case DM_WIRE_CHECK:
        check(session, request->items);
        return DM_OK;
    case DM_WIRE_WHICH:
        which(session, request->items);
        return DM_OK;
    case DM_WIRE_WAIT:
    case DM_WIRE_WAIT_GET:
    case DM_WIRE_WAIT_UNLESS:
        return wait_for_keys(session, request, err);
    case DM_WIRE_WAIT_POP:
        return wait_for_item(session, request, err);
    case DM_WIRE_WAIT_ALL:
        return wait_for_all(session, request, err);
    case DM_WIRE_BARRIER:
        return wait_for_count(session, request, err);
    case DM_WIRE_CANCEL_WAIT:
        cancel_wait(session);
        return DM_OK;
    case DM_WIRE_DELETE_KEY:
        dm_wire_put_u64(out, dm_kv_delete(&serve->kv, key.data, key.size));
        return DM_OK;
    case DM_WIRE_NUM_KEYS:
        dm_wire_put_u64(out, serve->kv.n_values);
        return DM_OK;
    case DM_WIRE_LIST_KEYS:
        dm_wire_put_u64(out, serve->kv.n_values);
        dm_kv_each(&serve->kv, put_key, out);
        return DM_OK;
    case DM_WIRE_QUEUE_PUSH:
        return queue_push(session, request, err);
    case DM_WIRE_QUEUE_POP:
        queue_pop(session, key);
        return DM_OK;
    case DM_WIRE_QUEUE_LEN:
        entry = dm_kv_find(&serve->kv, key.data, key.size);
        dm_wire_put_u64(out, entry != NULL ? entry->items : 0);
        return DM_OK;
    case DM_WIRE_WILL:
        return add_will(session, request, err);
    case DM_WIRE_GOODBYE:
        end_wills(session, false);
        return DM_OK;
    }
    return dm_error_set(err, DM_ERR_PROTOCOL, "no opcode 0x%02x", request->op);
}

dm_status
dm_session_feed(dm_session *session, const char *data, size_t size, size_t *used,
                dm_error *err)
{
    *used = 0;
    if (session->waiting == 0) {
        dm_session_send_values(session);
    }
    while (*used < size) {
        uint8_t op = (uint8_t)data[*used];
        bool at_once =
            session->waiting != 0 && (op == DM_WIRE_CANCEL_WAIT || op == DM_WIRE_PING);
        if (dm_session_is_stalled(session) && !at_once) {
            break;
        }
        dm_wire_request request;
        size_t n;
        dm_status status = dm_wire_decode(data + *used, size - *used, &session->scan,
                                          &request, &n, err);
        if (status == DM_ERR_AGAIN) {
            break;
        }
        DM_TRY(status);
        DM_TRY(handle(session, &request, err));
        *used += n;
    }
    return dm_wire_check(&session->out, err);
}

/* --- life ------------------------------------------------------------------------------------- */

void
dm_serve_init(dm_serve *serve, const char *token)
{
    *serve = (dm_serve){.token = token};
    dm_kv_init(&serve->kv);
    dm_kv_init(&serve->barriers);
}

void
dm_serve_fini(dm_serve *serve)
{
    assert(serve->clients == 0 && serve->woken == NULL);
    assert(serve->barriers.n_entries == 0);
    dm_kv_fini(&serve->barriers);
    dm_kv_fini(&serve->kv);
}

void
dm_session_init(dm_session *session, dm_serve *serve)
{
    *session = (dm_session){.serve = serve, .is_authorised = serve->token == NULL};
}

void
dm_session_fini(dm_session *session)
{
    dm_session_stop_waiting(session);
    dm_session_forget_asked(session);
    end_wills(session, true);
    count(session, false);
    dm_session_unwake(session);
    dm_wire_buffer_fini(&session->out);
}
