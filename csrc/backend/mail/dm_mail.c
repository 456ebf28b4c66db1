/* The life of a mail and its thread: see dm_mail.h. */
#include "backend/mail/dm_mail.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "backend/mail/dm_mail_private.h"
#include "base/dm_alloc.h"
#include "store/dm_net.h"

enum { EVENTS = 16 };

/* A member that is late is looked for ever less often. */
#define LONGEST_INTERVAL_NS (20 * DM_NS_PER_MS)

static void
close_descriptor(int *fd)
{
    if (*fd >= 0) {
        close(*fd);
        *fd = -1;
    }
}

static void
close_descriptors(dm_mail *mail)
{
    close_descriptor(&mail->listener);
    close_descriptor(&mail->wake);
    close_descriptor(&mail->poll);
}

static void
destroy(dm_mail *mail)
{
    for (int32_t i = 0; mail->peers != NULL && i < mail->size; i++) {
        dm_free(mail->peers[i].why);
    }
    close_descriptors(mail);
    while (mail->conns != NULL) {
        mail_conn *conn = mail->conns;
        mail->conns = conn->next;
        dm_free(conn);
    }
    dm_store_release(mail->store);
    dm_free(mail->why_text);
    dm_free(mail->peers);
    dm_free(mail->name);
    dm_free(mail->ranks);
    pthread_cond_destroy(&mail->joined_changed);
    pthread_mutex_destroy(&mail->lock);
    dm_free(mail);
}

/* Calls `ended` of those that have; the lock is not held. */
static void
tell_ended(dm_mail_item *item)
{
    while (item != NULL) {
        dm_mail_item *next = item->next;
        dm_error *err = item->err;
        item->ended(item, item->status, err);
        dm_free(err);
        item = next;
    }
}

static dm_mail_item *
take_ended(dm_mail *mail)
{
    dm_mail_item *first = mail->ended.head;
    mail_list_init(&mail->ended);
    return first;
}

/* --- the thread ------------------------------------------------------------------------- */

static void
make_key(const dm_mail *mail, int32_t rank, char *key, size_t size)
{
    snprintf(key, size, "%s/mail/%d", mail->name, (int)rank);
}

/* Looks for one peer in the store. The lock is held, and released meanwhile: the store
 * may take a moment. */
static void
look_for(dm_mail *mail, int32_t peer)
{
    char text[DM_STORE_KEY_MAX];
    make_key(mail, peer, text, sizeof(text));
    const char *key = text;
    pthread_mutex_unlock(&mail->lock);

    dm_wait wait = {dm_clock_deadline(DM_NS_PER_S), NULL, NULL};
    bool there = false;
    dm_bytes value = {NULL, 0};
    bool found = dm_store_check(mail->store, &key, 1, &wait, &there, NULL) == DM_OK &&
                 there && dm_store_get(mail->store, key, &wait, &value, NULL) == DM_OK;

    pthread_mutex_lock(&mail->lock);
    if (found && !mail->stopped) {
        mail_call(mail, peer, value.data, value.size);
    }
    if (found) {
        dm_bytes_free(&value);
    }
    mail_peer *p = &mail->peers[peer];
    p->next_look = dm_clock_now() + p->interval;
    p->interval =
        p->interval * 2 < LONGEST_INTERVAL_NS ? p->interval * 2 : LONGEST_INTERVAL_NS;
}

/* Looks for those whose turn it is; returns when the next one's is. */
static int64_t
look_for_peers(dm_mail *mail)
{
    int64_t soonest = DM_FOREVER;
    for (int32_t i = 0; i < mail->size && !mail->stopped; i++) {
        mail_peer *peer = &mail->peers[i];
        if (peer->wanted && peer->next_look <= dm_clock_now()) {
            look_for(mail, i);
        }
        if (peer->wanted && peer->next_look < soonest) {
            soonest = peer->next_look;
        }
    }
    return soonest;
}

/* Frees connections that have ended. */
static void
sweep(dm_mail *mail)
{
    for (mail_conn **at = &mail->conns; *at != NULL;) {
        mail_conn *conn = *at;
        if (conn->fd < 0) {
            *at = conn->next;
            dm_free(conn);
        }
        else {
            at = &conn->next;
        }
    }
}

static void
handle(dm_mail *mail, const struct epoll_event *event)
{
    if (event->data.ptr == &mail->wake) {
        uint64_t count;
        ssize_t got = read(mail->wake, &count, sizeof(count));
        (void)got;
    }
    else if (event->data.ptr == &mail->listener) {
        mail_accept(mail);
    }
    else {
        mail_conn_event(mail, event->data.ptr, event->events);
    }
}

static int
milliseconds_until(int64_t when)
{
    if (when == DM_FOREVER) {
        return -1;
    }
    int64_t left = dm_clock_left(when);
    int64_t ms = (left + DM_NS_PER_MS - 1) / DM_NS_PER_MS;
    return ms > 1000000 ? 1000000 : (int)ms;
}

static void *
work(void *arg)
{
    dm_mail *mail = arg;
    pthread_setname_np(pthread_self(), "dm-mail");
    pthread_mutex_lock(&mail->lock);
    while (!mail->stopped) {
        int64_t next_look = look_for_peers(mail);
        int64_t next = mail_expire(mail, dm_clock_now());
        next = next_look < next ? next_look : next;
        /* While there is traffic the thread wakes up now and then anyway, so that posting
         * need not wake it to tell it a deadline. */
        int64_t rest = dm_clock_deadline(mail->busy ? DM_NS_PER_S : -1);
        next = rest < next ? rest : next;
        mail->busy = false;
        dm_mail_item *ended = take_ended(mail);
        sweep(mail); /* here: no event of epoll's speaks of them any more */
        if (ended != NULL) {
            next = 0; /* what they did may have changed everything */
        }
        mail->wakes_at = next;
        pthread_mutex_unlock(&mail->lock);
        tell_ended(ended);

        struct epoll_event events[EVENTS];
        int n = epoll_wait(mail->poll, events, EVENTS, milliseconds_until(next));
        pthread_mutex_lock(&mail->lock);
        mail->wakes_at = 0;
        for (int i = 0; i < n && !mail->stopped; i++) {
            handle(mail, &events[i]);
        }
    }
    dm_mail_item *ended = take_ended(mail);
    pthread_mutex_unlock(&mail->lock);
    tell_ended(ended);

    pthread_mutex_lock(&mail->lock);
    mail->left = true;
    bool orphan = mail->orphan;
    pthread_mutex_unlock(&mail->lock);
    if (orphan) {
        destroy(mail);
    }
    return NULL;
}

/* --- life ------------------------------------------------------------------------------- */

static dm_status
open_descriptors(dm_mail *mail, const char *host, const dm_wait *wait, dm_error *err)
{
    DM_TRY(dm_net_listen(host, 0, wait, &mail->listener, err));
    mail->poll = epoll_create1(EPOLL_CLOEXEC);
    mail->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (mail->poll < 0 || mail->wake < 0) {
        return dm_error_set_errno(err, errno, "cannot make an epoll");
    }
    struct epoll_event wake = {.events = EPOLLIN, .data.ptr = &mail->wake};
    struct epoll_event call = {.events = EPOLLIN, .data.ptr = &mail->listener};
    if (epoll_ctl(mail->poll, EPOLL_CTL_ADD, mail->wake, &wake) != 0 ||
        epoll_ctl(mail->poll, EPOLL_CTL_ADD, mail->listener, &call) != 0) {
        return dm_error_set_errno(err, errno, "cannot watch a socket");
    }
    if (getrandom(mail->token, sizeof(mail->token), 0) !=
        (ssize_t)sizeof(mail->token)) {
        return dm_error_set_errno(err, errno, "cannot read random bytes");
    }
    return DM_OK;
}

static dm_status
publish(const dm_mail *mail, const dm_wait *wait, dm_error *err)
{
    char key[DM_STORE_KEY_MAX];
    char record[MAIL_RECORD_MAX];
    size_t size = 0;
    make_key(mail, mail->rank, key, sizeof(key));
    DM_TRY(mail_record(mail, record, &size, err));
    return dm_store_set(mail->store, key, record, size, wait, err);
}

static dm_status
start(dm_mail *mail, dm_error *err)
{
    sigset_t all;
    sigset_t old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int failed = pthread_create(&mail->thread, NULL, work, mail);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (failed != 0) {
        return dm_error_set_errno(err, failed, "cannot start the thread of messages");
    }
    return DM_OK;
}

dm_status
dm_mail_open(const dm_comm_config *config, const char *host, const dm_wait *wait,
             dm_mail **mail, dm_error *err)
{
    if (config->store == NULL) {
        return dm_error_set(
            err, DM_ERR_UNSUPPORTED,
            "members of a world without a store cannot find each other");
    }
    dm_mail *m = dm_calloc(1, sizeof(*m));
    if (m == NULL) {
        return dm_error_set_no_memory(err, "what messages need");
    }
    pthread_mutex_init(&m->lock, NULL);
    pthread_cond_init(&m->joined_changed, NULL);
    m->poll = m->wake = m->listener = -1;
    m->rank = config->rank;
    m->size = config->size;
    m->ranks = dm_memdup(config->ranks, (size_t)config->size * sizeof(*m->ranks));
    m->name = dm_strdup(config->name);
    m->store = dm_store_hold(config->store);
    m->peers = dm_calloc((size_t)config->size, sizeof(*m->peers));
    m->arrivals_tail = &m->arrivals;
    mail_list_init(&m->sends);
    mail_list_init(&m->receives);
    mail_list_init(&m->expecting);
    mail_list_init(&m->ended);

    dm_status status;
    if (m->ranks == NULL || m->name == NULL || m->peers == NULL) {
        status = dm_error_set_no_memory(err, "what messages need");
        goto destroy_mail;
    }
    for (int32_t i = 0; i < m->size; i++) {
        mail_list_init(&m->peers[i].waiting);
    }
    DM_TRY_GOTO(status, open_descriptors(m, host, wait, err), destroy_mail);
    DM_TRY_GOTO(status, publish(m, wait, err), destroy_mail);
    DM_TRY_GOTO(status, start(m, err), destroy_mail);
    *mail = m;
    return DM_OK;

destroy_mail:
    destroy(m);
    return status;
}

dm_status
dm_mail_post(dm_mail *mail, dm_mail_item *item, dm_error *err)
{
    item->next = NULL;
    item->err = NULL;
    pthread_mutex_lock(&mail->lock);
    if (mail->stopped) {
        dm_error_set(err, mail->why, "%s",
                     mail->why_text != NULL ? mail->why_text : "no more messages");
        dm_status status = mail->why;
        pthread_mutex_unlock(&mail->lock);
        return status;
    }
    mail_post(mail, item);
    dm_mail_item *ended = take_ended(mail);
    pthread_mutex_unlock(&mail->lock);
    tell_ended(ended);
    return DM_OK;
}

/* Says why to everybody that can hear it without waiting. */
static void
say_goodbye(dm_mail *mail, dm_status status, const char *text)
{
    /* A text that names who is to blame is passed on as it is. */
    bool named = status == DM_ERR_MISMATCH || status == DM_ERR_PEER;
    char words[MAIL_TEXT_SIZE];
    snprintf(words, sizeof(words), "%s%s%.400s",
             named ? "" : mail_rank_name(mail, mail->rank).text,
             named ? "" : " left the group: ", text);
    mail_frame frame = {
        .kind = MAIL_BYE, .tag = (uint32_t)-(int)status, .bytes = strlen(words)};
    mail_send_to_all(mail, &frame, words);
}

void
dm_mail_stop(dm_mail *mail, dm_status status, const char *text, const dm_error *tell)
{
    pthread_mutex_lock(&mail->lock);
    if (mail->stopped) {
        pthread_mutex_unlock(&mail->lock);
        return;
    }
    mail->stopped = true;
    mail->why = status;
    mail->why_text = dm_strdup(text);
    if (tell != NULL) {
        say_goodbye(mail, tell->status, tell->text);
    }
    mail_end_all(mail, status, text);
    mail_hang_up(mail, -1);
    mail_wake(mail);
    dm_mail_item *ended = take_ended(mail);
    pthread_mutex_unlock(&mail->lock);
    tell_ended(ended);
}

void
dm_mail_join(dm_mail *mail)
{
    if (pthread_equal(mail->thread, pthread_self())) {
        return;
    }
    pthread_mutex_lock(&mail->lock);
    while (mail->joining && !mail->joined) {
        pthread_cond_wait(&mail->joined_changed, &mail->lock);
    }
    if (!mail->joined) {
        mail->joining = true;
        pthread_mutex_unlock(&mail->lock);
        pthread_join(mail->thread, NULL);
        pthread_mutex_lock(&mail->lock);
        mail->joined = true;
        close_descriptors(mail);
        pthread_cond_broadcast(&mail->joined_changed);
    }
    pthread_mutex_unlock(&mail->lock);
}

void
dm_mail_free(dm_mail *mail, bool forked)
{
    if (mail == NULL || forked) {
        return; /* a child: the lock may have been held, the sockets are the parent's */
    }
    dm_mail_stop(mail, DM_ERR_CLOSED, "the group was closed", NULL);
    pthread_mutex_lock(&mail->lock);
    bool leave_it = !mail->joined && !mail->left;
    if (leave_it) {
        mail->orphan = true;
        pthread_detach(mail->thread);
    }
    pthread_mutex_unlock(&mail->lock);
    if (leave_it) {
        return;
    }
    if (!mail->joined) {
        pthread_join(mail->thread, NULL); /* it is about to return, if it has not */
    }
    destroy(mail);
}
