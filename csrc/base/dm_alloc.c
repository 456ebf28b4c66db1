/* Allocation: see dm_alloc.h. */
#include "base/dm_alloc.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local uint64_t fail_countdown;

static bool
must_fail(void)
{
    return fail_countdown != 0 && --fail_countdown == 0;
}

void *
dm_calloc(size_t count, size_t size)
{
    if (must_fail()) {
        return NULL;
    }
    if (count == 0 || size == 0) {
        count = size = 1;
    }
    return calloc(count, size);
}

void *
dm_malloc_array(size_t count, size_t size)
{
    return dm_realloc_array(NULL, count, size);
}

void *
dm_realloc_array(void *pointer, size_t count, size_t size)
{
    size_t bytes;
    if (must_fail() || __builtin_mul_overflow(count, size, &bytes)) {
        return NULL;
    }
    return realloc(pointer, bytes != 0 ? bytes : 1);
}

char *
dm_strdup(const char *text)
{
    return dm_memdup(text, strlen(text) + 1);
}

void *
dm_memdup(const void *data, size_t size)
{
    void *copy = dm_malloc_array(size, 1);
    if (copy != NULL && size != 0) {
        memcpy(copy, data, size);
    }
    return copy;
}

void
dm_free(void *pointer)
{
    free(pointer);
}

void
dm_alloc_fail_at(uint64_t n)
{
    fail_countdown = n;
}
