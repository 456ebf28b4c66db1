/* Status codes and the caller-owned error record.
 *
 * Every function of the core that can fail returns a dm_status and takes a
 * dm_error last. The function that decides an error writes its text; those it
 * passes on its way up may only put context in front (dm_error_context). The
 * record is plain memory owned by the caller: no allocation, no thread rules.
 */
#ifndef DM_STATUS_H
#define DM_STATUS_H

#include <stdarg.h>
#include <stdbool.h>

/* Grouped by what is gone once the error has been returned. */
typedef enum dm_status {
    DM_OK = 0,

    /* The argument: nothing was sent, everything stands as before. */
    DM_ERR_VALUE = -1, /* right type, unusable value */
    DM_ERR_TYPE = -2,
    DM_ERR_KEY = -3, /* a name or key that does not exist */
    DM_ERR_UNSUPPORTED = -4,

    /* This call: the object lives on. */
    DM_ERR_TIMEOUT = -20,
    DM_ERR_INTERRUPTED = -21, /* the wait's poll function said stop */
    DM_ERR_AGAIN = -22,       /* not ready yet; only from calls that say so */

    /* This group (or store connection): it refuses further work. */
    DM_ERR_CLOSED = -40,
    DM_ERR_ABORTED = -41,
    DM_ERR_PEER = -42,     /* another rank died or closed its end */
    DM_ERR_MISMATCH = -43, /* ranks asked for different things */
    DM_ERR_CONNECTION = -44,
    DM_ERR_PROTOCOL = -45, /* bytes that no well-behaved peer sends */

    /* This process's communication. */
    DM_ERR_NO_MEMORY = -60,
    DM_ERR_SYSTEM = -61,  /* a system call failed; native is errno */
    DM_ERR_LIBRARY = -62, /* a library is missing or unusable */
    DM_ERR_FORKED = -63,  /* the object belongs to the parent process */
    DM_ERR_STATE = -64,   /* called in an order that is not allowed */
} dm_status;

enum { DM_ERROR_TEXT_SIZE = 1536 };

typedef struct dm_error {
    dm_status status;
    int native; /* errno, ncclResult_t, ...: 0 when there is none */
    char text[DM_ERROR_TEXT_SIZE];
} dm_error;

#define DM_ERROR_INIT {DM_OK, 0, {0}}

/* printf-style check on the arguments of a function. */
#define DM_PRINTF(format_index, first_arg)                                             \
    __attribute__((format(printf, format_index, first_arg)))

/* Passes a failure of `call` on to the caller. */
#define DM_TRY(call)                                                                   \
    do {                                                                               \
        dm_status dm_try_status_ = (call);                                             \
        if (dm_try_status_ != DM_OK) {                                                 \
            return dm_try_status_;                                                     \
        }                                                                              \
    } while (0)

/* Stores the result of `call` in `status` and jumps to `label` on failure. */
#define DM_TRY_GOTO(status, call, label)                                               \
    do {                                                                               \
        (status) = (call);                                                             \
        if ((status) != DM_OK) {                                                       \
            goto label;                                                                \
        }                                                                              \
    } while (0)

/* Writes the record (err may be NULL) and returns `status`. Text that does not
 * fit is cut and ends in "...". */
dm_status
dm_error_set(dm_error *err, dm_status status, const char *format, ...) DM_PRINTF(3, 4);

/* As dm_error_set, with a native code and its meaning left to the text. */
dm_status
dm_error_set_native(dm_error *err, dm_status status, int native, const char *format,
                    ...) DM_PRINTF(4, 5);

/* DM_ERR_SYSTEM (DM_ERR_NO_MEMORY for ENOMEM): "<text>: <strerror(errnum)>". */
dm_status
dm_error_set_errno(dm_error *err, int errnum, const char *format, ...) DM_PRINTF(3, 4);

/* DM_ERR_NO_MEMORY naming what was being made. */
dm_status
dm_error_set_no_memory(dm_error *err, const char *what);

/* Puts "<context>: " in front of the text that is there. The status stays. */
void
dm_error_context(dm_error *err, const char *format, ...) DM_PRINTF(2, 3);

/* A short lower-case name for logs: "timeout", "peer", ... Never NULL. */
const char *
dm_status_name(dm_status status);

#endif
