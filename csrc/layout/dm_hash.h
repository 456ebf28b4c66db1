/* Hashing of small numbers, the same in every process and run. Private to layout. */
#ifndef DM_HASH_H
#define DM_HASH_H

#include <stdint.h>

/* Folds one value into a running hash; start from any constant. Order matters.
 * The multipliers are those of MurmurHash3's finalizer (public domain). */
static inline uint64_t
dm_hash_fold(uint64_t hash, uint64_t value)
{
    hash = (hash << 7 | hash >> 57) ^ value;
    hash ^= hash >> 33;
    hash *= UINT64_C(0xff51afd7ed558ccd);
    hash ^= hash >> 33;
    hash *= UINT64_C(0xc4ceb9fe1a85ec53);
    return hash ^ hash >> 33;
}

#endif
