/* The few calls of gloo that the benchmark compares with (raw_gloo.cc). */
#ifndef RAW_GLOO_H
#define RAW_GLOO_H

#include <stddef.h>

typedef struct raw_gloo raw_gloo;
typedef void (*raw_gloo_reduce)(void *out, const void *a, const void *b, size_t count);

/* Connects all ranks through files in `folder`. `batch`: the loop thread is scheduled as
 * the bridge's is. Ends the process on failure. */
raw_gloo *
raw_gloo_open(int rank, int size, const char *folder, int batch);

void
raw_gloo_all_reduce(raw_gloo *raw, float *data, size_t count, raw_gloo_reduce fn);

void
raw_gloo_broadcast(raw_gloo *raw, float *data, size_t count);

void
raw_gloo_barrier(raw_gloo *raw);

#endif
