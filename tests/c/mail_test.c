/* Messages between members that are threads of this process.
 *
 * sources: base store backend/mail backend/dm_op.c
 * sanitize: address,undefined thread
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "backend/mail/dm_mail.h"
#include "base/dm_alloc.h"
#include "dm_test.h"
#include "store/dm_store.h"

enum { SIZE = 3, LARGE = 200 * 1000 };

static const int32_t ranks[SIZE] = {10, 20, 30};

typedef struct message {
    dm_mail_item item;
    dm_op op;
    int32_t source;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool ended;
    dm_status status;
    dm_error err;
} message;

static void
ended(dm_mail_item *item, dm_status status, const dm_error *err)
{
    message *m = (message *)item;
    pthread_mutex_lock(&m->lock);
    CHECK(!m->ended);
    m->ended = true;
    m->status = status;
    if (err != NULL) {
        m->err = *err;
    }
    pthread_cond_signal(&m->changed);
    pthread_mutex_unlock(&m->lock);
}

static message *
message_new(dm_op_kind kind, int32_t peer, uint32_t tag, void *data, size_t count)
{
    message *m = dm_calloc(1, sizeof(*m));
    pthread_mutex_init(&m->lock, NULL);
    pthread_cond_init(&m->changed, NULL);
    m->op.kind = kind;
    m->op.dtype = DM_UINT8;
    m->op.root = peer;
    m->op.tag = tag;
    m->op.count = count;
    m->op.input = kind == DM_OP_SEND ? data : NULL;
    m->op.output = kind == DM_OP_RECV ? data : NULL;
    m->op.source = &m->source;
    m->item.op = &m->op;
    m->item.deadline = DM_FOREVER;
    m->item.ended = ended;
    return m;
}

static dm_status
finish(message *m)
{
    pthread_mutex_lock(&m->lock);
    while (!m->ended) {
        pthread_cond_wait(&m->changed, &m->lock);
    }
    pthread_mutex_unlock(&m->lock);
    return m->status;
}

static void
message_free(message *m)
{
    pthread_cond_destroy(&m->changed);
    pthread_mutex_destroy(&m->lock);
    dm_free(m);
}

static dm_mail *
open_mail(dm_store *store, int32_t rank)
{
    dm_comm_config config = {.rank = rank,
                             .size = SIZE,
                             .ranks = ranks,
                             .name = "group",
                             .store = store,
                             .timeout_ns = -1};
    dm_wait forever = DM_WAIT_FOREVER;
    dm_error err;
    dm_mail *mail = NULL;
    CHECK_OK(dm_mail_open(&config, "127.0.0.1", &forever, &mail, &err));
    return mail;
}

static message *
post(dm_mail *mail, message *m)
{
    dm_error err;
    CHECK_OK(dm_mail_post(mail, &m->item, &err));
    return m;
}

static dm_store *
new_store(void)
{
    dm_error err;
    dm_store *store = NULL;
    CHECK_OK(dm_store_hash_new(&store, &err));
    return store;
}

/* --- everybody sends to everybody -------------------------------------------------------- */

typedef struct member {
    pthread_t thread;
    dm_store *store;
    int32_t rank;
} member;

static const size_t sizes[] = {0, 1, 1000, LARGE, 3};
enum { ROUNDS = 5, SIZES = 5 };

static void *
talk(void *arg)
{
    const member *me = arg;
    dm_mail *mail = open_mail(me->store, me->rank);
    enum { ALL = SIZE * SIZES * ROUNDS };
    message *sends[ALL];
    message *receives[ALL];
    char *buffers[2 * ALL];
    int n = 0;
    for (int round = 0; round < ROUNDS; round++) {
        for (int32_t peer = 0; peer < SIZE; peer++) {
            for (uint32_t i = 0; i < SIZES && peer != me->rank; i++) {
                char *in = dm_calloc(sizes[i] + 1, 1);
                char *out = dm_calloc(sizes[i] + 1, 1);
                memset(out, me->rank * 50 + round * SIZES + (int)i, sizes[i]);
                sends[n] = message_new(DM_OP_SEND, peer, i, out, sizes[i]);
                receives[n] = message_new(DM_OP_RECV, peer, i, in, sizes[i]);
                buffers[2 * n] = in;
                buffers[2 * n + 1] = out;
                if ((n + me->rank) % 2 == 0) {
                    post(mail, receives[n]);
                    post(mail, sends[n]);
                }
                else {
                    post(mail, sends[n]);
                    post(mail, receives[n]);
                }
                n++;
            }
        }
    }
    int at = 0;
    for (int round = 0; round < ROUNDS; round++) {
        for (int32_t peer = 0; peer < SIZE; peer++) {
            for (uint32_t i = 0; i < SIZES && peer != me->rank; i++) {
                CHECK_INT(finish(receives[at]), DM_OK);
                CHECK_INT(receives[at]->source, peer);
                char wanted = (char)(peer * 50 + round * SIZES + (int)i);
                const char *got = buffers[2 * at];
                CHECK(sizes[i] == 0 ||
                      (got[0] == wanted && got[sizes[i] - 1] == wanted));
                at++;
            }
        }
    }
    for (int i = 0; i < n; i++) {
        CHECK_INT(finish(sends[i]), DM_OK);
        message_free(sends[i]);
        message_free(receives[i]);
        dm_free(buffers[2 * i]);
        dm_free(buffers[2 * i + 1]);
    }
    dm_mail_stop(mail, DM_ERR_CLOSED, "closed", NULL);
    dm_mail_join(mail);
    dm_mail_free(mail, false);
    return NULL;
}

static void
everybody_to_everybody(void)
{
    dm_store *store = new_store();
    member members[SIZE];
    for (int32_t rank = 0; rank < SIZE; rank++) {
        members[rank] = (member){.store = store, .rank = rank};
        pthread_create(&members[rank].thread, NULL, talk, &members[rank]);
    }
    for (int32_t rank = 0; rank < SIZE; rank++) {
        pthread_join(members[rank].thread, NULL);
    }
    dm_store_release(store);
}

/* --- ends ---------------------------------------------------------------------------------- */

static void
mismatch_and_goodbye(void)
{
    dm_store *store = new_store();
    dm_mail *mails[SIZE];
    char data[16] = "abc";
    char got[16];
    for (int32_t rank = 0; rank < SIZE; rank++) {
        mails[rank] = open_mail(store, rank);
    }
    message *send = post(mails[0], message_new(DM_OP_SEND, 1, 4, data, 4));
    message *receive = post(mails[1], message_new(DM_OP_RECV, DM_ANY_RANK, 4, got, 3));
    CHECK_INT(finish(send), DM_ERR_MISMATCH);
    CHECK_INT(finish(receive), DM_ERR_MISMATCH);
    CHECK_STR(send->err.text,
              "rank 10 (group rank 0) sends 4 uint8 while rank 20 (group "
              "rank 1) receives 3 uint8 (tag 4)");
    CHECK_STR(receive->err.text, send->err.text);
    message_free(send);
    message_free(receive);

    /* Rank 2 knows rank 1 by a message, and learns why it leaves. */
    send = post(mails[1], message_new(DM_OP_SEND, 2, 0, data, 4));
    receive = post(mails[2], message_new(DM_OP_RECV, 1, 0, got, 4));
    CHECK_INT(finish(send), DM_OK);
    CHECK_INT(finish(receive), DM_OK);
    CHECK_STR(got, "abc");
    message *waits = post(mails[2], message_new(DM_OP_RECV, 1, 0, got, 4));
    dm_error why;
    dm_error_set(&why, DM_ERR_TIMEOUT, "timed out");
    dm_mail_stop(mails[1], DM_ERR_CLOSED, "broken", &why);
    CHECK_INT(finish(waits), DM_ERR_PEER);
    CHECK_STR(waits->err.text, "rank 20 (group rank 1) left the group: timed out");
    message *late = post(mails[2], message_new(DM_OP_SEND, 1, 0, data, 4));
    CHECK_INT(finish(late), DM_ERR_PEER);

    dm_error err;
    message *refused = message_new(DM_OP_SEND, 2, 0, data, 4);
    CHECK_INT(dm_mail_post(mails[1], &refused->item, &err), DM_ERR_CLOSED);
    CHECK_STR(err.text, "broken");
    message_free(refused);
    message_free(send);
    message_free(receive);
    message_free(waits);
    message_free(late);

    /* A deadline; nobody ever comes. */
    message *timed = message_new(DM_OP_RECV, 0, 1, got, 4);
    timed->item.deadline = dm_clock_now() + DM_NS_PER_MS;
    CHECK_INT(finish(post(mails[2], timed)), DM_ERR_TIMEOUT);
    message_free(timed);

    message *pending = post(mails[2], message_new(DM_OP_RECV, DM_ANY_RANK, 1, got, 4));
    for (int32_t rank = 0; rank < SIZE; rank++) {
        dm_mail_free(mails[SIZE - 1 - rank], false); /* without a stop or a join */
    }
    CHECK_INT(finish(pending), DM_ERR_CLOSED);
    message_free(pending);
    dm_store_release(store);
}

TEST_MAIN(TEST(everybody_to_everybody), TEST(mismatch_and_goodbye))
