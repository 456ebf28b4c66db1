/* Tests of the reduce kernels that need a sanitizer or the processor's control word;
 * what they compute is held against numpy by tests/unit/test_reduce.py.
 *
 * sources: base backend/reduce
 */
#include "dm_test.h"

#include "backend/reduce/dm_narrow.h"
#include "backend/reduce/dm_reduce.h"

#if defined(__SSE2__)
#    include <immintrin.h>
#endif

enum { COUNT = 1000 };

static uint64_t random_state = 1;

static uint8_t
random_byte(void)
{
    random_state = random_state * UINT64_C(6364136223846793005) + 1;
    return (uint8_t)(random_state >> 56);
}

/* Any bits, at odd addresses, in blocks of exactly the right size: no undefined
 * overflow, shift or alignment, and nothing touched beside the data. */
static void
any_bits_anywhere(void)
{
    for (int dtype = 0; dtype < DM_DTYPE_COUNT; dtype++) {
        size_t bytes = COUNT * dm_dtype_size((dm_dtype)dtype) + 1;
        unsigned char *a = malloc(bytes), *b = malloc(bytes), *out = malloc(bytes);
        for (int op = 0; op < DM_REDUCE_OP_COUNT; op++) {
            dm_reduce_fn kernel = dm_reduce_lookup((dm_dtype)dtype, (dm_reduce_op)op);
            if (kernel == NULL) {
                continue;
            }
            for (size_t i = 0; i < bytes; i++) {
                a[i] = random_byte();
                b[i] = random_byte();
            }
            kernel(out + 1, a + 1, b + 1, COUNT);
            kernel(a + 1, a + 1, b + 1, COUNT);
            CHECK(memcmp(a + 1, out + 1, bytes - 1) == 0);
            dm_reduce_finish(out + 1, COUNT, (dm_dtype)dtype, (dm_reduce_op)op, 3);
            if (op == DM_PREMUL_SUM) {
                dm_reduce_scale(out + 1, a + 1, COUNT, (dm_dtype)dtype, -1.5);
                dm_reduce_scale(a + 1, a + 1, COUNT, (dm_dtype)dtype, -1.5);
                CHECK(memcmp(a + 1, out + 1, bytes - 1) == 0);
            }
            kernel(NULL, NULL, NULL, 0);
        }
        free(a);
        free(b);
        free(out);
    }
}

/* The same for many arrays at once, in place of each of them. */
static void
many_anywhere(void)
{
    enum { MANY = 3, LONG = 5000 };
    for (int dtype = 0; dtype < DM_DTYPE_COUNT; dtype++) {
        size_t bytes = LONG * dm_dtype_size((dm_dtype)dtype) + 1;
        unsigned char *all[MANY + 1];
        const void *inputs[MANY];
        for (int k = 0; k <= MANY; k++) {
            all[k] = malloc(bytes);
        }
        for (int op = 0; op < DM_REDUCE_OP_COUNT; op++) {
            if (dm_reduce_lookup((dm_dtype)dtype, (dm_reduce_op)op) == NULL) {
                continue;
            }
            for (int n = 1; n <= MANY; n++) {
                for (int k = 0; k < n; k++) {
                    inputs[k] = all[k] + 1;
                    for (size_t i = 1; i < bytes; i++) {
                        all[k][i] = random_byte();
                    }
                }
                dm_reduce_many(all[MANY] + 1, inputs, n, LONG, (dm_dtype)dtype,
                               (dm_reduce_op)op, n);
                dm_reduce_many(all[n - 1] + 1, inputs, n, LONG, (dm_dtype)dtype,
                               (dm_reduce_op)op, n);
                CHECK(memcmp(all[n - 1] + 1, all[MANY] + 1, bytes - 1) == 0);
            }
        }
        for (int k = 0; k <= MANY; k++) {
            free(all[k]);
        }
    }
}

static void
float16_values(void)
{
    CHECK(dm_widen_float16(0x3c00) == 1.0F);
    CHECK(dm_widen_float16(0x0001) == 0x1p-24F);
    CHECK(dm_widen_float16(0xfbff) == -65504.0F);
    CHECK_INT(dm_round_float16(65519.0F), 0x7bff);
    CHECK_INT(dm_round_float16(65520.0F), 0x7c00);
    CHECK_INT(dm_round_float16(0x1p-25F), 0x0000);
    CHECK_INT(dm_round_float16(0x1.8p-25F), 0x0001);
    CHECK_INT(dm_round_float16(-0.0F), 0x8000);
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        CHECK_INT(dm_round_float16(dm_widen_float16((uint16_t)bits)),
                  bits | ((bits & 0x7fff) > 0x7c00 ? 0x200 : 0));
        CHECK_INT(dm_round_bfloat16(dm_widen_bfloat16((uint16_t)bits)),
                  bits | ((bits & 0x7fff) > 0x7f80 ? 0x40 : 0));
    }
}

/* Programs switch the processor to flush denormals of float32; those of the narrow
 * types are other numbers and stay exact. */
static void
denormals_under_flush_to_zero(void)
{
#if defined(__SSE2__)
    enum { FLUSH_TO_ZERO = 0x8000, DENORMALS_ARE_ZERO = 0x40 };
    unsigned saved = _mm_getcsr();
    _mm_setcsr(saved | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO);
    /* Eight, which is what a vector takes, and one that is left over. */
    uint16_t a[9] = {0x0001, 0x03ff, 0x8001, 0x0400, 1, 1, 1, 1, 0x0001};
    uint16_t b[9] = {0x0001, 0x0001, 0x0003, 0x8001, 1, 1, 1, 1, 0x8003};
    dm_reduce_lookup(DM_FLOAT16, DM_SUM)(a, a, b, 9);
    uint8_t c[] = {0x01, 0x07, 0x81}, d[] = {0x01, 0x01, 0x03};
    dm_reduce_lookup(DM_FLOAT8_E4M3, DM_SUM)(c, c, d, 3);
    _mm_setcsr(saved);
    CHECK_INT(a[0], 0x0002);
    CHECK_INT(a[1], 0x0400);
    CHECK_INT(a[2], 0x0002);
    CHECK_INT(a[3], 0x03ff);
    CHECK_INT(a[7], 0x0002);
    CHECK_INT(a[8], 0x8002);
    CHECK_INT(c[0], 0x02);
    CHECK_INT(c[1], 0x08);
    CHECK_INT(c[2], 0x02);
#endif
}

TEST_MAIN(TEST(any_bits_anywhere), TEST(many_anywhere), TEST(float16_values),
          TEST(denormals_under_flush_to_zero))
