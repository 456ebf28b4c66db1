/* Connections and frames: see dm_mail_private.h.
 *
 * A connection that ends is emptied at once and freed by the thread later (fd < 0), since
 * it may be in use further up.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "backend/mail/dm_mail_private.h"
#include "base/dm_alloc.h"
#include "store/dm_net.h"

enum {
    MAGIC = 0x316d6d64,        /* "dmm1" */
    READ_BUDGET = 1024 * 1024, /* before others get a turn */
};

/* What a member publishes. */
struct record {
    uint32_t magic;
    uint32_t size; /* of the address */
    unsigned char token[MAIL_TOKEN_SIZE];
    struct sockaddr_storage address;
};

static_assert(sizeof(struct record) <= MAIL_RECORD_MAX, "a record");

/* --- connections ------------------------------------------------------------------------ */

static void
free_outs(mail_conn *conn)
{
    while (conn->out != NULL) {
        mail_out *out = conn->out;
        conn->out = out->next;
        dm_free(out);
    }
    conn->out_tail = &conn->out;
}

static void
close_conn(mail_conn *conn)
{
    if (conn->fd >= 0) {
        close(conn->fd); /* that takes it out of epoll, too */
        conn->fd = -1;
    }
    free_outs(conn);
    conn->item = NULL;
    conn->arrival = NULL;
    conn->into = NULL;
}

void
mail_hang_up(dm_mail *mail, int32_t peer)
{
    for (mail_conn *conn = mail->conns; conn != NULL; conn = conn->next) {
        if (peer < 0 || conn->peer == peer) {
            close_conn(conn);
        }
    }
    for (int32_t i = 0; i < mail->size; i++) {
        if (peer < 0 || peer == i) {
            mail->peers[i].conn = NULL;
            mail->peers[i].calling = false;
        }
    }
}

static mail_conn *
add_conn(dm_mail *mail, int fd, int32_t peer, bool connecting)
{
    mail_conn *conn = dm_calloc(1, sizeof(*conn));
    if (conn == NULL) {
        return NULL;
    }
    conn->fd = fd;
    conn->peer = peer;
    conn->connecting = connecting;
    conn->wants_out = connecting;
    conn->out_tail = &conn->out;
    struct epoll_event event = {.events = connecting ? EPOLLOUT : EPOLLIN,
                                .data.ptr = conn};
    if (epoll_ctl(mail->poll, EPOLL_CTL_ADD, fd, &event) != 0) {
        dm_free(conn);
        return NULL;
    }
    conn->next = mail->conns;
    mail->conns = conn;
    return conn;
}

static void
read_frames(dm_mail *mail, mail_conn *conn);

/* Reads what the peer has said on other connections: two members that call each other at
 * the same moment have two, and the last word may be on either. */
static void
hear_out(dm_mail *mail, int32_t peer)
{
    mail_accept(mail);
    for (mail_conn *conn = mail->conns; conn != NULL; conn = conn->next) {
        if (conn->fd >= 0 && !conn->connecting &&
            (conn->peer == peer || conn->peer < 0)) {
            read_frames(mail, conn);
        }
    }
}

/* The connection, or the one call that could have made one, has failed. */
static void
lost(dm_mail *mail, mail_conn *conn, const char *what)
{
    int32_t peer = conn->peer;
    close_conn(conn);
    if (peer >= 0) {
        if (mail->peers[peer].conn == conn) {
            mail->peers[peer].conn = NULL;
        }
        hear_out(mail, peer);
        char text[MAIL_TEXT_SIZE];
        snprintf(text, sizeof(text), "%s %s", mail_rank_name(mail, peer).text, what);
        mail_peer_gone(mail, peer, DM_ERR_PEER, text);
    }
}

void
mail_wake(dm_mail *mail)
{
    uint64_t one = 1;
    ssize_t written = write(mail->wake, &one, sizeof(one));
    (void)written; /* it cannot fail but where it is full, which wakes as well */
}

void
mail_want(dm_mail *mail, int32_t peer)
{
    mail_peer *p = &mail->peers[peer];
    if (!p->wanted && !p->calling) {
        p->wanted = true;
        p->interval = DM_NS_PER_MS / 2;
        p->next_look = dm_clock_now();
        mail_wake(mail);
    }
}

/* --- writing ---------------------------------------------------------------------------- */

static void
watch(dm_mail *mail, mail_conn *conn, bool out)
{
    if (conn->wants_out != out) {
        conn->wants_out = out;
        struct epoll_event event = {
            .events = out ? EPOLLIN | EPOLLOUT : EPOLLIN,
            .data.ptr = conn,
        };
        epoll_ctl(mail->poll, EPOLL_CTL_MOD, conn->fd, &event);
    }
}

static size_t
payload_of(const mail_out *out)
{
    return out->frame.payload != 0 ? out->frame.bytes : 0;
}

/* Writes what can be written without waiting. */
static void
flush(dm_mail *mail, mail_conn *conn)
{
    while (conn->out != NULL) {
        mail_out *out = conn->out;
        size_t payload = payload_of(out);
        struct iovec parts[2];
        int n = 0;
        size_t at = out->sent;
        if (at < sizeof(out->frame)) {
            parts[n].iov_base = (char *)&out->frame + at;
            parts[n++].iov_len = sizeof(out->frame) - at;
            at = sizeof(out->frame);
        }
        if (at - sizeof(out->frame) < payload) {
            at -= sizeof(out->frame);
            parts[n].iov_base = (char *)(uintptr_t)out->payload + at;
            parts[n++].iov_len = payload - at;
        }
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)n};
        ssize_t sent = sendmsg(conn->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) {
            if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
                watch(mail, conn, true);
            }
            else {
                lost(mail, conn, "closed its connection");
            }
            return;
        }
        out->sent += (size_t)sent;
        if (out->sent < sizeof(out->frame) + payload) {
            continue;
        }
        conn->out = out->next;
        if (conn->out == NULL) {
            conn->out_tail = &conn->out;
        }
        dm_mail_item *item = out->item;
        dm_free(out);
        if (item != NULL && mail_list_remove(&mail->sends, item)) {
            mail_end(mail, item, DM_OK, "%s", "");
        }
    }
    watch(mail, conn, false);
}

static void
send_on(dm_mail *mail, mail_conn *conn, const mail_frame *frame, const void *payload,
        dm_mail_item *item, bool ends)
{
    size_t copied = item == NULL && payload != NULL ? frame->bytes : 0;
    mail_out *out = dm_calloc(1, sizeof(*out) + copied);
    if (out == NULL) {
        lost(mail, conn, "cannot be written to: out of memory");
        return;
    }
    out->frame = *frame;
    out->frame.magic = MAGIC;
    out->frame.payload = payload != NULL;
    out->payload = payload;
    out->item = ends ? item : NULL;
    if (copied != 0) {
        memcpy(out + 1, payload, copied);
        out->payload = out + 1;
    }
    bool idle = conn->out == NULL && !conn->connecting;
    *conn->out_tail = out;
    conn->out_tail = &out->next;
    if (idle) {
        flush(mail, conn);
    }
}

void
mail_send(dm_mail *mail, int32_t peer, const mail_frame *frame, const void *payload,
          dm_mail_item *item, bool ends)
{
    mail_conn *conn = mail->peers[peer].conn;
    if (conn != NULL) {
        send_on(mail, conn, frame, frame->bytes == 0 ? NULL : payload, item, ends);
    }
    /* Without one the peer is gone, and whatever this belongs to has ended. */
}

void
mail_send_to_all(dm_mail *mail, const mail_frame *frame, const void *payload)
{
    for (mail_conn *conn = mail->conns; conn != NULL; conn = conn->next) {
        if (conn->fd >= 0 && conn->peer >= 0 && !conn->connecting) {
            send_on(mail, conn, frame, payload, NULL, false);
        }
    }
}

/* --- meeting ---------------------------------------------------------------------------- */

dm_status
mail_record(const dm_mail *mail, void *data, size_t *size, dm_error *err)
{
    struct record record = {.magic = MAGIC};
    socklen_t length = sizeof(record.address);
    if (getsockname(mail->listener, (struct sockaddr *)&record.address, &length) != 0) {
        return dm_error_set_errno(err, errno, "cannot read the address of a socket");
    }
    record.size = length;
    memcpy(record.token, mail->token, sizeof(record.token));
    memcpy(data, &record, sizeof(record));
    *size = sizeof(record);
    return DM_OK;
}

/* The connection knows its peer and can be used in both directions. */
static void
use_conn(dm_mail *mail, mail_conn *conn)
{
    mail_peer *peer = &mail->peers[conn->peer];
    peer->wanted = false;
    if (peer->conn == NULL) {
        peer->conn = conn;
        mail_peer_ready(mail, conn->peer);
    }
}

void
mail_call(dm_mail *mail, int32_t peer, const void *data, size_t size)
{
    mail_peer *p = &mail->peers[peer];
    struct record record;
    if (!p->wanted || p->conn != NULL || p->gone != DM_OK) {
        return; /* it has called meanwhile, or nothing is to be sent any more */
    }
    p->wanted = false;
    if (size != sizeof(record)) {
        mail_peer_gone(mail, peer, DM_ERR_PROTOCOL,
                       "the store holds no address of a member where one should be");
        return;
    }
    memcpy(&record, data, sizeof(record));
    char text[MAIL_TEXT_SIZE];
    int fd = -1;
    int error = 0;
    if (record.magic != MAGIC || record.size > sizeof(record.address)) {
        snprintf(text, sizeof(text), "%s runs another version of devicemesh",
                 mail_rank_name(mail, peer).text);
        mail_peer_gone(mail, peer, DM_ERR_PROTOCOL, text);
        return;
    }
    fd =
        socket(record.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || (connect(fd, (struct sockaddr *)&record.address, record.size) != 0 &&
                   errno != EINPROGRESS)) {
        error = errno;
    }
    mail_conn *conn = error == 0 ? add_conn(mail, fd, peer, true) : NULL;
    if (conn == NULL) {
        if (fd >= 0) {
            close(fd);
        }
        snprintf(text, sizeof(text), "cannot connect to %s: %s",
                 mail_rank_name(mail, peer).text,
                 error != 0 ? strerror(error) : "out of memory");
        mail_peer_gone(mail, peer, DM_ERR_PEER, text);
        return;
    }
    dm_net_tune(fd);
    p->calling = true;
    mail_frame hello = {
        .kind = MAIL_HELLO, .tag = (uint32_t)mail->rank, .bytes = MAIL_TOKEN_SIZE};
    send_on(mail, conn, &hello, record.token, NULL, false);
}

/* A call has been answered, or not. */
static void
connected(dm_mail *mail, mail_conn *conn)
{
    int error = 0;
    socklen_t size = sizeof(error);
    getsockopt(conn->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    mail->peers[conn->peer].calling = false;
    if (error != 0) {
        if (mail->peers[conn->peer].conn != NULL) {
            close_conn(conn); /* it has called us */
            return;
        }
        char text[MAIL_TEXT_SIZE];
        snprintf(text, sizeof(text), "cannot be reached: %s", strerror(error));
        lost(mail, conn,
             error == ECONNREFUSED ? "has closed the group or ended" : text);
        return;
    }
    conn->connecting = false;
    flush(mail, conn);
    if (conn->fd >= 0) {
        use_conn(mail, conn);
    }
}

void
mail_accept(dm_mail *mail)
{
    for (;;) {
        int fd = accept4(mail->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            return;
        }
        dm_net_tune(fd);
        if (add_conn(mail, fd, -1, false) == NULL) {
            close(fd);
        }
    }
}

/* --- reading ---------------------------------------------------------------------------- */

/* A frame's header is there. False: the caller is no member, or speaks something else. */
static bool
frame_done(dm_mail *mail, mail_conn *conn)
{
    const mail_frame *frame = &conn->frame;
    conn->done = 0;
    conn->into = NULL;
    if (frame->magic != MAGIC) {
        return false;
    }
    if (conn->peer < 0) {
        conn->into = conn->text;
        return frame->kind == MAIL_HELLO && frame->bytes == MAIL_TOKEN_SIZE &&
               frame->payload != 0 && frame->tag < (uint32_t)mail->size &&
               frame->tag != (uint32_t)mail->rank;
    }
    return mail_arrived(mail, conn);
}

/* And its payload. */
static bool
payload_done(dm_mail *mail, mail_conn *conn)
{
    switch (conn->frame.kind) {
    case MAIL_HELLO: {
        unsigned different = 0;
        for (int i = 0; i < MAIL_TOKEN_SIZE; i++) {
            different |= (unsigned char)conn->text[i] ^ mail->token[i];
        }
        if (different != 0 || conn->peer >= 0) {
            return false;
        }
        conn->peer = (int32_t)conn->frame.tag;
        if (mail->peers[conn->peer].gone != DM_OK) {
            return false;
        }
        use_conn(mail, conn);
        return true;
    }
    case MAIL_BYE: {
        conn->text[conn->frame.bytes] = '\0';
        dm_status status =
            -(int)conn->frame.tag == DM_ERR_MISMATCH ? DM_ERR_MISMATCH : DM_ERR_PEER;
        char text[MAIL_TEXT_SIZE];
        snprintf(text, sizeof(text), "%s", conn->text);
        mail_peer_gone(mail, conn->peer, status, text);
        return true;
    }
    default:
        mail_payload_done(mail, conn);
        return true;
    }
}

static void
read_frames(dm_mail *mail, mail_conn *conn)
{
    char nowhere[4096];
    for (size_t budget = READ_BUDGET; budget > 0 && conn->fd >= 0;) {
        size_t payload = conn->frame.payload != 0 ? conn->frame.bytes : 0;
        char *to = (char *)&conn->frame + conn->have;
        size_t room = sizeof(conn->frame) - conn->have;
        if (room == 0) {
            room = payload - conn->done;
            to = nowhere;
            if (conn->into != NULL) {
                to = conn->into + conn->done;
            }
            else if (room > sizeof(nowhere)) {
                room = sizeof(nowhere);
            }
        }
        ssize_t got = recv(conn->fd, to, room < budget ? room : budget, MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
            return;
        }
        if (got <= 0) {
            lost(mail, conn, "closed its connection");
            return;
        }
        budget -= (size_t)got;
        bool sound = true;
        if (conn->have < sizeof(conn->frame)) {
            conn->have += (size_t)got;
            if (conn->have < sizeof(conn->frame)) {
                continue;
            }
            sound = frame_done(mail, conn);
            payload = conn->frame.payload != 0 ? conn->frame.bytes : 0;
        }
        else {
            conn->done += (size_t)got;
        }
        if (conn->fd >= 0 && sound && conn->done == payload) {
            conn->have = 0;
            sound = payload_done(mail, conn);
        }
        if (conn->fd >= 0 && !sound) {
            lost(mail, conn, "sent bytes that no member sends");
        }
    }
}

void
mail_conn_event(dm_mail *mail, mail_conn *conn, unsigned events)
{
    if (conn->fd < 0) {
        return;
    }
    if (conn->connecting) {
        connected(mail, conn);
        return;
    }
    if ((events & EPOLLOUT) != 0) {
        flush(mail, conn);
    }
    if (conn->fd >= 0 && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
        read_frames(mail, conn);
    }
}
