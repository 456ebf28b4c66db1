/* What sessions wait for, and how they are told: see dm_serve_waits.h. */
#include "store/dm_serve_waits.h"

#include <assert.h>

#include "base/dm_alloc.h"

/* --- answers ------------------------------------------------------------------------------ */

size_t
dm_session_pending(const dm_session *session)
{
    return session->out.size - session->out_sent;
}

void
dm_session_sent(dm_session *session, size_t size)
{
    session->out_sent += size;
    assert(session->out_sent <= session->out.size);
    if (session->out_sent != session->out.size) {
        return;
    }
    session->out_sent = 0;
    session->out.size = 0;
    if (session->out.capacity > DM_SERVE_OUT_MAX / 16) {
        dm_wire_buffer_fini(&session->out);
    }
}

bool
dm_session_is_stalled(const dm_session *session)
{
    return session->waiting != 0 || session->asked != NULL ||
           dm_session_pending(session) > DM_SERVE_OUT_MAX;
}

/* Puts the session on the list of those that the owner must look at. */
static void
wake(dm_session *session)
{
    if (session->is_woken) {
        return;
    }
    dm_serve *serve = session->serve;
    session->is_woken = true;
    session->previous_woken = NULL;
    session->next_woken = serve->woken;
    if (serve->woken != NULL) {
        serve->woken->previous_woken = session;
    }
    serve->woken = session;
}

void
dm_session_unwake(dm_session *session)
{
    if (!session->is_woken) {
        return;
    }
    session->is_woken = false;
    if (session->previous_woken != NULL) {
        session->previous_woken->next_woken = session->next_woken;
    }
    else {
        session->serve->woken = session->next_woken;
    }
    if (session->next_woken != NULL) {
        session->next_woken->previous_woken = session->previous_woken;
    }
}

dm_session *
dm_serve_next_woken(dm_serve *serve)
{
    dm_session *session = serve->woken;
    if (session != NULL) {
        dm_session_unwake(session);
    }
    return session;
}

dm_wire_slice
dm_serve_value_of(const dm_serve *serve, dm_wire_slice key)
{
    const dm_kv_entry *entry = dm_kv_find(&serve->kv, key.data, key.size);
    if (entry == NULL || !entry->has_value) {
        return (dm_wire_slice){NULL, 0};
    }
    return (dm_wire_slice){entry->value.data, entry->value.size};
}

void
dm_session_send_values(dm_session *session)
{
    dm_wire_slice key;
    while (session->asked != NULL && dm_session_pending(session) <= DM_SERVE_OUT_MAX) {
        if (!dm_wire_next(&session->rest, &key)) {
            dm_free(session->asked);
            session->asked = NULL;
            return;
        }
        dm_wire_slice value = dm_serve_value_of(session->serve, key);
        dm_wire_put_bytes(&session->out, value.data, value.size);
    }
}

dm_status
dm_session_ask(dm_session *session, dm_wire_slice items, dm_error *err)
{
    session->asked = dm_memdup(items.data, items.size);
    if (session->asked == NULL) {
        return dm_error_set_no_memory(err, "a list of keys");
    }
    session->rest = (dm_wire_slice){session->asked, items.size};
    return DM_OK;
}

/* --- watches ------------------------------------------------------------------------------ */

dm_status
dm_session_watch(dm_session *session, dm_kv *kv, dm_wire_slice key, dm_watch_kind kind,
                 dm_error *err)
{
    dm_watch *self = dm_calloc(1, sizeof(*self));
    dm_kv_entry *entry = self != NULL ? dm_kv_claim(kv, key.data, key.size) : NULL;
    if (entry == NULL) {
        dm_free(self);
        return dm_error_set_no_memory(err, "a waiting client");
    }
    self->session = session;
    self->kv = kv;
    self->entry = entry;
    self->kind = kind;
    /* `previous` of the first is the last. */
    dm_watch *first = entry->watcher;
    if (first == NULL) {
        entry->watcher = self;
        self->previous = self;
    }
    else {
        self->previous = first->previous;
        first->previous->next = self;
        first->previous = self;
    }
    entry->n_watchers++;
    self->next_of_session = session->watches;
    session->watches = self;
    return DM_OK;
}

/* Takes a watch off its entry, which may vanish. It stays its session's, done with. */
static void
detach(dm_watch *self)
{
    dm_kv_entry *entry = self->entry;
    dm_watch *first = entry->watcher;
    if (self->next != NULL) {
        self->next->previous = self->previous;
    }
    else {
        first->previous = self->previous;
    }
    if (self == first) {
        entry->watcher = self->next;
    }
    else {
        self->previous->next = self->next;
    }
    entry->n_watchers--;
    self->entry = NULL;
    dm_kv_tidy(self->kv, entry);
}

void
dm_session_stop_waiting(dm_session *session)
{
    while (session->watches != NULL) {
        dm_watch *self = session->watches;
        session->watches = self->next_of_session;
        if (self->entry != NULL) {
            detach(self);
        }
        dm_free(self);
    }
    session->waiting = 0;
    session->missing = 0;
}

void
dm_session_forget_asked(dm_session *session)
{
    dm_free(session->asked);
    session->asked = NULL;
}

void
dm_session_complete(dm_session *session)
{
    dm_session_stop_waiting(session);
    dm_wire_put_u8(&session->out, DM_WIRE_OK); /* for WAIT and BARRIER the same byte */
    dm_session_send_values(session);
    wake(session);
}

void
dm_session_complete_gone(dm_session *session, const dm_bytes *value)
{
    dm_session_stop_waiting(session);
    dm_wire_put_u8(&session->out, DM_WIRE_GONE);
    dm_wire_put_bytes(&session->out, value->data, value->size);
    wake(session);
}

void
dm_session_complete_pop(dm_session *session, const dm_kv_entry *entry)
{
    dm_kv *kv = &session->serve->kv;
    dm_bytes value;
    dm_session_stop_waiting(session);
    bool taken = dm_kv_pop(kv, entry->key, entry->key_size, &value);
    assert(taken);
    (void)taken;
    dm_wire_put_u8(&session->out, DM_WIRE_OK);
    dm_wire_put_bytes(&session->out, value.data, value.size);
    dm_bytes_free(&value);
    wake(session);
}

/* One key that a session waits for has come. */
static void
key_has_come(dm_watch *self)
{
    dm_session *session = self->session;
    detach(self);
    if (--session->missing == 0) {
        dm_session_complete(session);
    }
}

void
dm_serve_value_has_come(dm_kv_entry *entry)
{
    dm_watch *self = entry->watcher;
    while (self != NULL) {
        if (self->kind == DM_WATCH_KEY) {
            key_has_come(self);
        }
        else if (self->kind == DM_WATCH_UNLESS) {
            dm_session_complete_gone(self->session, &entry->value);
        }
        else {
            self = self->next;
            continue;
        }
        /* Any of the entry's watches may be gone now: from the start. The entry itself
         * stays, it has a value. */
        self = entry->watcher;
    }
}

void
dm_serve_item_has_come(dm_kv_entry *entry)
{
    dm_watch *self = entry->watcher;
    while (self != NULL && self->kind != DM_WATCH_KEY && self->kind != DM_WATCH_POP) {
        self = self->next;
    }
    if (self != NULL && self->kind == DM_WATCH_KEY) {
        key_has_come(self);
    }
    else if (self != NULL) {
        dm_session_complete_pop(self->session, entry);
    }
}
