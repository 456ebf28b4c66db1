/* Worlds, groups, works and the cache, over a backend that this file controls.
 *
 * sources: base group store backend/fake backend/dm_op.c backend/reduce backend/mail backend/gloo/dm_netif.c
 * sanitize: address,undefined thread
 */
#include "dm_test.h"

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "group/dm_group.h"
#include "group/dm_group_cache.h"
#include "group/dm_world.h"
#include "store/dm_store.h"

static const dm_wait forever = DM_WAIT_FOREVER;

/* --- a backend under control: "gloo" of this executable --------------------------- */

struct dm_comm {
    atomic_bool aborted;
};

static struct {
    atomic_int connects;
    atomic_int connect_blocks; /* connect waits until its deadline */
    atomic_int run_blocks;     /* run waits until this is 0 */
    atomic_int run_fails;      /* a dm_status */
    atomic_int entered;        /* runs that have begun */
    atomic_int inside;         /* runs at this moment */
    atomic_int comms;          /* communicators alive */
    atomic_int order[64];      /* tags in the order of runs */
} lab;

static void
lab_reset(void)
{
    lab.connects = 0;
    lab.connect_blocks = 0;
    lab.run_blocks = 0;
    lab.run_fails = DM_OK;
    lab.entered = 0;
    CHECK_INT(lab.inside, 0);
    CHECK_INT(lab.comms, 0);
}

static bool
lab_supports(dm_op_kind kind, dm_dtype dtype, dm_reduce_op reduce)
{
    (void)kind;
    return dtype == DM_FLOAT32 && reduce != DM_BAND;
}

static dm_status
lab_new(const dm_comm_config *config, dm_comm **comm, dm_error *err)
{
    (void)config;
    (void)err;
    *comm = dm_calloc(1, sizeof(**comm));
    CHECK(*comm != NULL);
    lab.comms++;
    return DM_OK;
}

static void
nap(void)
{
    usleep(200);
}

static dm_status
lab_connect(dm_comm *comm, const dm_wait *wait, dm_error *err)
{
    (void)comm;
    lab.connects++;
    while (lab.connect_blocks) {
        DM_TRY(dm_wait_poll(wait, err));
        nap();
    }
    return DM_OK;
}

static dm_status
lab_run(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    CHECK_INT(lab.inside++, 0); /* alone */
    lab.order[lab.entered++] = (int)op->tag;
    dm_status status = DM_OK;
    while (lab.run_blocks && status == DM_OK) {
        if (comm->aborted) {
            status = dm_error_set(err, DM_ERR_ABORTED, "the backend was aborted");
        }
        else {
            status = dm_wait_poll(wait, err);
        }
        nap();
    }
    if (status == DM_OK && lab.run_fails != DM_OK) {
        status = dm_error_set(err, (dm_status)lab.run_fails, "the lab says no");
    }
    if (status == DM_OK && op->source != NULL) {
        *op->source = 1;
    }
    lab.inside--;
    return status;
}

static void
lab_abort(dm_comm *comm)
{
    comm->aborted = true;
}

static void
lab_free(dm_comm *comm, bool forked)
{
    (void)forked;
    lab.comms--;
    dm_free(comm);
}

static const char *
lab_transport(const dm_comm *comm)
{
    (void)comm;
    return "lab";
}

static const dm_backend lab_backend = {
    DM_BACKEND_ABI, "gloo",  0,         lab_supports, lab_new,
    lab_connect,    lab_run, lab_abort, lab_free,     lab_transport,
};

dm_status
dm_backend_check_name(const char *name, dm_error *err)
{
    if (strcmp(name, "gloo") != 0) {
        return dm_error_set(err, DM_ERR_VALUE, "unknown backend '%s'", name);
    }
    return DM_OK;
}

dm_status
dm_backend_find(const char *name, const dm_backend **backend, dm_error *err)
{
    DM_TRY(dm_backend_check_name(name, err));
    *backend = &lab_backend;
    return DM_OK;
}

/* --- helpers ------------------------------------------------------------------------ */

/* Ends a test that hangs: conditions are awaited for at most this long. */
#define EVENTUALLY(condition)                                                          \
    do {                                                                               \
        int64_t until_ = dm_clock_deadline(20 * DM_NS_PER_S);                          \
        while (!(condition)) {                                                         \
            CHECK(dm_clock_left(until_) > 0);                                          \
            nap();                                                                     \
        }                                                                              \
    } while (0)

static dm_store *
new_store(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_store *store = NULL;
    CHECK_OK(dm_store_hash_new(&store, &err));
    return store;
}

static dm_world *
new_world(int32_t rank, int32_t size, dm_store *store)
{
    dm_error err = DM_ERROR_INIT;
    dm_world_config config = {rank, size, store, 30 * DM_NS_PER_S, store == NULL};
    dm_world *world = NULL;
    CHECK_OK(dm_world_new(&config, &world, &err));
    return world;
}

/* The one world most tests need: rank 0 of 2. */
static dm_world *
world_of_two(void)
{
    dm_store *store = new_store();
    dm_world *world = new_world(0, 2, store);
    dm_store_release(store);
    return world;
}

static const int32_t both[] = {0, 1};

static dm_group_spec
spec_of(const char *identity)
{
    return (dm_group_spec){both, 2, identity, "tp", "gloo", 30 * DM_NS_PER_S};
}

static dm_group *
new_group(dm_world *world, const char *identity)
{
    dm_error err = DM_ERROR_INIT;
    dm_group_spec spec = spec_of(identity);
    dm_group *group = NULL;
    CHECK_OK(dm_group_new(world, &spec, &group, &err));
    return group;
}

static dm_op
op_of(uint32_t tag)
{
    return (dm_op){.kind = DM_OP_ALL_REDUCE, .dtype = DM_FLOAT32, .tag = tag};
}

static atomic_int done_calls;

static void
count_done(void *arg, dm_status status)
{
    (void)arg;
    (void)status;
    done_calls++;
}

static dm_work *
submit(dm_group *group, uint32_t tag)
{
    dm_error err = DM_ERROR_INIT;
    dm_op op = op_of(tag);
    dm_work *work = NULL;
    CHECK_OK(dm_group_submit(group, &op, count_done, NULL, &work, &err));
    return work;
}

static void
drop(dm_world *world, dm_group *group)
{
    dm_group_release(group);
    dm_world_release(world);
    EVENTUALLY(lab.comms == 0);
}

/* --- worlds --------------------------------------------------------------------------- */

static void
world_refuses_bad_arguments(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_world *world = NULL;
    dm_world_config config = {0, 0, NULL, -1, true};
    CHECK_INT(dm_world_new(&config, &world, &err), DM_ERR_VALUE);
    config = (dm_world_config){2, 2, NULL, -1, true};
    CHECK_INT(dm_world_new(&config, &world, &err), DM_ERR_VALUE);
    CHECK_CONTAINS(err.text, "0..1");
    CHECK_CONTAINS(err.text, "got 2");
    config = (dm_world_config){0, 2, NULL, -1, false};
    CHECK_INT(dm_world_new(&config, &world, &err), DM_ERR_VALUE);
    CHECK_CONTAINS(err.text, "needs a store");
    CHECK(world == NULL);
    config = (dm_world_config){0, 1, NULL, -1, false};
    CHECK_OK(dm_world_new(&config, &world, &err));
    dm_world_release(world);
}

static void
members_agree(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_store *store = new_store();
    dm_world *a = new_world(0, 2, store);
    dm_world *b = new_world(1, 2, store);
    char first[DM_IDENTITY_SIZE], second[DM_IDENTITY_SIZE], other[DM_IDENTITY_SIZE];
    CHECK_OK(dm_world_agree(a, "set", "mesh (2,)", &forever, first, &err));
    CHECK_OK(dm_world_agree(b, "set", "mesh (2,)", &forever, second, &err));
    CHECK_STR(first, second);
    /* Each request of one set has an identity of its own, in step on all members. */
    CHECK_OK(dm_world_agree(a, "alone", "mesh (1,)", &forever, other, &err));
    CHECK_OK(dm_world_agree(a, "set", "mesh (1, 2)", &forever, second, &err));
    CHECK(strcmp(first, second) != 0);
    CHECK(strcmp(first, other) != 0);
    CHECK_OK(dm_world_agree(b, "set", "mesh (1, 2)", &forever, other, &err));
    CHECK_STR(second, other);
    CHECK_OK(dm_world_check_marks(a, first, &forever, &err));
    dm_world_release(a);
    dm_world_release(b);
    dm_store_release(store);
}

static void
members_disagree(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_store *store = new_store();
    dm_world *a = new_world(0, 2, store);
    dm_world *b = new_world(1, 2, store);
    char first[DM_IDENTITY_SIZE], second[DM_IDENTITY_SIZE] = "untouched";
    CHECK_OK(dm_world_agree(a, "set", "mesh (1, 2)", &forever, first, &err));
    CHECK_INT(dm_world_agree(b, "set", "mesh (2, 1)", &forever, second, &err),
              DM_ERR_MISMATCH);
    CHECK_STR(second, "untouched");
    CHECK_CONTAINS(err.text, "rank 0 for mesh (1, 2)");
    CHECK_CONTAINS(err.text, "rank 1 for mesh (2, 1)");

    char group_name[2 * DM_IDENTITY_SIZE];
    snprintf(group_name, sizeof(group_name), "%s/abc.0", first);
    dm_error found = DM_ERROR_INIT;
    CHECK_INT(dm_world_check_marks(a, group_name, &forever, &found), DM_ERR_MISMATCH);
    CHECK_STR(found.text, err.text);

    /* The next request starts afresh. */
    CHECK_OK(dm_world_agree(a, "set", "mesh (2,)", &forever, first, &err));
    CHECK_OK(dm_world_agree(b, "set", "mesh (2,)", &forever, second, &err));
    CHECK_STR(first, second);
    CHECK_OK(dm_world_check_marks(b, first, &forever, &err));
    dm_world_release(a);
    dm_world_release(b);
    dm_store_release(store);
}

/* Meshes of other members: each agrees, so only the last requests tell. */
static void
ranks_outside_are_explained(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_store *store = new_store();
    dm_world *a = new_world(0, 4, store);
    dm_world *b = new_world(1, 4, store);
    dm_world *c = new_world(2, 4, store);
    dm_world *d = new_world(3, 4, store);
    char identity[DM_IDENTITY_SIZE];
    int32_t members[] = {0, 1};
    dm_wait at_once = {dm_clock_now(), NULL, NULL};

    /* Nothing to say before a member has asked for anything. */
    CHECK_OK(dm_world_note(c, "mesh (2,)", &forever, &err));
    dm_error found = DM_ERROR_INIT;
    dm_world_explain_outside(c, members, 2, "mesh (2,)", &at_once, &found);
    CHECK_STR(found.text, "");

    CHECK_OK(dm_world_agree(a, "0123", "mesh (4,)", &forever, identity, &err));
    CHECK_OK(dm_world_agree(b, "0123", "mesh (4,)", &forever, identity, &err));
    CHECK_OK(dm_world_note(d, "mesh (2,)", &forever, &err));
    dm_world_explain_outside(c, members, 2, "mesh (2,)", &forever, &found);
    CHECK_STR(found.text, "; ranks 0, 1 last asked for mesh (4,); this rank asked for "
                          "mesh (2,)");

    int32_t all[] = {0, 1, 2, 3};
    dm_error_set(&err, DM_ERR_TIMEOUT, "timed out");
    dm_world_explain_missing(a, all, 4, &err);
    CHECK_STR(err.text,
              "timed out; ranks 2, 3 last asked for mesh (2,); this rank last "
              "asked for mesh (4,)");

    /* A member that asked for the same is not worth a word. */
    CHECK_OK(dm_world_agree(b, "01", "mesh (2,)", &forever, identity, &err));
    found = (dm_error)DM_ERROR_INIT;
    dm_world_explain_outside(c, members, 2, "mesh (2,)", &forever, &found);
    CHECK_STR(found.text, "; rank 0 last asked for mesh (4,); this rank asked for mesh "
                          "(2,)");
    CHECK_OK(dm_world_agree(a, "01", "mesh (2,)", &forever, identity, &err));
    found = (dm_error)DM_ERROR_INIT;
    dm_world_explain_outside(c, members, 2, "mesh (2,)", &forever, &found);
    CHECK_STR(found.text, "");

    dm_world_close(d);
    CHECK_INT(dm_world_note(d, "mesh (2,)", &forever, &err), DM_ERR_CLOSED);
    dm_world_release(a);
    dm_world_release(b);
    dm_world_release(c);
    dm_world_release(d);
    dm_store_release(store);
}

static void
missing_ranks_are_explained(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_store *store = new_store();
    dm_world *a = new_world(0, 4, store);
    dm_world *b = new_world(1, 4, store);
    dm_world *c = new_world(2, 4, store);
    char identity[DM_IDENTITY_SIZE];
    CHECK_OK(dm_world_agree(a, "0123", "mesh (2, 2)", &forever, identity, &err));
    CHECK_OK(dm_world_agree(b, "0123", "mesh (2, 2)", &forever, identity, &err));
    CHECK_OK(dm_world_agree(c, "02", "mesh (2,)", &forever, identity, &err));
    dm_error_set(&err, DM_ERR_TIMEOUT, "timed out");
    int32_t ranks[] = {0, 1, 2, 3};
    dm_world_explain_missing(a, ranks, 4, &err);
    CHECK_STR(err.text, "timed out; rank 2 last asked for mesh (2,); rank 3 has asked "
                        "for nothing yet; this rank last asked for mesh (2, 2)");
    dm_world_release(a);
    dm_world_release(b);
    dm_world_release(c);
    dm_store_release(store);
}

static void
closed_world_refuses(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_world *world = world_of_two();
    dm_group *group = new_group(world, "x");
    dm_world_close(world);
    dm_world_close(world);
    CHECK(dm_world_is_closed(world));
    CHECK(dm_group_is_closed(group));
    CHECK_INT(lab.comms, 0);
    dm_group *other = NULL;
    dm_group_spec spec = spec_of("y");
    CHECK_INT(dm_group_new(world, &spec, &other, &err), DM_ERR_CLOSED);
    char identity[DM_IDENTITY_SIZE];
    CHECK_INT(dm_world_agree(world, "s", "r", &forever, identity, &err), DM_ERR_CLOSED);
    dm_op op = op_of(0);
    CHECK_INT(dm_group_run(group, &op, &forever, &err), DM_ERR_CLOSED);
    CHECK_STR(err.text, "all_reduce on group 'tp' (ranks 0, 1): the group was closed");
    drop(world, group);
}

/* --- groups --------------------------------------------------------------------------- */

static void
group_refuses_bad_ranks(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_world *world = new_world(1, 4, NULL);
    dm_group *group = NULL;
    int32_t outside[] = {1, 4}, negative[] = {-1, 1}, twice[] = {1, 3, 1};
    int32_t foreign[] = {0, 2, 3};
    dm_group_spec spec = {outside, 2, "x", NULL, "gloo", -1};
    CHECK_INT(dm_group_new(world, &spec, &group, &err), DM_ERR_VALUE);
    CHECK_STR(err.text, "rank 4 is not in the world of size 4");
    spec.ranks = negative;
    CHECK_INT(dm_group_new(world, &spec, &group, &err), DM_ERR_VALUE);
    spec = (dm_group_spec){twice, 3, "x", NULL, "gloo", -1};
    CHECK_INT(dm_group_new(world, &spec, &group, &err), DM_ERR_VALUE);
    CHECK_STR(err.text, "the ranks of a group must differ: 1 is there twice");
    spec.ranks = foreign;
    CHECK_INT(dm_group_new(world, &spec, &group, &err), DM_ERR_VALUE);
    CHECK_STR(err.text, "this rank (1) is not a member of the group of ranks 0, 2, 3");
    spec.size = 0;
    CHECK_INT(dm_group_new(world, &spec, &group, &err), DM_ERR_VALUE);
    spec = (dm_group_spec){outside, 1, "x", NULL, "what", -1};
    CHECK_INT(dm_group_new(world, &spec, &group, &err), DM_ERR_VALUE);
    CHECK(group == NULL);
    dm_world_release(world);
}

static void
groups_without_peers_are_local(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_world *world = world_of_two();
    int32_t me[] = {0};
    dm_group_spec spec = {me, 1, "x", NULL, "gloo", -1};
    dm_group *group = NULL;
    CHECK_OK(dm_group_new(world, &spec, &group, &err));
    CHECK(dm_group_is_local(group));
    CHECK_STR(dm_group_backend(group), "gloo");
    CHECK_STR(dm_group_transport(group), "none");
    float data[2] = {1, 2};
    dm_op op = {.kind = DM_OP_ALL_REDUCE,
                .dtype = DM_FLOAT32,
                .output = data,
                .count = 2,
                .reduce = DM_BAND};
    CHECK_INT(dm_group_run(group, &op, &forever, &err), DM_ERR_UNSUPPORTED);
    CHECK_STR(err.text,
              "all_reduce on group (rank 0): backend 'gloo' has no all_reduce with op "
              "'band' for float32; for this dtype it has: sum, product, min, max, avg, "
              "premul_sum");
    op.reduce = DM_AVG;
    CHECK_OK(dm_group_run(group, &op, &forever, &err));
    CHECK_INT(op.seq, 1);
    dm_work *work = NULL;
    CHECK_OK(dm_group_submit(group, &op, count_done, NULL, &work, &err));
    CHECK(dm_work_is_done(work));
    CHECK_OK(dm_work_wait(work, &forever, &err));
    CHECK_INT(dm_work_seq(work), 2);
    dm_work_release(work);
    dm_group_close(group, &err);
    drop(world, group);
}

static void
first_operation_connects(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_world *world = world_of_two();
    dm_group *group = new_group(world, "x");
    CHECK_INT(lab.connects, 0);
    CHECK_STR(dm_group_transport(group), "lab");
    for (uint32_t i = 0; i < 3; i++) {
        dm_op op = op_of(i);
        CHECK_OK(dm_group_run(group, &op, &forever, &err));
        CHECK_INT(op.seq, i + 1);
    }
    CHECK_INT(lab.connects, 1);
    CHECK_INT(dm_group_seq(group), 3);
    drop(world, group);
}

static void
refused_operation_leaves_the_group_whole(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_world *world = world_of_two();
    dm_group *group = new_group(world, "x");
    dm_op op = op_of(0);
    op.dtype = DM_INT8;
    CHECK_INT(dm_group_run(group, &op, &forever, &err), DM_ERR_UNSUPPORTED);
    CHECK_STR(err.text,
              "all_reduce on group 'tp' (ranks 0, 1): backend 'gloo' has no all_reduce "
              "of int8; with op 'sum' it has: float32");
    op = (dm_op){.kind = DM_OP_RECV, .dtype = DM_FLOAT32, .root = 0};
    CHECK_INT(dm_group_run(group, &op, &forever, &err), DM_ERR_VALUE);
    CHECK_CONTAINS(err.text, "src is this rank itself");
    op.root = 2;
    CHECK_INT(dm_group_run(group, &op, &forever, &err), DM_ERR_VALUE);
    CHECK_CONTAINS(err.text, "src must be a group rank, 0..1 in a group of 2, got 2");
    CHECK_INT(dm_group_seq(group), 0);
    op = op_of(0);
    lab.run_fails = DM_ERR_UNSUPPORTED;
    CHECK_INT(dm_group_run(group, &op, &forever, &err), DM_ERR_UNSUPPORTED);
    lab.run_fails = DM_OK;
    CHECK_OK(dm_group_run(group, &op, &forever, &err));
    drop(world, group);
}

static void
failure_breaks_the_group(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_world *world = world_of_two();
    dm_group *group = new_group(world, "x");
    dm_op op = op_of(0);
    lab.run_fails = DM_ERR_PEER;
    CHECK_INT(dm_group_run(group, &op, &forever, &err), DM_ERR_PEER);
    CHECK_STR(err.text, "all_reduce #1 on group 'tp' (ranks 0, 1): the lab says no");
    lab.run_fails = DM_OK;
    CHECK_INT(dm_group_run(group, &op, &forever, &err), DM_ERR_CLOSED);
    CHECK_STR(
        err.text,
        "all_reduce on group 'tp' (ranks 0, 1): the group is broken by an earlier "
        "failure: all_reduce #1 on group 'tp' (ranks 0, 1): the lab says no");
    dm_work *work = NULL;
    CHECK_INT(dm_group_submit(group, &op, NULL, NULL, &work, &err), DM_ERR_CLOSED);
    CHECK(!dm_group_is_closed(group));
    drop(world, group);
}

static void
time_out_of_a_connect_is_explained(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_world *world = world_of_two();
    dm_group *group = new_group(world, "x");
    dm_group_set_timeout(group, 10 * DM_NS_PER_MS);
    lab.connect_blocks = 1;
    dm_op op = op_of(0);
    CHECK_INT(dm_group_run(group, &op, &forever, &err), DM_ERR_TIMEOUT);
    CHECK_STR(err.text, "all_reduce #1 on group 'tp' (ranks 0, 1): timed out; rank 1 "
                        "has asked for nothing yet");
    drop(world, group);
}

static void
connect_finds_the_mark(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_store *store = new_store();
    dm_world *a = new_world(0, 2, store);
    dm_world *b = new_world(1, 2, store);
    char identity[DM_IDENTITY_SIZE], other[DM_IDENTITY_SIZE];
    CHECK_OK(dm_world_agree(a, "set", "mesh (1, 2)", &forever, identity, &err));
    CHECK_INT(dm_world_agree(b, "set", "mesh (2, 1)", &forever, other, &err),
              DM_ERR_MISMATCH);
    dm_group_cache *cache = NULL;
    CHECK_OK(dm_group_cache_new(a, identity, &cache, &err));
    dm_group_spec spec = spec_of(NULL);
    dm_group *group = NULL;
    CHECK_OK(dm_group_cache_get(cache, &spec, "", &group, &err));
    lab.connect_blocks = 1;
    dm_op op = op_of(0);
    CHECK_INT(dm_group_run(group, &op, &forever, &err), DM_ERR_MISMATCH);
    CHECK_CONTAINS(err.text, "rank 0 for mesh (1, 2); rank 1 for mesh (2, 1)");
    dm_group_cache_free(cache);
    dm_world_release(b);
    dm_store_release(store);
    drop(a, group);
}

static void
works_keep_their_order(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_world *world = world_of_two();
    dm_group *group = new_group(world, "x");
    done_calls = 0;
    lab.run_blocks = 1;
    dm_work *works[8];
    for (uint32_t i = 0; i < 8; i++) {
        works[i] = submit(group, i);
    }
    EVENTUALLY(lab.entered == 1);
    CHECK(!dm_work_is_done(works[0]));
    dm_wait brief = {dm_clock_deadline(DM_NS_PER_MS), NULL, NULL};
    CHECK_INT(dm_work_wait(works[7], &brief, &err), DM_ERR_TIMEOUT);
    CHECK_STR(err.text, "all_reduce #8 on group 'tp' (ranks 0, 1): the operation is "
                        "still running");
    lab.run_blocks = 0;
    dm_op op = op_of(8); /* goes behind them */
    CHECK_OK(dm_group_run(group, &op, &forever, &err));
    CHECK_INT(op.seq, 9);
    for (uint32_t i = 0; i < 8; i++) {
        CHECK_OK(dm_work_wait(works[i], &forever, &err));
        dm_work_release(works[i]);
    }
    CHECK_INT(done_calls, 8);
    for (int i = 0; i < 9; i++) {
        CHECK_INT(lab.order[i], i);
    }
    dm_group_close(group, &err);
    drop(world, group);
}

static void
work_knows_the_source(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_world *world = world_of_two();
    dm_group *group = new_group(world, "x");
    dm_op op = {.kind = DM_OP_RECV, .dtype = DM_FLOAT32, .root = DM_ANY_RANK};
    dm_work *work = NULL;
    CHECK_OK(dm_group_submit(group, &op, NULL, NULL, &work, &err));
    CHECK_OK(dm_work_wait(work, &forever, &err));
    CHECK_INT(dm_work_source(work), 1);
    dm_work_release(work);
    drop(world, group);
}

static void
close_ends_works(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_world *world = world_of_two();
    dm_group *group = new_group(world, "x");
    done_calls = 0;
    lab.run_blocks = 1;
    dm_work *running = submit(group, 0);
    dm_work *queued = submit(group, 1);
    EVENTUALLY(lab.entered == 1);
    dm_group_close(group, &err);
    CHECK_INT(lab.comms, 0);
    CHECK(dm_work_is_done(running));
    CHECK(dm_work_is_done(queued));
    CHECK_INT(done_calls, 2);
    CHECK_INT(dm_work_wait(running, &forever, &err), DM_ERR_CLOSED);
    CHECK_STR(err.text,
              "all_reduce #1 on group 'tp' (ranks 0, 1): the group was closed "
              "while the operation was running");
    CHECK_INT(dm_work_wait(queued, &forever, &err), DM_ERR_CLOSED);
    CHECK_INT(lab.entered, 1);
    dm_work_release(running);
    dm_work_release(queued);
    dm_group_close(group, &err);
    drop(world, group);
}

typedef struct runner {
    dm_group *group;
    dm_status status;
    dm_error err;
} runner;

static void *
run_one(void *arg)
{
    runner *r = arg;
    dm_op op = op_of(0);
    r->status = dm_group_run(r->group, &op, &forever, &r->err);
    return NULL;
}

static void
abort_ends_a_run_on_another_thread(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_world *world = world_of_two();
    dm_group *group = new_group(world, "x");
    lab.run_blocks = 1;
    runner r[2] = {{group, DM_OK, DM_ERROR_INIT}, {group, DM_OK, DM_ERROR_INIT}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, run_one, &r[i]), 0);
    }
    EVENTUALLY(lab.entered == 1 && dm_group_seq(group) == 2);
    dm_group_abort(group);
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        CHECK_INT(r[i].status, DM_ERR_ABORTED);
        CHECK_CONTAINS(r[i].err.text, "the group was aborted");
    }
    dm_group_close(group, &err);
    CHECK_INT(lab.comms, 0);
    drop(world, group);
}

static dm_status
close_from_poll(void *arg, dm_error *err)
{
    return dm_group_close(arg, err);
}

static void
close_from_inside_a_run(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_world *world = world_of_two();
    dm_group *group = new_group(world, "x");
    lab.run_blocks = 1;
    dm_wait wait = {DM_FOREVER, close_from_poll, group};
    dm_op op = op_of(0);
    CHECK_INT(dm_group_run(group, &op, &wait, &err), DM_ERR_CLOSED);
    CHECK_INT(lab.comms, 0);
    drop(world, group);
}

static dm_status
interrupt(void *arg, dm_error *err)
{
    (void)arg;
    return dm_error_set(err, DM_ERR_INTERRUPTED, "interrupted by a signal");
}

static void
giving_up_the_turn_breaks_the_group(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_world *world = world_of_two();
    dm_group *group = new_group(world, "x");
    lab.run_blocks = 1;
    dm_work *work = submit(group, 0);
    EVENTUALLY(lab.entered == 1);
    dm_wait wait = {DM_FOREVER, interrupt, NULL};
    dm_op op = op_of(1);
    CHECK_INT(dm_group_run(group, &op, &wait, &err), DM_ERR_INTERRUPTED);
    CHECK_INT(dm_work_wait(work, &forever, &err), DM_ERR_ABORTED);
    CHECK_INT(dm_group_run(group, &op, &forever, &err), DM_ERR_CLOSED);
    CHECK_CONTAINS(err.text, "earlier failure: all_reduce #2");
    dm_work_release(work);
    drop(world, group);
}

static void
dropping_everything_while_a_work_runs(void)
{
    lab_reset();
    dm_world *world = world_of_two();
    dm_group *group = new_group(world, "x");
    done_calls = 0;
    lab.run_blocks = 1;
    dm_work_release(submit(group, 0));
    dm_work_release(submit(group, 1));
    EVENTUALLY(lab.entered == 1);
    dm_group_release(group);
    dm_world_release(world);
    lab.run_blocks = 0;
    EVENTUALLY(done_calls == 2 && lab.comms == 0);
}

static int
count_threads(void)
{
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    int n = 0;
    while (readdir(tasks) != NULL) {
        n++;
    }
    closedir(tasks);
    return n;
}

static void
dropping_a_group_whose_thread_has_gone(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_world *world = world_of_two();
    dm_group *group = new_group(world, "x");
    int threads = count_threads();
    dm_work *work = submit(group, 0);
    CHECK_OK(dm_work_wait(work, &forever, &err));
    dm_work_release(work);
    dm_group_abort(group);
    EVENTUALLY(count_threads() == threads);
    drop(world, group);
}

static void
closing_the_world_ends_all_groups(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_world *world = world_of_two();
    dm_group *a = new_group(world, "a");
    dm_group *b = new_group(world, "b");
    dm_group *dropped = new_group(world, "c");
    dm_group_release(dropped);
    lab.run_blocks = 1;
    dm_work *work = submit(b, 0);
    EVENTUALLY(lab.entered == 1);
    dm_world_close(world);
    CHECK_INT(lab.comms, 0);
    CHECK_INT(dm_work_wait(work, &forever, &err), DM_ERR_CLOSED);
    dm_work_release(work);
    dm_group_release(a);
    drop(world, b);
}

static void
a_forked_child_refuses(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_world *world = world_of_two();
    dm_group *group = new_group(world, "x");
    dm_op op = op_of(0);
    CHECK_OK(dm_group_run(group, &op, &forever, &err));
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        bool refused = dm_group_run(group, &op, &forever, &err) == DM_ERR_FORKED &&
                       strstr(err.text, "all_reduce on group 'tp'") != NULL;
        dm_group_close(group, &err);
        dm_world_close(world);
        dm_group_release(group);
        dm_world_release(world);
        _exit(refused ? 0 : 1);
    }
    int status = -1;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    CHECK_OK(dm_group_run(group, &op, &forever, &err));
    drop(world, group);
}

/* --- cache ------------------------------------------------------------------------------ */

static void
the_same_list_is_the_same_group(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_world *world = world_of_two();
    dm_group_cache *cache = NULL;
    CHECK_OK(dm_group_cache_new(world, "id.1", &cache, &err));
    dm_group_spec spec = spec_of(NULL);
    dm_group *a = NULL, *b = NULL, *c = NULL, *d = NULL;
    CHECK_OK(dm_group_cache_get(cache, &spec, "", &a, &err));
    CHECK_OK(dm_group_cache_get(cache, &spec, "", &b, &err));
    CHECK(a == b);
    spec.timeout_ns = 1;
    CHECK_OK(dm_group_cache_get(cache, &spec, "", &c, &err));
    CHECK(c != a);
    CHECK_OK(dm_group_cache_get(cache, &spec, "opt", &d, &err));
    CHECK(d != c);
    CHECK_INT(dm_group_cache_count(cache), 3);
    /* One hash, two numbers: the time-out is not part of what members must share. */
    size_t length = strlen(dm_group_name(a));
    CHECK_INT(strncmp(dm_group_name(a), "id.1/", 5), 0);
    CHECK_INT(strncmp(dm_group_name(a), dm_group_name(c), length - 1), 0);
    CHECK_STR(dm_group_name(a) + length - 2, ".0");
    CHECK_STR(dm_group_name(c) + length - 2, ".1");
    CHECK_STR(dm_group_name(d) + length - 2, ".0");
    dm_group_cache_close(cache);
    CHECK(dm_group_is_closed(a) && dm_group_is_closed(d));
    dm_group *e = NULL;
    CHECK_INT(dm_group_cache_get(cache, &spec, "", &e, &err), DM_ERR_CLOSED);
    dm_group_release(a);
    dm_group_release(b);
    dm_group_release(c);
    dm_group_release(d);
    dm_group_cache_free(cache);
    dm_world_release(world);
    CHECK_INT(lab.comms, 0);
}

enum { RACERS = 4, LISTS = 50 };

typedef struct racer {
    dm_group_cache *cache;
    dm_group *groups[LISTS];
} racer;

static void *
race(void *arg)
{
    racer *r = arg;
    dm_error err = DM_ERROR_INIT;
    for (int i = 0; i < LISTS; i++) {
        dm_group_spec spec = spec_of(NULL);
        spec.timeout_ns = i;
        CHECK_OK(dm_group_cache_get(r->cache, &spec, "", &r->groups[i], &err));
    }
    return NULL;
}

static void
threads_share_the_cache(void)
{
    lab_reset();
    dm_error err = DM_ERROR_INIT;
    dm_world *world = world_of_two();
    dm_group_cache *cache = NULL;
    CHECK_OK(dm_group_cache_new(world, "id.1", &cache, &err));
    static racer racers[RACERS];
    pthread_t threads[RACERS];
    for (int i = 0; i < RACERS; i++) {
        racers[i].cache = cache;
        CHECK_INT(pthread_create(&threads[i], NULL, race, &racers[i]), 0);
    }
    for (int i = 0; i < RACERS; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_INT(dm_group_cache_count(cache), LISTS);
    for (int i = 0; i < RACERS; i++) {
        for (int j = 0; j < LISTS; j++) {
            CHECK(racers[i].groups[j] == racers[0].groups[j]);
            dm_group_release(racers[i].groups[j]);
        }
    }
    dm_group_cache_free(cache);
    dm_world_release(world);
    CHECK_INT(lab.comms, 0);
}

/* --- memory ------------------------------------------------------------------------------ */

/* Every allocation fails once: an error comes back and nothing is lost. */
static void
out_of_memory_is_an_error(void)
{
    lab_reset();
    dm_store *store = new_store();
    for (uint64_t n = 1;; n++) {
        dm_error err = DM_ERROR_INIT;
        dm_world *world = new_world(0, 2, store);
        dm_group_cache *cache = NULL;
        dm_group *group = NULL;
        dm_group_spec spec = {both, 1, NULL, "tp", "gloo", -1};
        char identity[DM_IDENTITY_SIZE];
        dm_alloc_fail_at(n);
        dm_status status = dm_world_agree(world, "s", "r", &forever, identity, &err);
        if (status == DM_OK) {
            status = dm_group_cache_new(world, identity, &cache, &err);
        }
        if (status == DM_OK) {
            status = dm_group_cache_get(cache, &spec, "", &group, &err);
        }
        dm_alloc_fail_at(0);
        dm_group_release(group);
        dm_group_cache_free(cache);
        dm_world_release(world);
        if (status == DM_OK) {
            CHECK(n > 10);
            break;
        }
        CHECK_INT(status, DM_ERR_NO_MEMORY);
        CHECK_CONTAINS(err.text, "out of memory");
    }
    dm_store_release(store);
}

TEST_MAIN(TEST(world_refuses_bad_arguments), TEST(members_agree),
          TEST(members_disagree), TEST(ranks_outside_are_explained),
          TEST(missing_ranks_are_explained), TEST(closed_world_refuses),
          TEST(group_refuses_bad_ranks), TEST(groups_without_peers_are_local),
          TEST(first_operation_connects),
          TEST(refused_operation_leaves_the_group_whole),
          TEST(failure_breaks_the_group), TEST(time_out_of_a_connect_is_explained),
          TEST(connect_finds_the_mark), TEST(works_keep_their_order),
          TEST(work_knows_the_source), TEST(close_ends_works),
          TEST(abort_ends_a_run_on_another_thread), TEST(close_from_inside_a_run),
          TEST(giving_up_the_turn_breaks_the_group),
          TEST(dropping_everything_while_a_work_runs),
          TEST(dropping_a_group_whose_thread_has_gone),
          TEST(closing_the_world_ends_all_groups), TEST(a_forked_child_refuses),
          TEST(the_same_list_is_the_same_group), TEST(threads_share_the_cache),
          TEST(out_of_memory_is_an_error))
