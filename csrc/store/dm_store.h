/* The store: a key-value table that ranks share while they find each other.
 *
 * One table of functions; tcp, file, in-process, prefix and (in python/) any
 * Python object with torch's Store methods implement it. Keys are
 * NUL-terminated text, values are bytes. Stores are counted: hold and release
 * from any thread. Every call may be made by several threads at once, and a
 * call that waits never keeps another thread's call from going through. In a
 * forked child every call fails with DM_ERR_FORKED, except release, which only
 * forgets.
 *
 * Errors that callers tell apart: DM_ERR_TIMEOUT (the text names the keys that
 * are missing), DM_ERR_INTERRUPTED, DM_ERR_CONNECTION (the server is gone; names
 * host and port), DM_ERR_CLOSED, DM_ERR_VALUE (key or value too large).
 */
#ifndef DM_STORE_H
#define DM_STORE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/dm_clock.h"
#include "base/dm_status.h"

/* torch's limits: what its server accepts, ours does too, and no more. */
enum {
    DM_STORE_KEY_MAX = 8192,              /* with the leading '/' of the wire */
    DM_STORE_VALUE_MAX = 8 * 1024 * 1024, /* bytes */
};

/* Owned bytes: `data` is from dm_malloc_array, one NUL follows the `size`
 * bytes (so text values can be used as strings). */
typedef struct dm_bytes {
    char *data;
    size_t size;
} dm_bytes;

/* NULL and empty are fine; leaves {NULL, 0}. */
void
dm_bytes_free(dm_bytes *bytes);

/* A copy of `size` bytes with the NUL behind it. DM_ERR_NO_MEMORY. */
dm_status
dm_bytes_copy(const void *data, size_t size, dm_bytes *bytes, dm_error *err);

typedef struct dm_store dm_store;

/* What an implementation provides. `multi_get` waits for all keys. Entries that
 * are NULL are answered with DM_ERR_UNSUPPORTED, except: multi_get and multi_set
 * fall back to loops, barrier to add + wait, wait_unless to wait and check by turns;
 * compare_set has no fallback. Keys, sizes and the fork are checked before a call
 * gets here. */
typedef struct dm_store_ops {
    const char *kind; /* "tcp", "file", "hash", "prefix", "python" */
    dm_status (*set)(dm_store *, const char *key, const void *data, size_t size,
                     const dm_wait *, dm_error *);
    dm_status (*get)(dm_store *, const char *key, const dm_wait *, dm_bytes *value,
                     dm_error *);
    dm_status (*add)(dm_store *, const char *key, int64_t amount, const dm_wait *,
                     int64_t *result, dm_error *);
    dm_status (*compare_set)(dm_store *, const char *key, const void *expected,
                             size_t expected_size, const void *desired,
                             size_t desired_size, const dm_wait *, dm_bytes *value,
                             dm_error *);
    dm_status (*check)(dm_store *, const char *const *keys, size_t n, const dm_wait *,
                       bool *ready, dm_error *);
    dm_status (*wait)(dm_store *, const char *const *keys, size_t n, const dm_wait *,
                      dm_error *);
    dm_status (*delete_key)(dm_store *, const char *key, const dm_wait *, bool *existed,
                            dm_error *);
    dm_status (*append)(dm_store *, const char *key, const void *data, size_t size,
                        const dm_wait *, dm_error *);
    dm_status (*multi_get)(dm_store *, const char *const *keys, size_t n,
                           const dm_wait *, dm_bytes *values, dm_error *);
    dm_status (*multi_set)(dm_store *, const char *const *keys, const dm_bytes *values,
                           size_t n, const dm_wait *, dm_error *);
    dm_status (*num_keys)(dm_store *, const dm_wait *, int64_t *n, dm_error *);
    dm_status (*list_keys)(dm_store *, const dm_wait *, dm_bytes **keys, size_t *n,
                           dm_error *);
    dm_status (*queue_push)(dm_store *, const char *key, const void *data, size_t size,
                            const dm_wait *, dm_error *);
    dm_status (*queue_pop)(dm_store *, const char *key, bool block, const dm_wait *,
                           dm_bytes *value, dm_error *);
    dm_status (*queue_len)(dm_store *, const char *key, const dm_wait *, int64_t *n,
                           dm_error *);
    /* Returns when `world` callers have come to `key`. Reusable. */
    dm_status (*barrier)(dm_store *, const char *key, int32_t world, const dm_wait *,
                         dm_error *);
    dm_status (*wait_unless)(dm_store *, const char *const *keys, size_t n,
                             const char *const *unless, size_t m, const dm_wait *,
                             dm_error *);
    dm_status (*will)(dm_store *, const char *key, const void *data, size_t size,
                      const dm_wait *, dm_error *);
    /* Ends calls in flight with DM_ERR_CLOSED and refuses new ones. Idempotent. */
    void (*close)(dm_store *);
    /* The count has reached 0: frees the object. Never blocks. */
    void (*free)(dm_store *);
} dm_store_ops;

/* The head that every implementation's struct begins with. */
struct dm_store {
    const dm_store_ops *ops;
    atomic_int refs;
    pid_t pid;  /* the process that made it */
    void *slot; /* for the layer above, guarded by it; the core never looks at it */
};

/* Sets the head up with one reference, owned by this process. */
void
dm_store_init(dm_store *store, const dm_store_ops *ops);

dm_store *
dm_store_hold(dm_store *store);

/* NULL is fine. */
void
dm_store_release(dm_store *store);

/* --- calls: one for each entry of the table, checked ------------------------- */

dm_status
dm_store_set(dm_store *, const char *key, const void *data, size_t size,
             const dm_wait *, dm_error *);

/* Waits until the key is there. Fills `value` (caller frees) on success only. */
dm_status
dm_store_get(dm_store *, const char *key, const dm_wait *, dm_bytes *value, dm_error *);

/* Adds to a decimal counter (absent counts as 0) and returns the sum.
 * DM_ERR_VALUE when the key holds something else. */
dm_status
dm_store_add(dm_store *, const char *key, int64_t amount, const dm_wait *,
             int64_t *result, dm_error *);

/* Sets `desired` if the key holds `expected`, or is absent and expected_size is
 * 0. `value` is what the key holds afterwards (torch: the expected value when the
 * key is absent and expected was not empty). */
dm_status
dm_store_compare_set(dm_store *, const char *key, const void *expected,
                     size_t expected_size, const void *desired, size_t desired_size,
                     const dm_wait *, dm_bytes *value, dm_error *);

dm_status
dm_store_check(dm_store *, const char *const *keys, size_t n, const dm_wait *,
               bool *ready, dm_error *);

dm_status
dm_store_wait(dm_store *, const char *const *keys, size_t n, const dm_wait *,
              dm_error *);

dm_status
dm_store_delete_key(dm_store *, const char *key, const dm_wait *, bool *existed,
                    dm_error *);

dm_status
dm_store_append(dm_store *, const char *key, const void *data, size_t size,
                const dm_wait *, dm_error *);

/* Waits for all keys; values[0..n-1] are the caller's to free on success. */
dm_status
dm_store_multi_get(dm_store *, const char *const *keys, size_t n, const dm_wait *,
                   dm_bytes *values, dm_error *);

dm_status
dm_store_multi_set(dm_store *, const char *const *keys, const dm_bytes *values,
                   size_t n, const dm_wait *, dm_error *);

dm_status
dm_store_num_keys(dm_store *, const dm_wait *, int64_t *n, dm_error *);

/* `keys` is an array from dm_malloc_array of n dm_bytes, all the caller's. */
dm_status
dm_store_list_keys(dm_store *, const dm_wait *, dm_bytes **keys, size_t *n, dm_error *);

dm_status
dm_store_queue_push(dm_store *, const char *key, const void *data, size_t size,
                    const dm_wait *, dm_error *);

/* block false and an empty queue: DM_ERR_AGAIN. */
dm_status
dm_store_queue_pop(dm_store *, const char *key, bool block, const dm_wait *,
                   dm_bytes *value, dm_error *);

dm_status
dm_store_queue_len(dm_store *, const char *key, const dm_wait *, int64_t *n,
                   dm_error *);

/* Returns when `world` callers have come to `key`, which may be used again at once.
 * After a DM_ERR_TIMEOUT or DM_ERR_INTERRUPTED the key is spent where the store has
 * no barrier of its own (file, python, torch's server). */
dm_status
dm_store_barrier(dm_store *, const char *key, int32_t world, const dm_wait *,
                 dm_error *);

/* Departures. A client leaves a will; when its process dies or drops its connection
 * without dm_store_close, the server sets `key` to `data` (text for people: "rank 3
 * (host b, pid 812) is gone"). A second will for the same key replaces the first.
 * Each costs a connection of its own. DM_ERR_UNSUPPORTED where nobody can do that:
 * every store but tcp, and tcp under torch's server. Not executed while a forked
 * child still holds the connection. */
dm_status
dm_store_will(dm_store *, const char *key, const void *data, size_t size,
              const dm_wait *, dm_error *);

/* As dm_store_wait, but ends with DM_ERR_PEER as soon as one of the `unless` keys is
 * there while one of `keys` is not; the text is that key's value. At once where the
 * store is tcp under our server or in-process; elsewhere within about a second. */
dm_status
dm_store_wait_unless(dm_store *, const char *const *keys, size_t n,
                     const char *const *unless, size_t m, const dm_wait *, dm_error *);

/* Says goodbye first: wills are not executed. */
void
dm_store_close(dm_store *);

const char *
dm_store_kind(const dm_store *);

/* --- implementations ----------------------------------------------------------- */

/* A view of `base` in which every key is "<prefix>/<key>". Holds `base`; closing
 * the view leaves the base open. */
dm_status
dm_store_prefix_new(dm_store *base, const char *prefix, dm_store **store, dm_error *);

/* The store under a prefix view and "<prefix>/", both borrowed; the base is NULL for
 * any other kind. */
dm_store *
dm_store_prefix_base(dm_store *store, const char **prefix);

/* A store inside this process. */
dm_status
dm_store_hash_new(dm_store **store, dm_error *);

/* A store in a file that all ranks can lock (same host or a shared file system with
 * working locks). The file is made when it is not there (mode 0600) and must be fresh:
 * what stands in it counts. With `world_size` > 0 it is removed once that many stores
 * on it have been closed or freed. DM_ERR_SYSTEM: cannot be opened. */
dm_status
dm_store_file_new(const char *path, int32_t world_size, dm_store **store, dm_error *);

/* The path of a file store, borrowed; NULL for any other kind. */
const char *
dm_store_file_path(const dm_store *store);

/* A client of the server at host:port that speaks torch's TCPStore protocol
 * (ours or torch's). Connects before it returns; retries while the server is not
 * there yet, until the wait's deadline. `token` is DEVICEMESH_STORE_TOKEN or NULL. */
dm_status
dm_store_tcp_new(const char *host, uint16_t port, const char *token, const dm_wait *,
                 dm_store **store, dm_error *);

/* Where a tcp store's server is, borrowed; NULL for any other kind. */
const char *
dm_store_tcp_address(const dm_store *store, uint16_t *port);

/* torch's wait_for_workers: counts this client as one of `world` workers, in a key that
 * no other call can reach, and, if it is the master, waits until all have been counted.
 * tcp only. */
dm_status
dm_store_tcp_meet_workers(dm_store *store, int64_t world, bool is_master,
                          const dm_wait *wait, dm_error *err);

/* For implementations: writes "'a', 'b' and 3 more" about the keys whose `there` is
 * false (NULL: all of them) into `text`, cut to fit. Returns `text`. */
const char *
dm_store_list_missing(const char *const *keys, const bool *there, size_t n, char *text,
                      size_t size);

/* --- server ---------------------------------------------------------------------- */

typedef struct dm_store_server dm_store_server;

typedef struct dm_store_server_config {
    const char *host;  /* address to bind; never a wildcard unless asked for */
    uint16_t port;     /* 0: any free one */
    const char *token; /* NULL: clients need none (torch's clients have none) */
    int listen_fd;     /* >= 0: already bound and listening, taken over; else -1 */
} dm_store_server_config;

/* Binds, listens and starts the server's one thread. The server is ready for
 * clients when this returns. DM_ERR_SYSTEM: cannot be bound (names host and port).
 * DM_ERR_CONNECTION: the host's name cannot be looked up; that may take a while. */
dm_status
dm_store_server_start(const dm_store_server_config *config, dm_store_server **server,
                      dm_error *err);

uint16_t
dm_store_server_port(const dm_store_server *server);

/* Number of clients connected now. */
int
dm_store_server_clients(dm_store_server *server);

/* Stops the thread, closes all connections and frees the server. In a forked
 * child it only forgets. NULL is fine. */
void
dm_store_server_stop(dm_store_server *server);

#endif
