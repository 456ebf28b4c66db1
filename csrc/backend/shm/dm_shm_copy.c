/* Copying and reducing: see dm_shm_copy.h. */
#include "backend/shm/dm_shm_copy.h"

#if defined(__x86_64__)
#    include <emmintrin.h>
#endif

void
dm_shm_copy_past_cache(void *to, const void *from, size_t bytes)
{
#if defined(__x86_64__)
    unsigned char *target = to;
    const unsigned char *source = from;
    size_t head = (0 - (uintptr_t)target) % DM_SHM_LINE;
    if (bytes < head + DM_SHM_LINE) {
        dm_shm_copy(target, source, bytes);
        return;
    }
    dm_shm_copy(target, source, head);
    target += head;
    source += head;
    bytes -= head;
    for (; bytes >= DM_SHM_LINE; bytes -= DM_SHM_LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)(const void *)source);
        __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(source + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(const void *)(source + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(const void *)(source + 48));
        _mm_stream_si128((__m128i *)(void *)target, a);
        _mm_stream_si128((__m128i *)(void *)(target + 16), b);
        _mm_stream_si128((__m128i *)(void *)(target + 32), c);
        _mm_stream_si128((__m128i *)(void *)(target + 48), d);
        target += DM_SHM_LINE;
        source += DM_SHM_LINE;
    }
    dm_shm_copy(target, source, bytes);
    /* These stores are ordered by nothing else: other threads of the caller must see
     * the result once the operation has returned. */
    _mm_sfence();
#else
    dm_shm_copy(to, from, bytes);
#endif
}

void
dm_shm_combine(const dm_shm_reducer *reducer, const void *const *sources, size_t count,
               void *out, void *second)
{
    const size_t element = reducer->element;
    /* Without a second copy to make there is nothing to gain from small steps. */
    const size_t step = second != NULL ? DM_SHM_REDUCE_BLOCK / element : count;
    const void *at[DM_SHM_MEMBERS_MAX];
    for (size_t done = 0; done < count; done += step) {
        size_t n = count - done < step ? count - done : step;
        unsigned char *target = (unsigned char *)out + done * element;
        for (int32_t i = 0; i < reducer->size; i++) {
            at[i] = (const unsigned char *)sources[i] + done * element;
        }
        dm_reduce_many(target, at, reducer->size, n, reducer->dtype, reducer->op,
                       reducer->size);
        if (second != NULL) {
            memcpy((unsigned char *)second + done * element, target, n * element);
        }
    }
}
