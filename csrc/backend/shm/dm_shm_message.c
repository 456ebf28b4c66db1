/* Messages: see dm_shm_message.h.
 *
 * Of the words of a pair, the sender stores the flags of cells, `sent` and `blocked`,
 * the receiver `taken` and `opened`; all are counters. Each is stored after the data
 * was written or read (release) and loaded before (acquire); where the other end may
 * sleep for it, sequentially consistent as dm_shm_wait.h wants it.
 */
#include "backend/shm/dm_shm_message.h"

#include <inttypes.h>

#include "backend/shm/dm_shm_copy.h"
#include "backend/shm/dm_shm_peers.h"
#include "backend/shm/dm_shm_round.h"
#include "backend/shm/dm_shm_wait.h"
#include "base/dm_alloc.h"

/* In a message's cell. */
typedef struct header {
    uint64_t count; /* elements */
    uint32_t tag;
    uint8_t dtype;
    uint8_t inlined; /* the data lies in the cell */
    uint16_t unused;
    unsigned char data[DM_SHM_INLINE - 16];
} header;

_Static_assert(sizeof(header) == DM_SHM_INLINE, "a header fills a cell");

/* A message that was set aside, or is being set aside. */
typedef struct message {
    struct message *next;
    uint64_t count;
    uint32_t tag;
    dm_dtype dtype;
    size_t size; /* bytes */
    size_t got;  /* of them are here */
    unsigned char data[];
} message;

/* My ends of the ways to and from one member. */
typedef struct way {
    uint64_t sent_messages;
    uint64_t sent; /* bytes; what pair->sent says */
    uint64_t got_messages;
    uint64_t taken; /* bytes; what pair->taken says */
    message *aside; /* oldest first; only the last one may be incomplete */
    bool linked;    /* the receiver knows that I send */
    bool receiving; /* a message is flowing straight into the user's memory */
} way;

struct dm_shm_inbox {
    int32_t size;
    int32_t next;      /* where the next receive from anybody begins to look */
    uint64_t arrivals; /* how often something was taken in */
    way ways[];
};

static dm_shm_pair *
pair_of(const dm_comm *comm, int32_t from, int32_t to)
{
    const dm_shm_plan *plan = &comm->segment->plan;
    size_t index = (size_t)from * (size_t)comm->size + (size_t)to;
    return (dm_shm_pair *)(void *)(comm->segment->base + plan->pairs +
                                   index * plan->pair);
}

/* Whether `from` has ever sent something to `to`. */
static _Atomic uint8_t *
link_of(const dm_comm *comm, int32_t from, int32_t to)
{
    const dm_shm_plan *plan = &comm->segment->plan;
    return (_Atomic uint8_t *)(void *)(comm->segment->base + plan->links +
                                       (size_t)to * plan->link_row + (size_t)from);
}

static dm_status
open_inbox(dm_comm *comm, dm_error *err)
{
    if (comm->inbox != NULL) {
        return DM_OK;
    }
    size_t size = sizeof(dm_shm_inbox) + (size_t)comm->size * sizeof(way);
    dm_shm_inbox *inbox = dm_calloc(1, size);
    if (inbox == NULL) {
        return dm_error_set_no_memory(err, "an inbox");
    }
    inbox->size = comm->size;
    comm->inbox = inbox;
    return DM_OK;
}

void
dm_shm_inbox_free(dm_shm_inbox *inbox)
{
    for (int32_t i = 0; inbox != NULL && i < inbox->size; i++) {
        while (inbox->ways[i].aside != NULL) {
            message *m = inbox->ways[i].aside;
            inbox->ways[i].aside = m->next;
            dm_free(m);
        }
    }
    dm_free(inbox);
}

/* Waits for one word of the pair with `peer`. */
static dm_status
await_word(dm_comm *comm, int32_t peer, const _Atomic uint64_t *word, uint64_t want,
           const dm_wait *wait, dm_error *err)
{
    const dm_shm_goal goal = {
        .first_word = word, .first = peer, .end = peer + 1, .want = want};
    return dm_shm_wait(comm, &goal, wait, err);
}

/* --- sending ------------------------------------------------------------------------- */

/* As await_word, for a sender without room: lets the receiver know. */
static dm_status
await_room(dm_comm *comm, int32_t to, dm_shm_pair *pair, const _Atomic uint64_t *word,
           uint64_t want, const dm_wait *wait, dm_error *err)
{
    if (dm_shm_reached(atomic_load_explicit(word, memory_order_acquire), want)) {
        return DM_OK;
    }
    /* Sequentially consistent: either the receiver sees this before it sleeps, or I see
     * that it sleeps. */
    atomic_store(&pair->blocked, 1);
    dm_shm_ring(comm, to);
    dm_status status = await_word(comm, to, word, want, wait, err);
    atomic_store(&pair->blocked, 0);
    return status;
}

/* Copies into the ring what has room there. */
static size_t
fill(const dm_comm *comm, dm_shm_pair *pair, way *w, const unsigned char *data,
     size_t size)
{
    const size_t ring = comm->segment->plan.ring;
    /* Acquire: the receiver has read what lay there. */
    uint64_t taken = atomic_load_explicit(&pair->taken, memory_order_acquire);
    size_t room = ring - (size_t)(w->sent - taken);
    size_t bytes = size < room ? size : room;
    size_t at = (size_t)(w->sent % ring);
    size_t front = bytes < ring - at ? bytes : ring - at;
    dm_shm_copy(pair->ring + at, data, front);
    dm_shm_copy(pair->ring, data + front, bytes - front);
    w->sent += bytes;
    return bytes;
}

dm_status
dm_shm_send(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    DM_TRY(open_inbox(comm, err));
    const int32_t to = op->root;
    dm_shm_pair *pair = pair_of(comm, comm->rank, to);
    way *w = &comm->inbox->ways[to];
    const size_t ring = comm->segment->plan.ring;
    const unsigned char *data = op->input;
    size_t left = op->count * dm_dtype_size(op->dtype);

    uint64_t number = w->sent_messages + 1;
    if (number > DM_SHM_PAIR_CELLS) {
        DM_TRY(await_room(comm, to, pair, &pair->opened, number - DM_SHM_PAIR_CELLS,
                          wait, err));
    }
    w->sent_messages = number;
    if (!w->linked) {
        /* Release is enough: the flag's store below comes later still. */
        atomic_store(link_of(comm, comm->rank, to), 1);
        w->linked = true;
    }

    dm_shm_cell *cell = &pair->cells[number % DM_SHM_PAIR_CELLS];
    header *h = (header *)(void *)cell->data;
    *h = (header){.count = op->count, .tag = op->tag, .dtype = (uint8_t)op->dtype};
    if (left <= sizeof(h->data)) {
        h->inlined = 1;
        dm_shm_copy(h->data, data, left);
        left = 0;
    }
    else {
        /* The first bytes are there when the header is. */
        size_t bytes = fill(comm, pair, w, data, left < ring / 2 ? left : ring / 2);
        data += bytes;
        left -= bytes;
        atomic_store_explicit(&pair->sent, w->sent, memory_order_release);
    }
    atomic_store(&cell->flag, number);
    dm_shm_wake(comm);

    while (left > 0) {
        /* A quarter of the ring at a time, so that both ends work at once. */
        size_t step = left < ring / 4 ? left : ring / 4;
        DM_TRY(
            await_room(comm, to, pair, &pair->taken, w->sent + step - ring, wait, err));
        size_t bytes = fill(comm, pair, w, data, step);
        data += bytes;
        left -= bytes;
        atomic_store(&pair->sent, w->sent);
        dm_shm_wake(comm);
        DM_TRY(dm_shm_go_on(comm, wait, err));
    }
    return DM_OK;
}

/* --- receiving ------------------------------------------------------------------------ */

/* The header of the next message from `from`, NULL when there is none yet. */
static const header *
next_header(const dm_comm *comm, const dm_shm_pair *pair, int32_t from)
{
    uint64_t number = comm->inbox->ways[from].got_messages + 1;
    const dm_shm_cell *cell = &pair->cells[number % DM_SHM_PAIR_CELLS];
    /* Acquire: the cell was written before its flag. */
    uint64_t flag = atomic_load_explicit(&cell->flag, memory_order_acquire);
    return dm_shm_reached(flag, number) ? (const header *)(const void *)cell->data
                                        : NULL;
}

/* The cell of the message that was begun is free again. */
static void
free_cell(dm_comm *comm, dm_shm_pair *pair, way *w)
{
    w->got_messages++;
    atomic_store(&pair->opened, w->got_messages);
    dm_shm_wake(comm);
}

/* Copies out of the ring what is there, at most `size` bytes. */
static size_t
drain(dm_comm *comm, dm_shm_pair *pair, way *w, unsigned char *data, size_t size)
{
    const size_t ring = comm->segment->plan.ring;
    /* Acquire: the sender has written what lies there. */
    uint64_t sent = atomic_load_explicit(&pair->sent, memory_order_acquire);
    size_t there = (size_t)(sent - w->taken);
    size_t bytes = size < there ? size : there;
    if (bytes == 0) {
        return 0;
    }
    size_t at = (size_t)(w->taken % ring);
    size_t front = bytes < ring - at ? bytes : ring - at;
    dm_shm_copy(data, pair->ring + at, front);
    dm_shm_copy(data + front, pair->ring, bytes - front);
    w->taken += bytes;
    atomic_store(&pair->taken, w->taken);
    dm_shm_wake(comm);
    return bytes;
}

/* Drains until `size` bytes are there. */
static dm_status
drain_all(dm_comm *comm, int32_t from, unsigned char *data, size_t size,
          const dm_wait *wait, dm_error *err)
{
    dm_shm_pair *pair = pair_of(comm, from, comm->rank);
    way *w = &comm->inbox->ways[from];
    while (size > 0) {
        size_t bytes = drain(comm, pair, w, data, size);
        data += bytes;
        size -= bytes;
        if (size > 0 && bytes == 0) {
            DM_TRY(await_word(comm, from, &pair->sent, w->taken + 1, wait, err));
        }
        DM_TRY(dm_shm_go_on(comm, wait, err));
    }
    return DM_OK;
}

/* The incomplete message at the end of what was set aside, or NULL. */
static message *
incomplete(const way *w)
{
    message *m = w->aside;
    while (m != NULL && m->next != NULL) {
        m = m->next;
    }
    return m != NULL && m->got < m->size ? m : NULL;
}

/* Begins to set the message of `h` aside. */
static dm_status
set_aside(dm_comm *comm, dm_shm_pair *pair, way *w, const header *h, dm_error *err)
{
    size_t size = (size_t)h->count * dm_dtype_size((dm_dtype)h->dtype);
    message *m = dm_malloc_array(sizeof(*m) + size, 1);
    if (m == NULL) {
        return dm_error_set_no_memory(err, "a message that nobody has asked for yet");
    }
    *m = (message){.count = h->count,
                   .tag = h->tag,
                   .dtype = (dm_dtype)h->dtype,
                   .size = size,
                   .got = h->inlined ? size : 0};
    if (h->inlined) {
        dm_shm_copy(m->data, h->data, size);
    }
    message **end = &w->aside;
    while (*end != NULL) {
        end = &(*end)->next;
    }
    *end = m;
    free_cell(comm, pair, w);
    return DM_OK;
}

bool
dm_shm_take_in(dm_comm *comm)
{
    bool some = false;
    for (int32_t i = 0; i < comm->size; i++) {
        if (atomic_load(link_of(comm, i, comm->rank)) == 0) {
            continue;
        }
        dm_shm_pair *pair = pair_of(comm, i, comm->rank);
        if (atomic_load(&pair->blocked) == 0 || open_inbox(comm, NULL) != DM_OK) {
            continue;
        }
        way *w = &comm->inbox->ways[i];
        if (w->receiving) {
            continue;
        }
        message *m = incomplete(w);
        if (m == NULL) {
            const header *h = next_header(comm, pair, i);
            /* Without memory the sender just stays blocked. */
            if (h == NULL || set_aside(comm, pair, w, h, NULL) != DM_OK) {
                continue;
            }
            some = true;
            m = incomplete(w);
        }
        if (m != NULL) {
            size_t bytes = drain(comm, pair, w, m->data + m->got, m->size - m->got);
            m->got += bytes;
            some = some || bytes != 0;
        }
    }
    if (some) {
        comm->inbox->arrivals++;
    }
    return some;
}

static dm_status
check_fit(dm_comm *comm, const dm_op *op, int32_t from, uint64_t count, dm_dtype dtype,
          dm_error *err)
{
    if (count == op->count && dtype == op->dtype) {
        return DM_OK;
    }
    char who[DM_SHM_WHO_SIZE];
    char me[DM_SHM_WHO_SIZE];
    comm->parting = dm_shm_record(DM_SHM_MISFIT, from, comm->rank);
    return dm_error_set(
        err, DM_ERR_MISMATCH, "%s sent %" PRIu64 " %s (tag %u), %s asked for %zu %s",
        dm_shm_who(comm, from, who), count, dm_dtype_name(dtype), (unsigned)op->tag,
        dm_shm_who(comm, comm->rank, me), op->count, dm_dtype_name(op->dtype));
}

/* Brings in the rest of a message that is being set aside. */
static dm_status
complete(dm_comm *comm, int32_t from, message *m, const dm_wait *wait, dm_error *err)
{
    way *w = &comm->inbox->ways[from];
    w->receiving = true;
    dm_status status =
        drain_all(comm, from, m->data + m->got, m->size - m->got, wait, err);
    w->receiving = false;
    m->got = m->size;
    return status;
}

/* A message with the tag that was set aside: completes and delivers it. `*found` is
 * false when there is none. */
static dm_status
receive_aside(dm_comm *comm, const dm_op *op, int32_t from, bool *found,
              const dm_wait *wait, dm_error *err)
{
    message **link = &comm->inbox->ways[from].aside;
    while (*link != NULL && (*link)->tag != op->tag) {
        link = &(*link)->next;
    }
    message *m = *link;
    if (m == NULL) {
        return DM_OK;
    }
    *found = true;
    DM_TRY(check_fit(comm, op, from, m->count, m->dtype, err));
    DM_TRY(complete(comm, from, m, wait, err));
    dm_shm_copy(op->output, m->data, m->size);
    *link = m->next;
    dm_free(m);
    return DM_OK;
}

/* Delivers the message in the next cell. */
static dm_status
receive_next(dm_comm *comm, const dm_op *op, int32_t from, const header *h,
             const dm_wait *wait, dm_error *err)
{
    dm_shm_pair *pair = pair_of(comm, from, comm->rank);
    way *w = &comm->inbox->ways[from];
    DM_TRY(check_fit(comm, op, from, h->count, (dm_dtype)h->dtype, err));
    size_t size = op->count * dm_dtype_size(op->dtype);
    if (h->inlined) {
        dm_shm_copy(op->output, h->data, size);
        free_cell(comm, pair, w);
        return DM_OK;
    }
    free_cell(comm, pair, w);
    w->receiving = true;
    dm_status status = drain_all(comm, from, op->output, size, wait, err);
    w->receiving = false;
    return status;
}

/* Receives from one member what has begun to arrive, if it has the tag; messages in
 * front of it are set aside. */
static dm_status
try_receive(dm_comm *comm, const dm_op *op, int32_t from, bool *found,
            const dm_wait *wait, dm_error *err)
{
    dm_shm_pair *pair = pair_of(comm, from, comm->rank);
    way *w = &comm->inbox->ways[from];
    *found = false;
    DM_TRY(receive_aside(comm, op, from, found, wait, err));
    while (!*found) {
        message *m = incomplete(w);
        if (m != NULL) {
            DM_TRY(complete(comm, from, m, wait, err));
        }
        const header *h = next_header(comm, pair, from);
        if (h == NULL) {
            break;
        }
        if (h->tag == op->tag) {
            *found = true;
            return receive_next(comm, op, from, h, wait, err);
        }
        DM_TRY(set_aside(comm, pair, w, h, err));
    }
    return DM_OK;
}

static dm_status
receive_from(dm_comm *comm, const dm_op *op, int32_t from, const dm_wait *wait,
             dm_error *err)
{
    const dm_shm_pair *pair = pair_of(comm, from, comm->rank);
    for (;;) {
        bool found;
        DM_TRY(try_receive(comm, op, from, &found, wait, err));
        if (found) {
            return DM_OK;
        }
        uint64_t number = comm->inbox->ways[from].got_messages + 1;
        DM_TRY(await_word(comm, from, &pair->cells[number % DM_SHM_PAIR_CELLS].flag,
                          number, wait, err));
    }
}

/* Whether anything has come since the arrivals in `arg` were counted. */
static bool
anything_new(dm_comm *comm, void *arg)
{
    if (comm->inbox->arrivals != *(const uint64_t *)arg) {
        return true;
    }
    for (int32_t i = 0; i < comm->size; i++) {
        if (i != comm->rank && atomic_load(link_of(comm, i, comm->rank)) != 0 &&
            next_header(comm, pair_of(comm, i, comm->rank), i) != NULL) {
            return true;
        }
    }
    return false;
}

static dm_status
receive_from_any(dm_comm *comm, const dm_op *op, int32_t *source, const dm_wait *wait,
                 dm_error *err)
{
    for (;;) {
        uint64_t arrivals = comm->inbox->arrivals;
        /* Everybody gets a turn, beginning behind the last one who had it. */
        for (int32_t k = 0; k < comm->size; k++) {
            int32_t from = (comm->inbox->next + k) % comm->size;
            if (from == comm->rank ||
                atomic_load(link_of(comm, from, comm->rank)) == 0) {
                continue;
            }
            bool found;
            DM_TRY(try_receive(comm, op, from, &found, wait, err));
            if (found) {
                comm->inbox->next = (from + 1) % comm->size;
                *source = from;
                return DM_OK;
            }
        }
        const dm_shm_goal goal = {
            .reached = anything_new, .arg = &arrivals, .end = comm->size};
        DM_TRY(dm_shm_wait(comm, &goal, wait, err));
    }
}

dm_status
dm_shm_recv(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    DM_TRY(open_inbox(comm, err));
    int32_t source = op->root;
    if (source == DM_ANY_RANK) {
        DM_TRY(receive_from_any(comm, op, &source, wait, err));
    }
    else {
        DM_TRY(receive_from(comm, op, source, wait, err));
    }
    if (op->source != NULL) {
        *op->source = source;
    }
    return DM_OK;
}
