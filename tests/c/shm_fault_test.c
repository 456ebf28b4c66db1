/* Members of a shm group that die, stop, abort, are interrupted or want something else.
 *
 * sources: base store backend/reduce backend/dm_op.c backend/shm
 * sanitize: address,undefined
 */
#include "shm_lab.h"

#include "backend/shm/dm_shm_comm.h"

static int32_t
global_rank(int32_t rank)
{
    return 10 + 3 * rank;
}

/* The text names that rank, and its process where it is one. */
static void
check_names(const dm_error *err, int32_t rank)
{
    char name[32];
    snprintf(name, sizeof(name), "rank %d (pid ", (int)global_rank(rank));
    CHECK_CONTAINS(err->text, name);
}

/* --- death ------------------------------------------------------------------------------ */

static void
die(void)
{
    kill(getpid(), SIGKILL);
}

/* An endless row of one operation, until it fails; its error. */
static dm_status
until_failure(lab_rank *r, const dm_op *op, dm_error *err)
{
    dm_status status;
    do {
        status = lab_run(r, op, err);
    } while (status == DM_OK);
    return status;
}

enum { BIG = 3000000 }; /* elements: an operation of many rounds */

static const dm_op all_kinds[] = {
    {.kind = DM_OP_BARRIER},
    {.kind = DM_OP_ALL_REDUCE, .count = 4},
    {.kind = DM_OP_ALL_REDUCE, .count = 1000},
    {.kind = DM_OP_ALL_REDUCE, .count = BIG},
    {.kind = DM_OP_REDUCE_SCATTER, .count = BIG / LAB_MOST},
    {.kind = DM_OP_ALL_GATHER, .count = BIG / LAB_MOST},
    {.kind = DM_OP_ALL_TO_ALL, .count = BIG / LAB_MOST},
    {.kind = DM_OP_BROADCAST, .count = 4},
    {.kind = DM_OP_BROADCAST, .count = 1000},
    {.kind = DM_OP_BROADCAST, .count = BIG},
    {.kind = DM_OP_REDUCE, .count = 4},
    {.kind = DM_OP_REDUCE, .count = BIG},
    {.kind = DM_OP_GATHER, .count = 4},
    {.kind = DM_OP_GATHER, .count = BIG / LAB_MOST},
    {.kind = DM_OP_SCATTER, .count = 1000},
    {.kind = DM_OP_SCATTER, .count = BIG / LAB_MOST},
};

enum { ALL_KINDS = sizeof(all_kinds) / sizeof(all_kinds[0]) };

typedef struct killing {
    int kind;       /* of all_kinds */
    int32_t victim; /* dies in or between operations, from outside */
    int pipe[2];    /* the survivors write here when they run */
} killing;

static void
killing_work(lab_rank *r)
{
    killing *k = r->arg;
    dm_error err = DM_ERROR_INIT;
    dm_op op = all_kinds[k->kind];
    op.dtype = DM_FLOAT32;
    op.input = calloc(BIG, sizeof(float));
    op.output = calloc(BIG, sizeof(float));
    check_barrier(r);
    CHECK_INT(write(k->pipe[1], "x", 1), 1);
    CHECK_INT(until_failure(r, &op, &err), DM_ERR_PEER);
    check_names(&err, k->victim);
    CHECK_CONTAINS(err.text, "exited");
    free((void *)op.input);
    free(op.output);
}

/* Somebody outside kills a member while all run the operation again and again. */
static void
killed_in_any_operation(void)
{
    static const int32_t sizes[] = {2, 3, 5};
    for (int kind = 0; kind < ALL_KINDS; kind++) {
        int32_t size = sizes[kind % 3];
        killing k = {.kind = kind, .victim = kind % 2 == 0 ? size - 1 : 0};
        CHECK_INT(pipe(k.pipe), 0);
        pid_t pids[LAB_MOST];
        fork_ranks(size, killing_work, &k, false, pids);
        char c;
        for (int32_t i = 0; i < size; i++) {
            CHECK_INT(read(k.pipe[0], &c, 1), 1);
        }
        kill(pids[k.victim], SIGKILL);
        for (int32_t i = 0; i < size; i++) {
            reap(pids[i], i == k.victim ? SIGKILL : 0);
        }
        close(k.pipe[0]);
        close(k.pipe[1]);
    }
}

static void
message_killing_work(lab_rank *r)
{
    dm_error err = DM_ERROR_INIT;
    static float data[BIG];
    check_barrier(r);
    if (r->rank == 1) {
        die();
    }
    bool sends = r->rank == 0;
    dm_op op = {.kind = sends ? DM_OP_SEND : DM_OP_RECV,
                .dtype = DM_FLOAT32,
                .root = r->rank == 3 ? DM_ANY_RANK : 1,
                .input = data,
                .output = data,
                .count = BIG};
    CHECK_ERR(lab_run(r, &op, &err), DM_ERR_PEER);
    check_names(&err, 1);
}

static void
killed_before_a_message(void)
{
    pid_t pids[LAB_MOST];
    fork_ranks(4, message_killing_work, NULL, false, pids);
    for (int32_t i = 0; i < 4; i++) {
        reap(pids[i], i == 1 ? SIGKILL : 0);
    }
}

static void
meeting_killing_work(lab_rank *r)
{
    dm_error err = DM_ERROR_INIT;
    dm_wait wait = lab_wait(LAB_PATIENCE_NS);
    int32_t victim = *(int32_t *)r->arg;
    lab_before_get = r->rank == victim ? die : NULL;
    CHECK_ERR(dm_backend_shm.comm_connect(r->comm, &wait, &err), DM_ERR_PEER);
    char name[32];
    snprintf(name, sizeof(name), "rank %d (pid ", (int)global_rank(victim));
    CHECK_CONTAINS(err.text, name);
    CHECK_CONTAINS(err.text, "exited");
}

/* Dies when its card is there, before it has the segment. The survivors must notice
 * even while nobody reaps it. */
static void
killed_while_meeting(void)
{
    for (int32_t victim = 0; victim < 3; victim++) {
        pid_t pids[LAB_MOST];
        fork_ranks(3, meeting_killing_work, &victim, true, pids);
        for (int32_t i = 0; i < 3; i++) {
            if (i != victim) {
                reap(pids[i], 0);
            }
        }
        reap(pids[victim], SIGKILL);
    }
}

/* What a member did before it ended well still counts; what it did not do is an error,
 * though nobody aborted anything. */
static void
quitting_work(lab_rank *r)
{
    dm_error err = DM_ERROR_INIT;
    check_broadcast(r, DM_FLOAT32, 9, 0);
    check_reduce(r, DM_FLOAT32, 9, 1);
    if (r->rank == 0) {
        _exit(0);
    }
    dm_op op = {.kind = DM_OP_BARRIER};
    CHECK_ERR(lab_run(r, &op, &err), DM_ERR_PEER);
    check_names(&err, 0);
}

static void
exits_without_closing(void)
{
    run_processes(3, quitting_work, NULL);
}

static void
leaving_work(lab_rank *r)
{
    dm_error err = DM_ERROR_INIT;
    check_barrier(r);
    if (r->rank != 0) {
        dm_op op = {.kind = DM_OP_BARRIER};
        CHECK_ERR(lab_run(r, &op, &err), DM_ERR_PEER);
        check_names(&err, 0);
        CHECK_CONTAINS(err.text, "has closed the group");
    }
}

static void
closes_early(void)
{
    run_processes(3, leaving_work, NULL);
}

/* --- a member that is late --------------------------------------------------------------- */

static void
late_work(lab_rank *r)
{
    dm_error err = DM_ERROR_INIT;
    check_all_reduce(r, DM_FLOAT32, 3);
    if (r->rank == 1) {
        kill(getpid(), SIGSTOP);
        return;
    }
    dm_wait wait = lab_wait(300 * DM_NS_PER_MS);
    float value = 1;
    dm_op op = {
        .kind = DM_OP_ALL_REDUCE, .dtype = DM_FLOAT32, .output = &value, .count = 1};
    dm_status status = dm_backend_shm.comm_run(r->comm, &op, &wait, &err);
    /* Whose time is up first takes the others along. */
    CHECK(status == DM_ERR_TIMEOUT || status == DM_ERR_PEER);
    CHECK_CONTAINS(err.text, "timed out waiting for");
    check_names(&err, 1);
    if (status == DM_ERR_TIMEOUT) {
        CHECK_CONTAINS(err.text, "whose last collective here was all_reduce(sum) of 3 "
                                 "float32");
    }
    CHECK_ERR(lab_run(r, &op, &err), DM_ERR_CLOSED);
}

static void
stopped_member(void)
{
    pid_t pids[LAB_MOST];
    fork_ranks(4, late_work, NULL, false, pids);
    for (int32_t i = 0; i < 4; i++) {
        if (i != 1) {
            reap(pids[i], 0);
        }
    }
    kill(pids[1], SIGCONT);
    reap(pids[1], 0);
}

static void
missing_work(lab_rank *r)
{
    dm_error err = DM_ERROR_INIT;
    if (r->rank == 2) {
        return;
    }
    dm_wait wait = lab_wait(200 * DM_NS_PER_MS);
    CHECK_ERR(dm_backend_shm.comm_connect(r->comm, &wait, &err), DM_ERR_TIMEOUT);
    CHECK_CONTAINS(err.text, "rank 16 (group rank 2)");
}

static void
member_that_never_comes(void)
{
    pid_t pids[LAB_MOST];
    fork_ranks(3, missing_work, NULL, true, pids);
    for (int32_t i = 0; i < 3; i++) {
        reap(pids[i], 0);
    }
}

/* --- abort and interrupt -------------------------------------------------------------------- */

static void *
abort_when_asleep(void *arg)
{
    lab_rank *r = arg;
    const dm_wait wait = lab_wait(LAB_PATIENCE_NS);
    while (atomic_load(&r->comm->head->sleepers) != (uint32_t)r->size) {
        CHECK(dm_clock_left(wait.deadline) > 0);
        sched_yield();
    }
    dm_backend_shm.comm_abort(r->comm);
    return NULL;
}

/* All wait for a message that never comes; one of them is aborted by another thread. */
static void
abort_work(lab_rank *r)
{
    dm_error err = DM_ERROR_INIT;
    pthread_t thread;
    bool aborts = r->rank == 1;
    check_barrier(r);
    if (aborts) {
        CHECK_INT(pthread_create(&thread, NULL, abort_when_asleep, r), 0);
    }
    float value;
    dm_op op = {.kind = DM_OP_RECV,
                .dtype = DM_FLOAT32,
                .root = aborts ? 0 : 1,
                .output = &value,
                .count = 1};
    if (aborts) {
        CHECK_ERR(lab_run(r, &op, &err), DM_ERR_ABORTED);
        CHECK_ERR(lab_run(r, &op, &err), DM_ERR_ABORTED);
        CHECK_INT(pthread_join(thread, NULL), 0);
    }
    else {
        CHECK_ERR(lab_run(r, &op, &err), DM_ERR_PEER);
        check_names(&err, 1);
        CHECK_CONTAINS(err.text, "aborted");
    }
}

static void
abort_from_another_thread(void)
{
    run_processes(2, abort_work, NULL);
    run_processes(4, abort_work, NULL);
}

static dm_status
interrupt(void *arg, dm_error *err)
{
    int *left = arg;
    return --*left > 0 ? DM_OK : dm_error_set(err, DM_ERR_INTERRUPTED, "stop it");
}

static void
interrupt_work(lab_rank *r)
{
    dm_error err = DM_ERROR_INIT;
    check_barrier(r);
    dm_op op = {.kind = DM_OP_BARRIER};
    if (r->rank == 2) {
        const dm_wait patience = lab_wait(LAB_PATIENCE_NS);
        /* Never takes part; leaves when both others are gone. */
        while (atomic_load(&r->comm->members[0].state) == 1 ||
               atomic_load(&r->comm->members[1].state) == 1) {
            CHECK(dm_clock_left(patience.deadline) > 0);
            sched_yield();
        }
        return;
    }
    int left = 3;
    dm_wait wait = lab_wait(LAB_PATIENCE_NS);
    if (r->rank == 0) {
        wait.poll = interrupt;
        wait.arg = &left;
    }
    dm_status status = dm_backend_shm.comm_run(r->comm, &op, &wait, &err);
    if (r->rank == 0) {
        CHECK_INT(status, DM_ERR_INTERRUPTED);
        CHECK_STR(err.text, "stop it");
    }
    else {
        /* Rank 0 has taken part in the barrier, yet nobody goes on without it. */
        CHECK_INT(status, DM_ERR_PEER);
        check_names(&err, 0);
        CHECK_CONTAINS(err.text, "was interrupted");
    }
}

static void
interrupted_wait(void)
{
    run_processes(3, interrupt_work, NULL);
}

/* --- mismatches ----------------------------------------------------------------------------- */

typedef struct different {
    dm_op usual;
    dm_op odd;        /* what rank 1 calls */
    const char *says; /* part of the text */
    const char *and_says;
} different;

static void
mismatch_work(lab_rank *r)
{
    const different *d = r->arg;
    static double input[4 * 40000];
    static double output[4 * 40000];
    dm_error err = DM_ERROR_INIT;
    check_all_reduce(r, DM_FLOAT32, 3);
    check_broadcast(r, DM_FLOAT32, 3, 1);
    dm_op op = r->rank == 1 ? d->odd : d->usual;
    op.input = input;
    op.output = output;
    /* A rank that only gives may not notice at once. */
    dm_status status = lab_run(r, &op, &err);
    if (status == DM_OK) {
        dm_op barrier = {.kind = DM_OP_BARRIER};
        status = lab_run(r, &barrier, &err);
    }
    CHECK_INT(status, DM_ERR_MISMATCH);
    check_names(&err, 1);
    CHECK_CONTAINS(err.text, d->says);
    CHECK_CONTAINS(err.text, d->and_says);
}

static void
mismatches(void)
{
    static const different cases[] = {
        {{.kind = DM_OP_ALL_REDUCE, .dtype = DM_FLOAT32, .count = 4},
         {.kind = DM_OP_ALL_REDUCE, .dtype = DM_FLOAT32, .count = 5},
         "called all_reduce(sum) of 4 float32",
         "called all_reduce(sum) of 5 float32"},
        {{.kind = DM_OP_ALL_REDUCE, .dtype = DM_FLOAT32, .count = 40000},
         {.kind = DM_OP_ALL_REDUCE, .dtype = DM_FLOAT64, .count = 40000},
         "float32",
         "float64"},
        {{.kind = DM_OP_ALL_REDUCE, .dtype = DM_INT32, .count = 3},
         {.kind = DM_OP_ALL_REDUCE, .dtype = DM_INT32, .reduce = DM_MAX, .count = 3},
         "all_reduce(sum)",
         "all_reduce(max)"},
        {{.kind = DM_OP_BROADCAST, .dtype = DM_INT32, .count = 3, .root = 0},
         {.kind = DM_OP_BROADCAST, .dtype = DM_INT32, .count = 3, .root = 1},
         "from rank 10",
         "from rank 13"},
        {{.kind = DM_OP_REDUCE, .dtype = DM_INT32, .count = 3, .root = 0},
         {.kind = DM_OP_REDUCE, .dtype = DM_INT32, .count = 3, .root = 1},
         "to rank 10",
         "to rank 13"},
        {{.kind = DM_OP_BARRIER},
         {.kind = DM_OP_ALL_GATHER, .dtype = DM_FLOAT32, .count = 20000},
         "called barrier",
         "called all_gather of 20000 float32"},
        {{.kind = DM_OP_SCATTER, .dtype = DM_INT8, .count = 9, .root = 2},
         {.kind = DM_OP_GATHER, .dtype = DM_INT8, .count = 9, .root = 2},
         "scatter of 9 int8 from rank 16",
         "gather of 9 int8 to rank 16"},
        {{.kind = DM_OP_ALL_TO_ALL, .dtype = DM_INT8, .count = 9},
         {.kind = DM_OP_ALL_TO_ALL, .dtype = DM_INT8, .count = 8},
         "all_to_all",
         "which expects 8"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        for (int32_t size = 3; size <= 4; size++) {
            run_processes(size, mismatch_work, (void *)&cases[i]);
        }
    }
}

static void
uneven_mismatch_work(lab_rank *r)
{
    size_t in[3] = {1, 2, 3};
    size_t out[3];
    float input[6] = {0};
    float output[9];
    for (int32_t q = 0; q < 3; q++) {
        out[q] = (size_t)r->rank + 1;
    }
    if (r->rank == 2) {
        out[1] = 2; /* it gets 3 from rank 1 */
    }
    dm_error err = DM_ERROR_INIT;
    dm_op op = {.kind = DM_OP_ALL_TO_ALL,
                .dtype = DM_FLOAT32,
                .input = input,
                .output = output,
                .input_counts = in,
                .output_counts = out};
    CHECK_ERR(lab_run(r, &op, &err), DM_ERR_MISMATCH);
    check_names(&err, 1);
    check_names(&err, 2);
    CHECK_CONTAINS(err.text, "sends 3 elements");
    CHECK_CONTAINS(err.text, "expects 2");
}

static void
uneven_mismatch(void)
{
    run_processes(3, uneven_mismatch_work, NULL);
}

static void
message_mismatch_work(lab_rank *r)
{
    dm_error err = DM_ERROR_INIT;
    int32_t data[4] = {0};
    dm_op op = {.kind = r->rank == 0 ? DM_OP_SEND : DM_OP_RECV,
                .dtype = DM_INT32,
                .root = 1 - r->rank,
                .input = data,
                .output = data,
                .count = r->rank == 0 ? 3 : 4};
    if (r->rank == 0) {
        CHECK_OK(lab_run(r, &op, &err));
        op.kind = DM_OP_BARRIER;
    }
    CHECK_ERR(lab_run(r, &op, &err), DM_ERR_MISMATCH);
    check_names(&err, 0);
    check_names(&err, 1);
}

static void
message_mismatch(void)
{
    run_processes(2, message_mismatch_work, NULL);
}

/* --- fork -------------------------------------------------------------------------------- */

static void
fork_work(lab_rank *r)
{
    dm_error err = DM_ERROR_INIT;
    int hold[2];
    CHECK_INT(pipe(hold), 0);
    check_all_reduce(r, DM_FLOAT32, 3);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        char c;
        close(hold[1]);
        dm_backend_shm.comm_free(r->comm, true);
        /* Lives on until its parent is gone. */
        CHECK_INT(read(hold[0], &c, 1), 0);
        _exit(0);
    }
    check_all_reduce(r, DM_FLOAT32, 3);
    check_all_reduce(r, DM_FLOAT32, 30000);
    if (r->rank == 0) {
        die();
    }
    dm_op op = {.kind = DM_OP_BARRIER};
    CHECK_ERR(lab_run(r, &op, &err), DM_ERR_PEER);
    check_names(&err, 0);
    close(hold[1]);
    reap(child, 0);
}

/* A child that inherited the group neither disturbs it nor keeps its parent alive. */
static void
forked_child(void)
{
    pid_t pids[LAB_MOST];
    fork_ranks(3, fork_work, NULL, false, pids);
    for (int32_t i = 0; i < 3; i++) {
        reap(pids[i], i == 0 ? SIGKILL : 0);
    }
}

/* --- hosts and wishes ----------------------------------------------------------------------- */

typedef struct wishes {
    const char *host[3];      /* DEVICEMESH_HOST_ID of each rank, NULL: unset */
    const char *transport[3]; /* DEVICEMESH_TRANSPORT */
    dm_status status;
    bool together;
    const char *says;
} wishes;

static void
wishes_work(lab_rank *r)
{
    const wishes *w = r->arg;
    if (w->host[r->rank] != NULL) {
        setenv("DEVICEMESH_HOST_ID", w->host[r->rank], 1);
    }
    if (w->transport[r->rank] != NULL) {
        setenv("DEVICEMESH_TRANSPORT", w->transport[r->rank], 1);
    }
    dm_error err = DM_ERROR_INIT;
    dm_wait wait = lab_wait(LAB_PATIENCE_NS);
    bool together = !w->together;
    dm_status status = dm_shm_connect(r->comm, &wait, &together, &err);
    CHECK_INT(status, w->status);
    if (status == DM_OK) {
        CHECK_INT(together, w->together);
    }
    else {
        CHECK_CONTAINS(err.text, w->says);
    }
    if (status == DM_OK && together) {
        check_all_reduce(r, DM_FLOAT32, 3);
    }
}

static void
hosts_and_wishes(void)
{
    static const wishes cases[] = {
        {{NULL, NULL, NULL}, {NULL, "", "auto"}, DM_OK, true, ""},
        {{"a", "a", "a"}, {NULL, NULL, NULL}, DM_OK, true, ""},
        {{"a", "a", "b"}, {NULL, NULL, NULL}, DM_OK, false, ""},
        {{NULL, "b", NULL}, {NULL, NULL, NULL}, DM_OK, false, ""},
        {{NULL, NULL, NULL}, {NULL, "shm", NULL}, DM_OK, true, ""},
        {{NULL, NULL, NULL}, {NULL, NULL, "tcp"}, DM_OK, false, ""},
        {{NULL, NULL, NULL}, {"tcp", "tcp", "tcp"}, DM_OK, false, ""},
        {{NULL, NULL, NULL},
         {NULL, "shm", "tcp"},
         DM_ERR_MISMATCH,
         false,
         "'shm' on rank 13 and 'tcp' on rank 16"},
        {{"a", "b", "a"},
         {"shm", "shm", "shm"},
         DM_ERR_CONNECTION,
         false,
         "ranks 10 and 13 do not share a host"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        pid_t pids[LAB_MOST];
        fork_ranks(3, wishes_work, (void *)&cases[i], true, pids);
        for (int32_t k = 0; k < 3; k++) {
            reap(pids[k], 0);
        }
    }
}

/* A rank that will not come tells those who wait for it. */
static void
unknown_transport_work(lab_rank *r)
{
    dm_error err = DM_ERROR_INIT;
    dm_wait wait = lab_wait(LAB_PATIENCE_NS);
    bool odd = r->rank == 1;
    if (odd) {
        setenv("DEVICEMESH_TRANSPORT", "pigeon", 1);
    }
    CHECK_ERR(dm_backend_shm.comm_connect(r->comm, &wait, &err),
              odd ? DM_ERR_VALUE : DM_ERR_PEER);
    CHECK_CONTAINS(err.text, "DEVICEMESH_TRANSPORT");
    CHECK_CONTAINS(err.text, "'pigeon'");
    if (!odd) {
        CHECK_CONTAINS(err.text, "rank 13 gave up");
    }
}

static void
unknown_transport(void)
{
    pid_t pids[LAB_MOST];
    fork_ranks(3, unknown_transport_work, NULL, true, pids);
    for (int32_t i = 0; i < 3; i++) {
        reap(pids[i], 0);
    }
}

/* One is interrupted when its card is there, but not yet itself. */
static void
interrupt_work_while_meeting(lab_rank *r)
{
    dm_error err = DM_ERROR_INIT;
    dm_wait wait = lab_wait(LAB_PATIENCE_NS);
    int left = 1;
    bool odd = r->rank == *(int32_t *)r->arg;
    if (odd) {
        wait.poll = interrupt;
        wait.arg = &left;
    }
    dm_status status = dm_backend_shm.comm_connect(r->comm, &wait, &err);
    CHECK_INT(status, odd ? DM_ERR_INTERRUPTED : DM_ERR_PEER);
    if (!odd) {
        CHECK_CONTAINS(err.text, odd ? "stop it" : "rank ");
    }
}

static void
interrupted_while_meeting(void)
{
    for (int32_t odd = 0; odd < 3; odd++) {
        pid_t pids[LAB_MOST];
        fork_ranks(3, interrupt_work_while_meeting, &odd, true, pids);
        for (int32_t i = 0; i < 3; i++) {
            reap(pids[i], 0);
        }
    }
}

static void
no_memory(void)
{
    dm_error err = DM_ERROR_INIT;
    int32_t ranks[] = {0, 1};
    dm_comm_config config = {.rank = 0, .size = 2, .ranks = ranks, .name = "x"};
    dm_comm *comm;
    CHECK_NO_MEMORY(dm_backend_shm.comm_new(&config, &comm, &err), 1);
    dm_backend_shm.comm_free(comm, false);
    dm_shm_segment *segment;
    CHECK_NO_MEMORY(dm_shm_segment_new(2, &segment, &err), 1);
    dm_shm_segment_release(segment, false);
}

/* What is no segment is refused, and its descriptor closed. */
static void
foreign_descriptors(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_shm_segment *segment;
    dm_shm_segment *other;
    CHECK_ERR(dm_shm_segment_open(dup(0), 2, &segment, &err), DM_ERR_PROTOCOL);
    CHECK_OK(dm_shm_segment_new(3, &segment, &err));
    CHECK_ERR(dm_shm_segment_open(dup(segment->fd), 2, &other, &err), DM_ERR_PROTOCOL);
    CHECK_OK(dm_shm_segment_open(dup(segment->fd), 3, &other, &err));
    dm_shm_segment_release(other, false);
    /* Nobody can resize it. */
    CHECK_INT(ftruncate(segment->fd, 4096), -1);
    CHECK_INT(errno, EPERM);
    dm_shm_segment_release(segment, false);
}

TEST_MAIN(TEST(unknown_transport), TEST(no_memory), TEST(foreign_descriptors),
          TEST(hosts_and_wishes), TEST(member_that_never_comes),
          TEST(interrupted_while_meeting), TEST(killed_while_meeting),
          TEST(killed_in_any_operation), TEST(killed_before_a_message),
          TEST(exits_without_closing), TEST(closes_early), TEST(stopped_member),
          TEST(abort_from_another_thread), TEST(interrupted_wait), TEST(mismatches),
          TEST(uneven_mismatch), TEST(message_mismatch), TEST(forked_child))
