/* What the files of mail/ share: dm_mail.c (life, the thread), dm_mail_match.c (messages
 * and who takes them), dm_mail_wire.c (connections and frames).
 *
 * Everything here is guarded by the mail's mutex: all functions expect it to be held.
 */
#ifndef DM_MAIL_PRIVATE_H
#define DM_MAIL_PRIVATE_H

#include <pthread.h>

#include "backend/mail/dm_mail.h"
#include "store/dm_store.h"

enum {
    /* Up to here a message travels with its announcement. */
    MAIL_EAGER_BYTES = 32 * 1024,
    MAIL_TEXT_SIZE = 512,
    MAIL_TOKEN_SIZE = 16,
};

typedef enum mail_kind {
    MAIL_HELLO = 1, /* tag: my rank; payload: the token of whom I call */
    MAIL_EAGER,     /* a message and its data */
    MAIL_ANNOUNCE,  /* a large message */
    MAIL_ASK,       /* id: send the data */
    MAIL_DATA,      /* id; payload: the data */
    MAIL_TAKEN,     /* id: an eager message was taken */
    MAIL_REFUSED,   /* id: it does not fit; bytes and dtype of the receiver's array */
    MAIL_BYE,       /* tag: dm_status, negated; payload: text, why I leave */
} mail_kind;

/* On the wire in the host's byte order, which HELLO's magic shows. */
typedef struct mail_frame {
    uint32_t magic;
    uint16_t kind;
    uint16_t dtype;
    uint32_t tag;
    uint32_t payload; /* 1: `bytes` follow */
    uint64_t id;
    uint64_t bytes;
} mail_frame;

typedef struct mail_list {
    dm_mail_item *head;
    dm_mail_item **tail;
} mail_list;

/* A frame that is being written. */
typedef struct mail_out {
    struct mail_out *next;
    mail_frame frame;
    size_t sent;         /* bytes of frame and payload together */
    const void *payload; /* borrowed from the item, or lies behind this struct */
    dm_mail_item *item;  /* ends when the frame is written; or NULL */
} mail_out;

/* A message that nobody has asked for yet. */
typedef struct mail_arrival {
    struct mail_arrival *next;
    int32_t peer;
    uint32_t tag;
    dm_dtype dtype;
    bool eager;
    bool whole; /* all data is there */
    uint64_t id;
    size_t bytes;
    dm_mail_item *taker; /* who asked for it meanwhile */
    char data[];
} mail_arrival;

typedef struct mail_conn {
    struct mail_conn *next;
    int fd;
    int32_t peer; /* -1: has not said hello yet */
    bool connecting;
    bool wants_out; /* epoll tells when it can be written */
    mail_out *out;
    mail_out **out_tail;

    size_t have; /* bytes of `frame` */
    mail_frame frame;
    size_t done; /* bytes of the payload */
    char *into;  /* where it goes; NULL: nowhere */
    dm_mail_item *item;
    mail_arrival *arrival;
    char text[MAIL_TEXT_SIZE];
} mail_conn;

typedef struct mail_peer {
    mail_conn *conn; /* the one to send on: always the same */
    mail_list waiting;
    bool wanted; /* looked for in the store */
    bool calling;
    int64_t next_look;
    int64_t interval;
    dm_status gone; /* why; DM_OK while it is not */
    char *why;      /* NULL: no memory */
} mail_peer;

struct dm_mail {
    pthread_mutex_t lock;
    pthread_t thread;
    int32_t rank;
    int32_t size;
    int32_t *ranks;
    char *name;
    dm_store *store;
    unsigned char token[MAIL_TOKEN_SIZE];
    int poll; /* epoll */
    int wake; /* eventfd */
    int listener;

    bool stopped;
    dm_status why;
    char *why_text;
    pthread_cond_t joined_changed;
    bool joining; /* somebody waits for the thread */
    bool joined;
    bool left;   /* the thread touches nothing any more */
    bool orphan; /* the thread frees the mail */
    bool busy;   /* something was posted since the thread last looked */
    int64_t wakes_at;

    uint64_t last_id;
    mail_peer *peers;
    mail_conn *conns;
    mail_list sends;     /* on their way; those of mail_peer.waiting are there */
    mail_list receives;  /* nobody has sent it yet */
    mail_list expecting; /* matched, data under way */
    mail_arrival *arrivals;
    mail_arrival **arrivals_tail;
    mail_list ended;
};

/* --- dm_mail_match.c -------------------------------------------------------------------- */

void
mail_list_init(mail_list *list);

void
mail_list_add(mail_list *list, dm_mail_item *item);

/* False where it is not in the list. */
bool
mail_list_remove(mail_list *list, dm_mail_item *item);

/* Puts an item, which is in no list any more, among the ended ones. */
void
mail_end(dm_mail *mail, dm_mail_item *item, dm_status status, const char *format, ...)
    DM_PRINTF(4, 5);

void
mail_post(dm_mail *mail, dm_mail_item *item);

/* A frame of a message has come: says through conn->into where its payload goes. False:
 * no well-behaved peer sends that. */
bool
mail_arrived(dm_mail *mail, mail_conn *conn);

/* Its payload is there. */
void
mail_payload_done(dm_mail *mail, mail_conn *conn);

/* A connection to the peer can be used: what waits for it is sent. */
void
mail_peer_ready(dm_mail *mail, int32_t peer);

/* The peer will neither send nor take anything any more. */
void
mail_peer_gone(dm_mail *mail, int32_t peer, dm_status status, const char *text);

/* Ends everything that has not ended. */
void
mail_end_all(dm_mail *mail, dm_status status, const char *text);

/* Ends what is late; returns the next deadline. */
int64_t
mail_expire(dm_mail *mail, int64_t now);

/* "rank 3 (group rank 1)" */
typedef struct mail_rank_text {
    char text[48];
} mail_rank_text;

mail_rank_text
mail_rank_name(const dm_mail *mail, int32_t rank);

/* --- dm_mail_wire.c --------------------------------------------------------------------- */

/* Queues a frame on the peer's connection and writes what can be written. `payload` of
 * frame->bytes bytes is borrowed until `item` has ended, or copied where there is no item
 * (NULL: no payload). `item` ends when all is written and `ends` is set. */
void
mail_send(dm_mail *mail, int32_t peer, const mail_frame *frame, const void *payload,
          dm_mail_item *item, bool ends);

/* Queues a frame with a payload, which is copied, on every connection. */
void
mail_send_to_all(dm_mail *mail, const mail_frame *frame, const void *payload);

/* Something happened to the descriptor. */
void
mail_conn_event(dm_mail *mail, mail_conn *conn, unsigned events);

void
mail_accept(dm_mail *mail);

/* Calls the peer, whose record of the store this is. */
void
mail_call(dm_mail *mail, int32_t peer, const void *record, size_t size);

/* Writes my record. */
dm_status
mail_record(const dm_mail *mail, void *record, size_t *size, dm_error *err);

enum { MAIL_RECORD_MAX = 256 };

/* The peer is needed: somebody has to look for it. */
void
mail_want(dm_mail *mail, int32_t peer);

void
mail_wake(dm_mail *mail);

/* Closes the peer's connections, or all of them (peer < 0). */
void
mail_hang_up(dm_mail *mail, int32_t peer);

#endif
