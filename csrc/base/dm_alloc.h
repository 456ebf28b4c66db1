/* Allocation: malloc with overflow-checked arrays and a switch to fail on purpose.
 *
 * All memory of the core comes from here, so that tests can make the n-th
 * allocation of a thread fail and see every error path run.
 */
#ifndef DM_ALLOC_H
#define DM_ALLOC_H

#include <stddef.h>
#include <stdint.h>

/* `count` elements of `size` bytes, zeroed. NULL when out of memory or when the
 * product overflows. A request of 0 bytes returns a unique pointer. */
void *
dm_calloc(size_t count, size_t size);

/* As dm_calloc, not zeroed. */
void *
dm_malloc_array(size_t count, size_t size);

/* Grows or shrinks an array; on NULL the old one is untouched. */
void *
dm_realloc_array(void *pointer, size_t count, size_t size);

/* A copy of the NUL-terminated string, or NULL. */
char *
dm_strdup(const char *text);

/* A copy of `size` bytes, or NULL. */
void *
dm_memdup(const void *data, size_t size);

/* free(); NULL is fine. */
void
dm_free(void *pointer);

/* Tests only: the n-th allocation of this thread from now on (1 is the next)
 * fails, once; 0 switches it off. */
void
dm_alloc_fail_at(uint64_t n);

#endif
