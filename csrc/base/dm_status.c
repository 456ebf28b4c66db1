/* Status codes and the error record: see dm_status.h. */
#include "base/dm_status.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* Formats into text[used..]; marks a cut with "...". Returns the new length. */
static size_t
append(char *text, size_t size, size_t used, const char *format, va_list args)
{
    int n = vsnprintf(text + used, size - used, format, args);
    if (n < 0) {
        text[used] = '\0';
        return used;
    }
    if ((size_t)n >= size - used) {
        memcpy(text + size - 4, "...", 4);
        return size - 1;
    }
    return used + (size_t)n;
}

static void
append_text(dm_error *err, size_t used, const char *format, ...) DM_PRINTF(3, 4);

static void
append_text(dm_error *err, size_t used, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    append(err->text, sizeof(err->text), used, format, args);
    va_end(args);
}

static dm_status
set(dm_error *err, dm_status status, int native, const char *format, va_list args)
{
    if (err != NULL) {
        err->status = status;
        err->native = native;
        append(err->text, sizeof(err->text), 0, format, args);
    }
    return status;
}

dm_status
dm_error_set(dm_error *err, dm_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    set(err, status, 0, format, args);
    va_end(args);
    return status;
}

dm_status
dm_error_set_native(dm_error *err, dm_status status, int native, const char *format,
                    ...)
{
    va_list args;
    va_start(args, format);
    set(err, status, native, format, args);
    va_end(args);
    return status;
}

dm_status
dm_error_set_errno(dm_error *err, int errnum, const char *format, ...)
{
    dm_status status = errnum == ENOMEM ? DM_ERR_NO_MEMORY : DM_ERR_SYSTEM;
    va_list args;
    va_start(args, format);
    set(err, status, errnum, format, args);
    va_end(args);
    if (err != NULL) {
        char reason[128];
        size_t used = strlen(err->text);
        /* The GNU strerror_r returns its text and may leave `reason` alone. */
        const char *why = strerror_r(errnum, reason, sizeof(reason));
        append_text(err, used, ": %s", why);
    }
    return status;
}

dm_status
dm_error_set_no_memory(dm_error *err, const char *what)
{
    return dm_error_set(err, DM_ERR_NO_MEMORY, "out of memory while making %s", what);
}

void
dm_error_context(dm_error *err, const char *format, ...)
{
    if (err == NULL) {
        return;
    }
    char old[DM_ERROR_TEXT_SIZE];
    memcpy(old, err->text, sizeof(old));

    va_list args;
    va_start(args, format);
    size_t used = append(err->text, sizeof(err->text), 0, format, args);
    va_end(args);
    append_text(err, used, ": %s", old);
}

const char *
dm_status_name(dm_status status)
{
    switch (status) {
    case DM_OK:
        return "ok";
    case DM_ERR_VALUE:
        return "value";
    case DM_ERR_TYPE:
        return "type";
    case DM_ERR_KEY:
        return "key";
    case DM_ERR_UNSUPPORTED:
        return "unsupported";
    case DM_ERR_TIMEOUT:
        return "timeout";
    case DM_ERR_INTERRUPTED:
        return "interrupted";
    case DM_ERR_AGAIN:
        return "again";
    case DM_ERR_CLOSED:
        return "closed";
    case DM_ERR_ABORTED:
        return "aborted";
    case DM_ERR_PEER:
        return "peer";
    case DM_ERR_MISMATCH:
        return "mismatch";
    case DM_ERR_CONNECTION:
        return "connection";
    case DM_ERR_PROTOCOL:
        return "protocol";
    case DM_ERR_NO_MEMORY:
        return "no memory";
    case DM_ERR_SYSTEM:
        return "system";
    case DM_ERR_LIBRARY:
        return "library";
    case DM_ERR_FORKED:
        return "forked";
    case DM_ERR_STATE:
        return "state";
    }
    return "unknown";
}
