/* The frame of the C tests: checks, and a main that runs the tests of one file.
 *
 * A test file is one executable: static void functions, then
 * TEST_MAIN(TEST(name), ...). The comment at its head says what it is linked with
 * and under which sanitizers it runs (tests/unit/test_c.py reads both):
 *
 *     sources: base layout/dm_layout.c      files or whole folders under csrc/
 *     sanitize: address,undefined thread    optional; these builds, one after the other
 *
 * The first check that fails ends the executable. Arguments name the tests to run.
 */
#ifndef DM_TEST_H
#define DM_TEST_H

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dm_alloc.h"
#include "base/dm_status.h"

typedef struct dm_test {
    const char *name;
    void (*run)(void);
} dm_test;

#define TEST(function) {#function, function}

#define TEST_FAIL(...)                                                                 \
    do {                                                                               \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                \
        fprintf(stderr, __VA_ARGS__);                                                  \
        fputc('\n', stderr);                                                           \
        exit(1);                                                                       \
    } while (0)

#define CHECK(condition)                                                               \
    do {                                                                               \
        if (!(condition)) {                                                            \
            TEST_FAIL("not true: %s", #condition);                                     \
        }                                                                              \
    } while (0)

#define CHECK_INT(actual, expected)                                                    \
    do {                                                                               \
        int64_t actual_ = (int64_t)(actual), expected_ = (int64_t)(expected);          \
        if (actual_ != expected_) {                                                    \
            TEST_FAIL("%s is %" PRId64 ", expected %" PRId64, #actual, actual_,        \
                      expected_);                                                      \
        }                                                                              \
    } while (0)

#define CHECK_STR(actual, expected)                                                    \
    do {                                                                               \
        const char *actual_ = (actual), *expected_ = (expected);                       \
        if (strcmp(actual_, expected_) != 0) {                                         \
            TEST_FAIL("%s is \"%s\", expected \"%s\"", #actual, actual_, expected_);   \
        }                                                                              \
    } while (0)

/* The text of an error contains `part`. */
#define CHECK_CONTAINS(text, part)                                                     \
    do {                                                                               \
        const char *text_ = (text), *part_ = (part);                                   \
        if (strstr(text_, part_) == NULL) {                                            \
            TEST_FAIL("%s is \"%s\", which has no \"%s\" in it", #text, text_, part_); \
        }                                                                              \
    } while (0)

/* A call that takes `err` (a dm_error in scope) succeeds. */
#define CHECK_OK(call)                                                                 \
    do {                                                                               \
        if ((call) != DM_OK) {                                                         \
            TEST_FAIL("%s failed: %s: %s", #call, dm_status_name(err.status),          \
                      err.text);                                                       \
        }                                                                              \
    } while (0)

/* It fails with that status, and the record says the same and has a text. */
#define CHECK_ERR(call, expected)                                                      \
    do {                                                                               \
        err = (dm_error)DM_ERROR_INIT;                                                 \
        dm_status status_ = (call);                                                    \
        if (status_ != (expected)) {                                                   \
            TEST_FAIL("%s gave %s (%s), expected %s", #call, dm_status_name(status_),  \
                      err.text, dm_status_name(expected));                             \
        }                                                                              \
        CHECK_INT(err.status, status_);                                                \
        CHECK(err.text[0] != '\0');                                                    \
    } while (0)

/* Repeats the call with its first, second, ... allocation failing until it succeeds;
 * each failure must be DM_ERR_NO_MEMORY. What the last one made is the caller's.
 * `expected` is how many allocations the call makes. */
#define CHECK_NO_MEMORY(call, expected)                                                \
    do {                                                                               \
        uint64_t nth_ = 0;                                                             \
        dm_status status_;                                                             \
        do {                                                                           \
            err = (dm_error)DM_ERROR_INIT;                                             \
            dm_alloc_fail_at(++nth_);                                                  \
            status_ = (call);                                                          \
            dm_alloc_fail_at(0);                                                       \
            if (status_ != DM_OK && status_ != DM_ERR_NO_MEMORY) {                     \
                TEST_FAIL("%s with allocation %" PRIu64 " failing gave %s (%s)",       \
                          #call, nth_, dm_status_name(status_), err.text);             \
            }                                                                          \
        } while (status_ != DM_OK);                                                    \
        CHECK_INT(nth_ - 1, expected);                                                 \
    } while (0)

static inline bool
test_wanted(const dm_test *test, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], test->name) == 0) {
            return true;
        }
    }
    return argc == 1;
}

static inline int
test_main(const dm_test *tests, size_t n, int argc, char **argv)
{
    int ran = 0;
    for (size_t i = 0; i < n; i++) {
        if (test_wanted(&tests[i], argc, argv)) {
            fprintf(stderr, "%s\n", tests[i].name);
            tests[i].run();
            ran++;
        }
    }
    return ran > 0 ? 0 : 2;
}

#define TEST_MAIN(...)                                                                 \
    int main(int argc, char **argv)                                                    \
    {                                                                                  \
        static const dm_test tests_[] = {__VA_ARGS__};                                 \
        return test_main(tests_, sizeof(tests_) / sizeof(tests_[0]), argc, argv);      \
    }

#endif
