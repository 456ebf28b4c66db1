/* Sizes and thresholds of the shm backend, all in one place.
 *
 * benchmarks/native/shm_bench.c measures what they do. Sizes that lie in the segment
 * must be equal on all members: they are part of dm_shm_head.version.
 */
#ifndef DM_SHM_TUNE_H
#define DM_SHM_TUNE_H

enum {
    DM_SHM_LINE = 64,   /* bytes of a cache line */
    DM_SHM_INLINE = 56, /* of it, behind an 8-byte flag */

    DM_SHM_MEMBERS_MAX = 512,
    DM_SHM_CPU_WORDS = 16, /* 1,024 processors */

    /* Rounds that a member may run ahead of the slowest one, at least half and at most
     * all of these. A power of two. */
    DM_SHM_CELLS = 32,
    DM_SHM_CELLS_HALF = DM_SHM_CELLS / 2,

    /* Collectives that a mismatch can be traced back. A power of two. */
    DM_SHM_HISTORY = 16,

    /* Data that goes in one piece. The odd line between slots keeps equal offsets of
     * different slots out of the same cache set. */
    DM_SHM_SMALL_BYTES = 16 * 1024,
    DM_SHM_SMALL_STRIDE = DM_SHM_SMALL_BYTES + DM_SHM_LINE,
    DM_SHM_SMALL_SLOTS = 4,

    /* Data that goes in chunks. Four slots: one is filled, one reduced, one copied out
     * of, and one more lets members be a step apart. */
    DM_SHM_LARGE_SLOTS = 4,
    DM_SHM_LARGE_TOTAL = 512 * 1024, /* of one slot, over all members */
    DM_SHM_LARGE_MIN = 32 * 1024,

    /* all_reduce: every member reduces everything as long as all the data is no more
     * than this; beyond, each reduces its part (one more barrier). */
    DM_SHM_REDUCE_ALL_BYTES = 64 * 1024,

    /* Results that are needed in two places are copied in blocks that are still in the
     * first cache. */
    DM_SHM_REDUCE_BLOCK = 8 * 1024,

    /* Results from here on are written past the caches where they are not written in
     * place. */
    DM_SHM_PAST_CACHE_BYTES = 12 * 1024 * 1024,

    /* Messages between two members. Powers of two. */
    DM_SHM_PAIR_CELLS = 16,
    DM_SHM_RING_MAX = 256 * 1024,
    DM_SHM_RING_MIN = 16 * 1024,

    /* Waiting. Pauses only where every member can have a processor. */
    DM_SHM_PAUSES = 100,
    DM_SHM_YIELDS = 100,
};

#endif
