/* Messages and who takes them: see dm_mail_private.h.
 *
 * A message that comes is taken by the oldest receive that asks for its sender and tag, a
 * receive takes the oldest message that has come; so those of one sender and tag keep
 * their order.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "backend/mail/dm_mail_private.h"
#include "base/dm_alloc.h"

/* --- lists ------------------------------------------------------------------------------ */

void
mail_list_init(mail_list *list)
{
    list->head = NULL;
    list->tail = &list->head;
}

void
mail_list_add(mail_list *list, dm_mail_item *item)
{
    item->next = NULL;
    *list->tail = item;
    list->tail = &item->next;
}

bool
mail_list_remove(mail_list *list, dm_mail_item *item)
{
    for (dm_mail_item **at = &list->head; *at != NULL; at = &(*at)->next) {
        if (*at == item) {
            *at = item->next;
            if (item->next == NULL) {
                list->tail = at;
            }
            item->next = NULL;
            return true;
        }
    }
    return false;
}

/* The item of the list with that number and peer, or NULL. */
static dm_mail_item *
find(const mail_list *list, int32_t peer, uint64_t id)
{
    for (dm_mail_item *item = list->head; item != NULL; item = item->next) {
        if (item->id == id && item->peer == peer) {
            return item;
        }
    }
    return NULL;
}

/* --- ends ------------------------------------------------------------------------------- */

mail_rank_text
mail_rank_name(const dm_mail *mail, int32_t rank)
{
    mail_rank_text name;
    if (rank == DM_ANY_RANK) {
        snprintf(name.text, sizeof(name.text), "any rank");
    }
    else {
        snprintf(name.text, sizeof(name.text), "rank %d (group rank %d)",
                 (int)mail->ranks[rank], (int)rank);
    }
    return name;
}

void
mail_end(dm_mail *mail, dm_mail_item *item, dm_status status, const char *format, ...)
{
    item->status = status;
    item->err = NULL;
    if (status != DM_OK) {
        char text[DM_ERROR_TEXT_SIZE];
        va_list args;
        va_start(args, format);
        vsnprintf(text, sizeof(text), format, args);
        va_end(args);
        item->err = dm_calloc(1, sizeof(*item->err));
        if (item->err != NULL) {
            dm_error_set(item->err, status, "%s", text);
        }
    }
    mail_list_add(&mail->ended, item);
}

static void
end_list(dm_mail *mail, mail_list *list, dm_status status, const char *text)
{
    while (list->head != NULL) {
        dm_mail_item *item = list->head;
        mail_list_remove(list, item);
        mail_end(mail, item, status, "%s", text);
    }
}

void
mail_end_all(dm_mail *mail, dm_status status, const char *text)
{
    for (int32_t peer = 0; peer < mail->size; peer++) {
        end_list(mail, &mail->peers[peer].waiting, status, text);
    }
    end_list(mail, &mail->sends, status, text);
    end_list(mail, &mail->receives, status, text);
    end_list(mail, &mail->expecting, status, text);
    while (mail->arrivals != NULL) {
        mail_arrival *arrival = mail->arrivals;
        mail->arrivals = arrival->next;
        dm_free(arrival);
    }
    mail->arrivals_tail = &mail->arrivals;
}

static void
end_of_peer(dm_mail *mail, mail_list *list, int32_t peer, dm_status status,
            const char *text)
{
    dm_mail_item *next = NULL;
    for (dm_mail_item *item = list->head; item != NULL; item = next) {
        next = item->next;
        if (item->peer == peer) {
            mail_list_remove(list, item);
            mail_end(mail, item, status, "%s", text);
        }
    }
}

static bool
all_gone(const dm_mail *mail)
{
    for (int32_t peer = 0; peer < mail->size; peer++) {
        if (peer != mail->rank && mail->peers[peer].gone == DM_OK) {
            return false;
        }
    }
    return true;
}

void
mail_peer_gone(dm_mail *mail, int32_t peer, dm_status status, const char *text)
{
    mail_peer *p = &mail->peers[peer];
    if (p->gone != DM_OK) {
        return;
    }
    p->gone = status;
    p->why = dm_strdup(text);
    p->wanted = false;
    mail_hang_up(mail, peer);
    end_list(mail, &p->waiting, status, text);
    end_of_peer(mail, &mail->sends, peer, status, text);
    end_of_peer(mail, &mail->receives, peer, status, text);
    end_of_peer(mail, &mail->expecting, peer, status, text);
    /* What it had sent whole can still be taken; the rest will not come. */
    for (mail_arrival **at = &mail->arrivals; *at != NULL;) {
        mail_arrival *arrival = *at;
        if (arrival->peer == peer && !arrival->whole) {
            *at = arrival->next;
            dm_free(arrival);
        }
        else {
            at = &arrival->next;
        }
    }
    mail->arrivals_tail = &mail->arrivals;
    while (*mail->arrivals_tail != NULL) {
        mail->arrivals_tail = &(*mail->arrivals_tail)->next;
    }
    if (all_gone(mail)) {
        end_of_peer(mail, &mail->receives, DM_ANY_RANK, status, text);
    }
}

static int64_t
expire_list(dm_mail *mail, mail_list *list, int64_t now)
{
    int64_t soonest = DM_FOREVER;
    dm_mail_item *next = NULL;
    for (dm_mail_item *item = list->head; item != NULL; item = next) {
        next = item->next;
        if (item->deadline > now) {
            soonest = item->deadline < soonest ? item->deadline : soonest;
            continue;
        }
        bool met = item->peer == DM_ANY_RANK || mail->peers[item->peer].conn != NULL;
        mail_list_remove(list, item);
        mail_end(mail, item, DM_ERR_TIMEOUT, "timed out after %.1f s waiting for %s%s",
                 (double)(now - item->posted) / DM_NS_PER_S,
                 mail_rank_name(mail, item->peer).text,
                 met ? "" : ", which has not come to send or receive anything");
    }
    return soonest;
}

int64_t
mail_expire(dm_mail *mail, int64_t now)
{
    int64_t soonest = DM_FOREVER;
    mail_list *lists[] = {&mail->sends, &mail->receives, &mail->expecting};
    for (int i = 0; i < 3; i++) {
        int64_t next = expire_list(mail, lists[i], now);
        soonest = next < soonest ? next : soonest;
    }
    for (int32_t peer = 0; peer < mail->size; peer++) {
        int64_t next = expire_list(mail, &mail->peers[peer].waiting, now);
        soonest = next < soonest ? next : soonest;
    }
    return soonest;
}

/* --- taking ----------------------------------------------------------------------------- */

static size_t
bytes_of(const dm_op *op)
{
    return op->count * dm_dtype_size(op->dtype);
}

static void
answer(dm_mail *mail, int32_t peer, mail_kind kind, uint64_t id)
{
    mail_frame frame = {.kind = (uint16_t)kind, .id = id};
    mail_send(mail, peer, &frame, NULL, NULL, false);
}

static void
received(dm_mail *mail, dm_mail_item *item)
{
    if (item->op->source != NULL) {
        *item->op->source = item->peer;
    }
    mail_end(mail, item, DM_OK, "%s", "");
}

/* "rank 3 (group rank 1) sends 4 float32, rank 2 (group rank 0) receives 3 float32, tag 0" */
static void
end_mismatch(dm_mail *mail, dm_mail_item *item, bool sender, size_t bytes,
             dm_dtype dtype)
{
    const dm_op *op = item->op;
    mail_rank_text me = mail_rank_name(mail, mail->rank);
    mail_rank_text other = mail_rank_name(mail, item->peer);
    size_t count = bytes / dm_dtype_size(dtype);
    mail_end(mail, item, DM_ERR_MISMATCH,
             "%s sends %zu %s while %s receives %zu %s (tag %u)",
             sender ? me.text : other.text, sender ? op->count : count,
             dm_dtype_name(sender ? op->dtype : dtype), sender ? other.text : me.text,
             sender ? count : op->count, dm_dtype_name(sender ? dtype : op->dtype),
             (unsigned)op->tag);
}

/* Whether the receive has room for exactly this message; if not, both ends fail. */
static bool
fits(dm_mail *mail, dm_mail_item *item, uint64_t id, size_t bytes, dm_dtype dtype)
{
    const dm_op *op = item->op;
    if (bytes == bytes_of(op) && dtype == op->dtype) {
        return true;
    }
    mail_frame frame = {.kind = MAIL_REFUSED,
                        .id = id,
                        .dtype = (uint16_t)op->dtype,
                        .bytes = bytes_of(op)};
    mail_send(mail, item->peer, &frame, NULL, NULL, false);
    end_mismatch(mail, item, false, bytes, dtype);
    return false;
}

static void
remove_arrival(dm_mail *mail, mail_arrival *arrival)
{
    for (mail_arrival **at = &mail->arrivals; *at != NULL; at = &(*at)->next) {
        if (*at == arrival) {
            *at = arrival->next;
            if (arrival->next == NULL) {
                mail->arrivals_tail = at;
            }
            return;
        }
    }
}

/* `item`, in no list, takes a message that has come. */
static void
take(dm_mail *mail, dm_mail_item *item, mail_arrival *arrival)
{
    item->peer = arrival->peer;
    item->id = arrival->id;
    if (arrival->eager && !arrival->whole) {
        arrival->taker = item; /* goes on where the data is there */
        mail_list_add(&mail->expecting, item);
        return;
    }
    remove_arrival(mail, arrival);
    if (!fits(mail, item, arrival->id, arrival->bytes, arrival->dtype)) {
        dm_free(arrival);
        return;
    }
    if (arrival->eager) {
        if (arrival->bytes != 0) {
            memcpy(item->op->output, arrival->data, arrival->bytes);
        }
        answer(mail, item->peer, MAIL_TAKEN, arrival->id);
        received(mail, item);
    }
    else {
        mail_list_add(&mail->expecting, item);
        answer(mail, item->peer, MAIL_ASK, arrival->id);
    }
    dm_free(arrival);
}

/* The oldest receive that asks for it, out of the list, or NULL. */
static dm_mail_item *
find_taker(dm_mail *mail, int32_t peer, uint32_t tag)
{
    for (dm_mail_item *item = mail->receives.head; item != NULL; item = item->next) {
        if ((item->op->root == peer || item->op->root == DM_ANY_RANK) &&
            item->op->tag == tag) {
            mail_list_remove(&mail->receives, item);
            item->peer = peer;
            return item;
        }
    }
    return NULL;
}

static mail_arrival *
find_arrival(dm_mail *mail, const dm_op *op)
{
    for (mail_arrival *arrival = mail->arrivals; arrival != NULL;
         arrival = arrival->next) {
        if ((op->root == arrival->peer || op->root == DM_ANY_RANK) &&
            op->tag == arrival->tag && arrival->taker == NULL) {
            return arrival;
        }
    }
    return NULL;
}

/* --- posting ---------------------------------------------------------------------------- */

static void
send_item(dm_mail *mail, dm_mail_item *item)
{
    const dm_op *op = item->op;
    mail_frame frame = {.kind = MAIL_ANNOUNCE,
                        .dtype = (uint16_t)op->dtype,
                        .tag = op->tag,
                        .id = item->id,
                        .bytes = bytes_of(op)};
    const void *payload = NULL;
    if (frame.bytes <= MAIL_EAGER_BYTES) {
        frame.kind = MAIL_EAGER;
        payload = op->input;
    }
    mail_list_add(&mail->sends, item);
    mail_send(mail, item->peer, &frame, payload, item, false);
}

void
mail_peer_ready(dm_mail *mail, int32_t peer)
{
    mail_list *waiting = &mail->peers[peer].waiting;
    while (waiting->head != NULL) {
        dm_mail_item *item = waiting->head;
        mail_list_remove(waiting, item);
        send_item(mail, item);
    }
}

void
mail_post(dm_mail *mail, dm_mail_item *item)
{
    const dm_op *op = item->op;
    item->id = ++mail->last_id;
    item->posted = dm_clock_now();
    item->peer = op->root;
    mail_peer *peer = op->root == DM_ANY_RANK ? NULL : &mail->peers[op->root];
    if (op->kind == DM_OP_RECV) {
        mail_arrival *arrival = find_arrival(mail, op);
        if (arrival != NULL) {
            take(mail, item, arrival);
            return;
        }
    }
    if (peer == NULL ? all_gone(mail) : peer->gone != DM_OK) {
        const mail_peer *whose = peer;
        for (int32_t i = 0; whose == NULL; i++) {
            whose = mail->peers[i].gone != DM_OK ? &mail->peers[i] : NULL;
        }
        mail_end(mail, item, whose->gone, "%s",
                 whose->why != NULL ? whose->why : "a rank is gone");
        return;
    }
    if (op->kind == DM_OP_RECV) {
        mail_list_add(&mail->receives, item);
    }
    else if (peer->conn != NULL) {
        send_item(mail, item);
    }
    else {
        mail_list_add(&peer->waiting, item);
    }
    if (peer != NULL && peer->conn == NULL) {
        mail_want(mail, op->root);
    }
    mail->busy = true;
    if (item->deadline < mail->wakes_at) {
        mail_wake(mail);
    }
}

/* --- what comes ------------------------------------------------------------------------- */

static bool
message_arrived(dm_mail *mail, mail_conn *conn)
{
    const mail_frame *frame = &conn->frame;
    bool eager = frame->kind == MAIL_EAGER;
    if (frame->dtype >= DM_DTYPE_COUNT || (eager && frame->bytes > MAIL_EAGER_BYTES)) {
        return false;
    }
    dm_dtype dtype = (dm_dtype)frame->dtype;
    dm_mail_item *item = find_taker(mail, conn->peer, frame->tag);
    if (item != NULL) {
        item->id = frame->id;
        if (fits(mail, item, frame->id, frame->bytes, dtype)) {
            mail_list_add(&mail->expecting, item);
            if (eager) {
                conn->item = item;
                conn->into = item->op->output;
            }
            else {
                answer(mail, conn->peer, MAIL_ASK, frame->id);
            }
        }
        return true;
    }

    mail_arrival *arrival = dm_calloc(1, sizeof(*arrival) + (eager ? frame->bytes : 0));
    if (arrival == NULL) {
        mail_peer_gone(mail, conn->peer, DM_ERR_NO_MEMORY,
                       "no memory for a message that nobody has asked for yet");
        return true;
    }
    arrival->peer = conn->peer;
    arrival->tag = frame->tag;
    arrival->dtype = dtype;
    arrival->eager = eager;
    arrival->whole = !eager;
    arrival->id = frame->id;
    arrival->bytes = frame->bytes;
    *mail->arrivals_tail = arrival;
    mail->arrivals_tail = &arrival->next;
    if (eager) {
        conn->arrival = arrival;
        conn->into = arrival->data;
    }
    return true;
}

bool
mail_arrived(dm_mail *mail, mail_conn *conn)
{
    const mail_frame *frame = &conn->frame;
    conn->into = NULL;
    conn->item = NULL;
    conn->arrival = NULL;
    dm_mail_item *item = NULL;
    switch (frame->kind) {
    case MAIL_EAGER:
    case MAIL_ANNOUNCE:
        return message_arrived(mail, conn);
    case MAIL_ASK:
        item = find(&mail->sends, conn->peer, frame->id);
        if (item == NULL) {
            return false;
        }
        mail_send(mail, conn->peer,
                  &(mail_frame){
                      .kind = MAIL_DATA, .id = frame->id, .bytes = bytes_of(item->op)},
                  item->op->input, item, true);
        return true;
    case MAIL_DATA:
        item = find(&mail->expecting, conn->peer, frame->id);
        if (item == NULL || frame->bytes != bytes_of(item->op)) {
            return false;
        }
        conn->item = item;
        conn->into = item->op->output;
        return true;
    case MAIL_TAKEN:
    case MAIL_REFUSED:
        item = find(&mail->sends, conn->peer, frame->id);
        if (item == NULL || frame->dtype >= DM_DTYPE_COUNT) {
            return false;
        }
        mail_list_remove(&mail->sends, item);
        if (frame->kind == MAIL_TAKEN) {
            mail_end(mail, item, DM_OK, "%s", "");
        }
        else {
            end_mismatch(mail, item, true, frame->bytes, (dm_dtype)frame->dtype);
        }
        return true;
    case MAIL_BYE:
        if (frame->bytes >= MAIL_TEXT_SIZE) {
            return false;
        }
        conn->into = conn->text;
        return true;
    default:
        return false;
    }
}

void
mail_payload_done(dm_mail *mail, mail_conn *conn)
{
    dm_mail_item *item = conn->item;
    mail_arrival *arrival = conn->arrival;
    conn->item = NULL;
    conn->arrival = NULL;
    if (item != NULL) {
        mail_list_remove(&mail->expecting, item);
        if (conn->frame.kind == MAIL_EAGER) {
            answer(mail, conn->peer, MAIL_TAKEN, conn->frame.id);
        }
        received(mail, item);
    }
    else if (arrival != NULL) {
        arrival->whole = true;
        dm_mail_item *taker = arrival->taker;
        if (taker != NULL) {
            mail_list_remove(&mail->expecting, taker);
            take(mail, taker, arrival);
        }
    }
}
