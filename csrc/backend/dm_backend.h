/* A backend: one table of operations that moves the bytes of a group.
 *
 * A *communicator* (dm_comm) is what a backend keeps for one group. Its life:
 * comm_new (no communication, costs microseconds) -> comm_connect at the first
 * operation (the members meet through the store) -> comm_run, one at a time ->
 * comm_close -> comm_free. comm_abort may come from any thread at any moment and
 * ends a connect or run in flight on another thread.
 *
 * Thread rules: connect and run are called by one thread at a time (the group
 * sees to that), never with a lock of ours held; they call wait->poll on the
 * calling thread between slices. A run that fails with a status from
 * DM_ERR_TIMEOUT on leaves the communicator broken: the group aborts it.
 * Validation of arguments (counts, dtypes, ranks in range, buffers large enough)
 * is done above: a backend gets only sound operations.
 *
 * Error texts of a backend speak of *global* ranks (config->ranks) and say which
 * rank it waited for; the group puts "all_reduce #12 on group 'tp' (ranks 2, 3)"
 * in front.
 */
#ifndef DM_BACKEND_H
#define DM_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dm_clock.h"
#include "base/dm_dtype.h"
#include "base/dm_status.h"

/* store/dm_store.h, which C++ cannot read (C atomics), is not included here: the
 * gloo bridge reads this header from C++. */
typedef struct dm_store dm_store;

/* Counted up when a struct of this header changes: a backend that is a shared
 * object of its own (gloo) is checked against it. */
enum { DM_BACKEND_ABI = 3 };

typedef enum dm_op_kind {
    DM_OP_ALL_REDUCE,
    DM_OP_BROADCAST,
    DM_OP_REDUCE,
    DM_OP_ALL_GATHER,
    DM_OP_GATHER,
    DM_OP_SCATTER,
    DM_OP_REDUCE_SCATTER,
    DM_OP_ALL_TO_ALL,
    DM_OP_BARRIER,
    DM_OP_SEND,
    DM_OP_RECV,
    DM_OP_KIND_COUNT,
} dm_op_kind;

/* "all_reduce", "broadcast", ... as the Python methods are called. */
const char *
dm_op_name(dm_op_kind kind);

/* Whether its `reduce` counts. */
bool
dm_op_is_reduction(dm_op_kind kind);

enum { DM_ANY_RANK = -1 };

/* One operation. Pointers stay valid until the run has returned. Input and output do not
 * overlap, but for what is in place: the input of an all_gather may be the member's own
 * piece of the output, the output of a reduce_scatter its own piece of the input. */
typedef struct dm_op {
    dm_op_kind kind;
    dm_dtype dtype;
    dm_reduce_op reduce; /* reductions only */
    double factor;       /* DM_PREMUL_SUM: what this member's elements are multiplied
                            with; members may differ in it */
    int32_t root;        /* group rank: root, or the other end of send/recv
                             (DM_ANY_RANK: recv from any) */
    uint32_t tag;        /* send/recv */
    uint64_t seq;        /* number of this operation on its group, from 1 */
    const void *input;   /* all_reduce, broadcast: NULL (in place in output) */
    void *output;        /* send: NULL */
    size_t count;        /* elements: of the whole array for all_reduce, broadcast,
                             reduce, send, recv; of one member's piece for all_gather,
                             gather, scatter, reduce_scatter, all_to_all */
    /* all_to_all with uneven pieces, all_gather of uneven sizes: elements for each
     * group rank; NULL where all pieces are `count`. */
    const size_t *input_counts;
    const size_t *output_counts;
    int32_t *source; /* recv: where the message came from is written here if
                             not NULL */
} dm_op;

enum { DM_OP_TEXT_SIZE = 128 };

/* What members of a group must agree on, as people read it: "all_reduce(sum) of 10
 * float32", "broadcast of 10 float32 from group rank 0". Returns `text`. */
const char *
dm_op_describe(const dm_op *op, char text[DM_OP_TEXT_SIZE]);

typedef struct dm_comm dm_comm;

typedef struct dm_comm_config {
    int32_t rank; /* my group rank */
    int32_t size;
    const int32_t *ranks; /* global rank of each group rank; borrowed for comm's life */
    const char *name;     /* the group's identity: unique in the store, borrowed */
    dm_store *store;      /* the world's; NULL for backends that need none */
    int64_t timeout_ns;
} dm_comm_config;

enum {
    /* run needs no other rank: the group may call it without releasing the GIL. */
    DM_BACKEND_LOCAL = 1,
    /* run takes DM_PREMUL_SUM. Other backends never see it: the group multiplies and
     * asks for DM_SUM. */
    DM_BACKEND_PREMUL_SUM = 2,
    /* The group's mail carries send and recv (mail/dm_mail.h), so that they neither wait
     * for collectives nor hold them up; run sees them only from who calls it without a
     * group. For backends whose arrays are in the host's memory. */
    DM_BACKEND_MAIL = 4,
};

typedef struct dm_backend {
    int abi;          /* DM_BACKEND_ABI */
    const char *name; /* "gloo", "fake", "nccl", "shm" */
    unsigned flags;

    /* Whether it can do this kind with this dtype and reduce op (ignored where
     * they do not matter). */
    bool (*supports)(dm_op_kind kind, dm_dtype dtype, dm_reduce_op reduce);

    dm_status (*comm_new)(const dm_comm_config *config, dm_comm **comm, dm_error *err);

    /* Meets the other members. Called once, before the first run. */
    dm_status (*comm_connect)(dm_comm *comm, const dm_wait *wait, dm_error *err);

    dm_status (*comm_run)(dm_comm *comm, const dm_op *op, const dm_wait *wait,
                          dm_error *err);

    /* Ends calls in flight with DM_ERR_ABORTED and lets peers notice (their ends
     * of the connections close). Never blocks, any thread, idempotent. */
    void (*comm_abort)(dm_comm *comm);

    /* Frees everything; nothing is in flight any more. Does not wait for peers.
     * `forked`: called in a forked child, which must only forget. */
    void (*comm_free)(dm_comm *comm, bool forked);

    /* "tcp", "shm", "none": how the bytes travel. Static text. */
    const char *(*comm_transport)(const dm_comm *comm);
} dm_backend;

/* A backend that is a shared object of its own exports one function, which returns its
 * table, or NULL when it was built for another `abi`:
 *     const dm_backend *dm_gloo_backend(int abi);
 */

/* --- registry ---------------------------------------------------------------- */

/* The table of that name. DM_ERR_VALUE for an unknown name (the text lists the
 * known ones), DM_ERR_LIBRARY when this build has it not. Loads nothing. Thread-safe. */
dm_status
dm_backend_find(const char *name, const dm_backend **backend, dm_error *err);

/* Whether there is a backend of that name at all; loads nothing. DM_ERR_VALUE (the text
 * lists the known ones). */
dm_status
dm_backend_check_name(const char *name, dm_error *err);

/* Where the gloo bridge lies (the package's folder), set at import; copied. */
dm_status
dm_backend_set_path(const char *folder, dm_error *err);

/* The backend for a device type when none was named: "cpu" -> "gloo",
 * "cuda" -> "nccl", else NULL. */
const char *
dm_backend_default(const char *device_type);

/* The built-in ones. */
extern const dm_backend dm_backend_fake;

/* "gloo": shared memory where the members share a host, gloo's TCP otherwise. */
extern const dm_backend dm_backend_cpu;

/* The bridge to gloo's TCP, which dm_backend_cpu loads when a group needs it.
 * DM_ERR_LIBRARY when it cannot be loaded (the text says what was tried and what to
 * install). May block in dlopen. Thread-safe; the table lives as long as the process. */
dm_status
dm_backend_load_gloo(const dm_backend **backend, dm_error *err);

#endif
