/* How members of a gloo group meet and what they tell each other, over a store in this
 * process.
 *
 * sources: base store backend/gloo/dm_gloo_meet.c backend/gloo/dm_gloo_report.c
 * sanitize: address,undefined thread
 */
#include "dm_test.h"

#include <pthread.h>

#include "backend/gloo/dm_gloo_meet.h"
#include "backend/gloo/dm_gloo_report.h"
#include "store/dm_store.h"

enum { ADDRESS = 24, MEMBERS = 3 };

static const int32_t ranks[] = {10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21};

static dm_store *
new_store(void)
{
    dm_store *store;
    dm_error err = DM_ERROR_INIT;
    CHECK_OK(dm_store_hash_new(&store, &err));
    return store;
}

static dm_wait
soon(void)
{
    return (dm_wait){dm_clock_deadline(20 * DM_NS_PER_MS), NULL, NULL};
}

static dm_wait
long_enough(void)
{
    return (dm_wait){dm_clock_deadline(60 * DM_NS_PER_S), NULL, NULL};
}

/* One member's view: all others are its peers. */
typedef struct member {
    dm_gloo_meeting meeting;
    int32_t peers[MEMBERS];
    char mine[MEMBERS][ADDRESS];
    char theirs[MEMBERS][ADDRESS];
} member;

static void
member_init(member *m, dm_store *store, int32_t rank, int32_t size)
{
    memset(m, 0, sizeof(*m));
    size_t n = 0;
    for (int32_t i = 0; i < size; i++) {
        if (i != rank) {
            snprintf(m->mine[n], ADDRESS, "%d waits for %d", rank, i);
            m->peers[n++] = i;
        }
    }
    m->meeting = (dm_gloo_meeting){.store = store,
                                   .name = "mesh/group",
                                   .stage = "first",
                                   .rank = rank,
                                   .ranks = ranks,
                                   .peers = m->peers,
                                   .peer_count = n,
                                   .address_size = ADDRESS,
                                   .netif = "lo (127.0.0.1)",
                                   .loopback = 1};
}

static dm_status
meet(member *m, const dm_wait *wait, dm_error *err)
{
    return dm_gloo_meet(&m->meeting, m->mine, m->theirs, wait, err);
}

static void *
meet_on_thread(void *arg)
{
    member *m = arg;
    dm_error err = DM_ERROR_INIT;
    dm_wait wait = long_enough();
    CHECK_OK(meet(m, &wait, &err));
    return NULL;
}

static void
everybody_gets_what_is_meant_for_it(void)
{
    dm_store *store = new_store();
    member members[MEMBERS];
    pthread_t threads[MEMBERS];
    for (int32_t i = 0; i < MEMBERS; i++) {
        member_init(&members[i], store, i, MEMBERS);
        CHECK_INT(pthread_create(&threads[i], NULL, meet_on_thread, &members[i]), 0);
    }
    for (int32_t i = 0; i < MEMBERS; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
        for (size_t k = 0; k < MEMBERS - 1; k++) {
            char expected[ADDRESS];
            snprintf(expected, ADDRESS, "%d waits for %d", members[i].peers[k], i);
            CHECK_STR(members[i].theirs[k], expected);
        }
    }
    dm_store_release(store);
}

/* The key and value that a member of two has published. */
static dm_bytes
published(dm_store *store, int32_t rank)
{
    member m;
    member_init(&m, store, rank, 2);
    dm_wait wait = soon();
    dm_error err;
    (void)meet(&m, &wait, &err); /* whoever is there */
    char key[64];
    snprintf(key, sizeof(key), "mesh/group/addr/first/%d", rank);
    dm_bytes value;
    wait = long_enough();
    CHECK_OK(dm_store_get(store, key, &wait, &value, &err));
    return value;
}

static void
publish(dm_store *store, const void *data, size_t size)
{
    dm_wait wait = long_enough();
    dm_error err;
    CHECK_OK(dm_store_set(store, "mesh/group/addr/first/1", data, size, &wait, &err));
}

/* Rank 0's meeting fails so, whatever rank 1 has published. */
static void
refused(dm_store *store, dm_status status, const char *text)
{
    member m;
    member_init(&m, store, 0, 2);
    dm_wait wait = long_enough();
    dm_error err;
    CHECK_ERR(meet(&m, &wait, &err), status);
    CHECK_CONTAINS(err.text, "rank 11");
    CHECK_CONTAINS(err.text, text);
}

static void
what_is_no_address(void)
{
    dm_store *store = new_store();
    dm_bytes good = published(store, 1);
    char *bad = dm_malloc_array(good.size, 1);

    publish(store, "", 0);
    refused(store, DM_ERR_PROTOCOL, "0 bytes");
    publish(store, "torch", 5);
    refused(store, DM_ERR_PROTOCOL, "another version");
    publish(store, good.data, good.size - 1);
    refused(store, DM_ERR_PROTOCOL, "another version");
    for (size_t i = 0; i < 12; i++) { /* magic, size of an address, count */
        memcpy(bad, good.data, good.size);
        bad[i] = (char)(bad[i] + 1);
        publish(store, bad, good.size);
        refused(store, DM_ERR_PROTOCOL, "");
    }

    /* For another rank than this one. */
    memcpy(bad, good.data, good.size);
    bad[good.size - ADDRESS - sizeof(int32_t)] = 7;
    publish(store, bad, good.size);
    refused(store, DM_ERR_PROTOCOL, "no address for rank 10");

    dm_free(bad);
    dm_bytes_free(&good);
    dm_store_release(store);
}

static void
loopback_across_hosts(void)
{
    dm_store *store = new_store();
    dm_bytes value = published(store, 1);
    value.data[16 + 5] ^= 1; /* in the host's identity */
    publish(store, value.data, value.size);
    refused(store, DM_ERR_CONNECTION, "DEVICEMESH_SOCKET_IFNAME");

    /* Fine where neither is on loopback. */
    value.data[12] = 0;
    publish(store, value.data, value.size);
    refused(store, DM_ERR_CONNECTION, "is on another host");
    member m;
    member_init(&m, store, 0, 2);
    m.meeting.loopback = 0;
    dm_wait wait = long_enough();
    dm_error err = DM_ERROR_INIT;
    CHECK_OK(meet(&m, &wait, &err));
    dm_bytes_free(&value);
    dm_store_release(store);
}

static void
time_outs_name_the_missing(void)
{
    dm_store *store = new_store();
    int32_t peers[11];
    for (int32_t i = 0; i < 11; i++) {
        peers[i] = i + 1;
    }
    member m;
    member_init(&m, store, 0, 2);
    char mine[11][ADDRESS] = {{0}}, theirs[11][ADDRESS];
    m.meeting.peers = peers;
    m.meeting.peer_count = 11;
    dm_wait wait = soon();
    dm_error err;
    CHECK_ERR(dm_gloo_meet(&m.meeting, mine, theirs, &wait, &err), DM_ERR_TIMEOUT);
    CHECK_CONTAINS(err.text,
                   "timed out after 0.0 s waiting for ranks 11 (group rank 1), "
                   "12 (group rank 2), ");
    CHECK_CONTAINS(err.text, "18 (group rank 8) and 3 more to join the group");

    for (int32_t i = 1; i < 12; i++) {
        if (i != 5) {
            dm_bytes value = published(store, i);
            dm_bytes_free(&value);
        }
    }
    wait = soon();
    CHECK_ERR(dm_gloo_meet(&m.meeting, mine, theirs, &wait, &err), DM_ERR_TIMEOUT);
    CHECK_CONTAINS(err.text, "waiting for rank 15 (group rank 5) to join the group");
    dm_store_release(store);
}

static void
last_words_end_a_meeting(void)
{
    dm_store *store = new_store();
    dm_gloo_cause first = {DM_ERR_VALUE, "rank 11 left the group: no interface"};
    dm_gloo_cause second = {DM_ERR_PEER, "rank 11 closed its connection"};
    dm_gloo_cause found = dm_gloo_last_words(store, "mesh/group", &first);
    CHECK_INT(found.status, DM_ERR_VALUE);
    CHECK_STR(found.text, first.text);
    found = dm_gloo_last_words(store, "mesh/group", &second);
    CHECK_INT(found.status, DM_ERR_VALUE);
    CHECK_STR(found.text, first.text);
    found = dm_gloo_last_words(store, "mesh/other", &second);
    CHECK_INT(found.status, DM_ERR_PEER);

    member m;
    member_init(&m, store, 0, 2);
    dm_wait wait = long_enough();
    dm_error err;
    CHECK_ERR(meet(&m, &wait, &err), DM_ERR_PEER);

    dm_store_close(store);
    found = dm_gloo_last_words(store, "mesh/group", &second);
    CHECK_INT(found.status, DM_OK);
    dm_store_release(store);
}

static void
reports(void)
{
    dm_store *store = new_store();
    dm_gloo_report mine = {
        .turn = 3, .key = 7, .kind = 1, .peer = 2, .text = "a barrier"};
    dm_gloo_report found;
    CHECK(!dm_gloo_report_get(store, "g", 1, &found));
    dm_gloo_report_put(store, "g", 1, &mine);
    CHECK(dm_gloo_report_get(store, "g", 1, &found));
    CHECK(memcmp(&mine, &found, sizeof(mine)) == 0);
    CHECK(!dm_gloo_report_get(store, "g", 2, &found));
    CHECK(!dm_gloo_report_get(store, "h", 1, &found));

    dm_wait wait = long_enough();
    dm_error err = DM_ERROR_INIT;
    CHECK_OK(dm_store_set(store, "g/waits/1", "short", 5, &wait, &err));
    CHECK(!dm_gloo_report_get(store, "g", 1, &found));
    dm_store_close(store);
    CHECK(!dm_gloo_report_get(store, "g", 1, &found));
    dm_store_release(store);
}

TEST_MAIN(TEST(everybody_gets_what_is_meant_for_it), TEST(what_is_no_address),
          TEST(loopback_across_hosts), TEST(time_outs_name_the_missing),
          TEST(last_words_end_a_meeting), TEST(reports))
