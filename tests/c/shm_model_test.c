/* Every interleaving of the sleep protocol of shm (csrc/backend/shm/dm_shm_wait.h).
 *
 * A model of ranks that go through barriers: each publishes its word, wakes those who
 * wait for it, and waits for the others' words one after the other; and of a thread
 * that aborts a waiting rank. Stores that are not sequentially consistent go into a
 * store buffer (FIFO, one for each rank) and reach memory at any later moment. The walk
 * visits each state once. A state in which nobody can take a step, but somebody sleeps,
 * is a lost wake-up. The protocol has none; each weakened variant has, which shows that
 * the walk can find them, and that no order in it is there for nothing.
 *
 * sources: base
 * sanitize: none
 */
#include "dm_test.h"

enum { MOST_RANKS = 3, BUFFER = 4 };

/* What is taken away from the protocol. */
typedef enum weakness {
    NOTHING,
    STORE_WORD,     /* A: the word's store is not sequentially consistent */
    LOAD_SLEEPERS,  /* B: the sleepers are read before the word is stored */
    COUNT_SLEEPERS, /* C: the count is a plain store */
    LOAD_WORD,      /* D: the word is read before the count goes up */
    LATE_BELL,      /* the bell is read behind the last look at the word */
    NO_BELL,        /* the bell is not counted up before the wake-up */
    ABORT_UNRUNG,   /* the aborter wakes only who says that it waits */
} weakness;

typedef struct setting {
    int ranks;
    int rounds;
    bool abort; /* rank 0 never publishes, but aborts rank 1 */
    weakness weak;
} setting;

/* Shared variables; all fit into a byte. */
enum {
    WORD,                        /* + rank: rounds that it has published */
    BELL = WORD + MOST_RANKS,    /* + rank */
    WAITING = BELL + MOST_RANKS, /* + rank: whom it waits for, + 1 */
    SLEEPERS = WAITING + MOST_RANKS,
    ABORTED,
    VARIABLES,
};

typedef enum step {
    EARLY_LOOK, /* B weakened: sleepers read first */
    STORE,
    LOOK,       /* at the sleepers */
    FIND,       /* whether rank `other` waits for me */
    RING,       /* its bell */
    WAKE,       /* it */
    CHECK_WORD, /* of rank `other`: the fast path and the loop's head */
    READ_BELL,
    SAY_WAITING,
    EARLY_CHECK, /* D weakened */
    COUNT,
    CHECK_AGAIN,
    CHECK_ABORTED,
    LATE_READ, /* of the bell, where that is weakened */
    SLEEP,
    ASLEEP,
    UNCOUNT,
    SAY_AWAKE,
    ABORT,
    DONE,
} step;

typedef struct rank_state {
    uint8_t at; /* a step */
    uint8_t round;
    uint8_t other;
    uint8_t bell; /* as it was read */
    uint8_t saw;  /* sleepers, or whether the word was there: for weakened steps */
    uint8_t asleep;
    uint8_t buffered;
    uint8_t variable[BUFFER]; /* the store buffer, oldest first */
    uint8_t value[BUFFER];
} rank_state;

typedef struct state {
    uint8_t memory[VARIABLES];
    rank_state rank[MOST_RANKS];
} state;

/* --- memory ---------------------------------------------------------------------------- */

/* A load sees the rank's own latest store, be it in memory or not. */
static uint8_t
load(const state *s, int rank, int variable)
{
    const rank_state *r = &s->rank[rank];
    for (int i = r->buffered - 1; i >= 0; i--) {
        if (r->variable[i] == variable) {
            return r->value[i];
        }
    }
    return s->memory[variable];
}

static void
flush_one(state *s, int rank)
{
    rank_state *r = &s->rank[rank];
    s->memory[r->variable[0]] = r->value[0];
    r->buffered--;
    memmove(r->variable, r->variable + 1, BUFFER - 1);
    memmove(r->value, r->value + 1, BUFFER - 1);
    r->variable[BUFFER - 1] = 0;
    r->value[BUFFER - 1] = 0;
}

static void
flush_all(state *s, int rank)
{
    while (s->rank[rank].buffered > 0) {
        flush_one(s, rank);
    }
}

static void
store_strong(state *s, int rank, int variable, uint8_t value)
{
    flush_all(s, rank);
    s->memory[variable] = value;
}

static void
store_weak(state *s, int rank, int variable, uint8_t value)
{
    rank_state *r = &s->rank[rank];
    CHECK(r->buffered < BUFFER);
    r->variable[r->buffered] = (uint8_t)variable;
    r->value[r->buffered] = value;
    r->buffered++;
}

/* --- one step of one rank ---------------------------------------------------------------- */

static void
begin_round(const setting *p, rank_state *r)
{
    r->other = 0;
    r->saw = 0;
    if (r->round > p->rounds) {
        r->at = DONE;
    }
    else {
        r->at = p->weak == LOAD_SLEEPERS ? EARLY_LOOK : STORE;
    }
}

/* The next rank to look for sleepers in, or on to waiting. */
static void
next_sleeper(const setting *p, int rank, rank_state *r)
{
    r->other++;
    if (r->other == rank) {
        r->other++;
    }
    r->at = r->other < p->ranks ? FIND : CHECK_WORD;
    if (r->at == CHECK_WORD) {
        r->other = rank == 0 ? 1 : 0;
    }
}

static void
begin_wait(int rank, rank_state *r)
{
    r->other = rank == 0 ? 1 : 0;
    r->at = CHECK_WORD;
}

static bool
word_is_there(const state *s, int rank)
{
    const rank_state *r = &s->rank[rank];
    return load(s, rank, WORD + r->other) >= r->round;
}

/* Whether the rank can take a step at all: a sleeper can not. */
static bool
can_step(const state *s, int rank)
{
    uint8_t at = s->rank[rank].at;
    return at != DONE && (at != ASLEEP || !s->rank[rank].asleep);
}

static void
take_step(const setting *p, state *s, int rank)
{
    rank_state *r = &s->rank[rank];
    switch ((step)r->at) {
    case EARLY_LOOK:
        r->saw = load(s, rank, SLEEPERS);
        r->at = STORE;
        break;
    case STORE:
        if (p->weak == STORE_WORD) {
            store_weak(s, rank, WORD + rank, r->round);
        }
        else {
            store_strong(s, rank, WORD + rank, r->round);
        }
        r->at = LOOK;
        break;
    case LOOK: {
        uint8_t sleepers = p->weak == LOAD_SLEEPERS ? r->saw : load(s, rank, SLEEPERS);
        r->saw = 0;
        if (sleepers == 0) {
            begin_wait(rank, r);
        }
        else {
            r->other = rank == 0 ? 1 : 0;
            r->at = FIND;
        }
        break;
    }
    case FIND:
        if (load(s, rank, WAITING + r->other) == rank + 1) {
            r->at = p->weak == NO_BELL ? WAKE : RING;
        }
        else {
            next_sleeper(p, rank, r);
        }
        break;
    case RING:
        store_strong(s, rank, BELL + r->other,
                     (uint8_t)(load(s, rank, BELL + r->other) + 1));
        r->at = WAKE;
        break;
    case WAKE:
        flush_all(s, rank); /* a system call */
        s->rank[r->other].asleep = 0;
        if (p->abort && rank == 0) {
            r->at = DONE;
        }
        else {
            next_sleeper(p, rank, r);
        }
        break;
    case CHECK_WORD:
        if (p->abort && rank == 1 && load(s, rank, ABORTED) != 0) {
            r->at = DONE;
        }
        else if (word_is_there(s, rank)) {
            r->other++;
            if (r->other == rank) {
                r->other++;
            }
            if (r->other >= p->ranks) {
                r->round++;
                begin_round(p, r);
            }
        }
        else {
            r->at = p->weak == LATE_BELL ? SAY_WAITING : READ_BELL;
        }
        break;
    case READ_BELL:
        r->bell = load(s, rank, BELL + rank);
        r->at = SAY_WAITING;
        break;
    case SAY_WAITING:
        store_strong(s, rank, WAITING + rank, (uint8_t)(r->other + 1));
        r->at = p->weak == LOAD_WORD ? EARLY_CHECK : COUNT;
        break;
    case EARLY_CHECK:
        r->saw = word_is_there(s, rank);
        r->at = COUNT;
        break;
    case COUNT:
        if (p->weak == COUNT_SLEEPERS) {
            store_weak(s, rank, SLEEPERS, (uint8_t)(load(s, rank, SLEEPERS) + 1));
        }
        else {
            store_strong(s, rank, SLEEPERS, (uint8_t)(load(s, rank, SLEEPERS) + 1));
        }
        r->at = CHECK_AGAIN;
        break;
    case CHECK_AGAIN: {
        bool there = p->weak == LOAD_WORD ? r->saw : word_is_there(s, rank);
        r->saw = 0;
        r->at = there ? UNCOUNT : CHECK_ABORTED;
        break;
    }
    case CHECK_ABORTED:
        if (p->abort && rank == 1 && load(s, rank, ABORTED) != 0) {
            r->at = UNCOUNT;
        }
        else {
            r->at = p->weak == LATE_BELL ? LATE_READ : SLEEP;
        }
        break;
    case LATE_READ:
        r->bell = load(s, rank, BELL + rank);
        r->at = SLEEP;
        break;
    case SLEEP:
        /* The kernel compares and sleeps in one step; what the rank has stored may
         * still be on its way to memory. */
        if (s->memory[BELL + rank] == r->bell) {
            r->asleep = 1;
            r->at = ASLEEP;
        }
        else {
            r->at = UNCOUNT;
        }
        break;
    case ASLEEP: /* woken */
        r->at = UNCOUNT;
        break;
    case UNCOUNT:
        store_strong(s, rank, SLEEPERS, (uint8_t)(load(s, rank, SLEEPERS) - 1));
        r->at = SAY_AWAKE;
        break;
    case SAY_AWAKE:
        store_strong(s, rank, WAITING + rank, 0);
        r->bell = 0;
        r->at = CHECK_WORD;
        break;
    case ABORT:
        store_strong(s, rank, ABORTED, 1);
        r->other = 1;
        r->at = RING;
        if (p->weak == ABORT_UNRUNG) {
            r->at = WAKE; /* as if it had found nobody's `waiting` worth a ring */
        }
        break;
    case DONE:
        TEST_FAIL("no such step");
    }
}

/* --- the walk ---------------------------------------------------------------------------- */

typedef struct set {
    state *slots;
    bool *used;
    size_t room; /* a power of two */
    size_t count;
} set;

static uint64_t
hash(const state *s)
{
    const unsigned char *bytes = (const unsigned char *)s;
    uint64_t h = UINT64_C(14695981039346656037);
    for (size_t i = 0; i < sizeof(*s); i++) {
        h = (h ^ bytes[i]) * UINT64_C(1099511628211);
    }
    return h ^ h >> 29;
}

/* False when it was there already. */
static bool
add(set *seen, const state *s)
{
    if (seen->count * 2 >= seen->room) {
        set larger = {.room = seen->room * 4};
        larger.slots = malloc(larger.room * sizeof(state));
        larger.used = calloc(larger.room, sizeof(bool));
        CHECK(larger.slots != NULL && larger.used != NULL);
        for (size_t i = 0; i < seen->room; i++) {
            if (seen->used[i]) {
                add(&larger, &seen->slots[i]);
            }
        }
        free(seen->slots);
        free(seen->used);
        *seen = larger;
    }
    size_t i = hash(s) & (seen->room - 1);
    while (seen->used[i]) {
        if (memcmp(&seen->slots[i], s, sizeof(*s)) == 0) {
            return false;
        }
        i = (i + 1) & (seen->room - 1);
    }
    seen->used[i] = true;
    seen->slots[i] = *s;
    seen->count++;
    return true;
}

typedef struct walk {
    size_t states;
    size_t lost; /* states in which somebody sleeps for ever */
} walk;

static walk
walk_through(const setting *p)
{
    state start;
    memset(&start, 0, sizeof(start));
    for (int i = 0; i < p->ranks; i++) {
        start.rank[i].round = 1;
        begin_round(p, &start.rank[i]);
    }
    if (p->abort) {
        start.rank[0].at = ABORT;
    }

    set seen = {.room = 1024};
    seen.slots = malloc(seen.room * sizeof(state));
    seen.used = calloc(seen.room, sizeof(bool));
    size_t room = 1024;
    size_t depth = 0;
    state *stack = malloc(room * sizeof(state));
    CHECK(seen.slots != NULL && seen.used != NULL && stack != NULL);

    walk w = {0, 0};
    add(&seen, &start);
    stack[depth++] = start;
    while (depth > 0) {
        const state now = stack[--depth];
        bool moved = false;
        for (int i = 0; i < 2 * p->ranks; i++) {
            int rank = i / 2;
            state next = now;
            if (i % 2 == 0 && can_step(&now, rank)) {
                take_step(p, &next, rank);
            }
            else if (i % 2 == 1 && now.rank[rank].buffered > 0) {
                flush_one(&next, rank);
            }
            else {
                continue;
            }
            moved = true;
            if (add(&seen, &next)) {
                if (depth == room) {
                    room *= 2;
                    stack = realloc(stack, room * sizeof(state));
                    CHECK(stack != NULL);
                }
                stack[depth++] = next;
            }
        }
        for (int i = 0; i < p->ranks && !moved; i++) {
            if (now.rank[i].at != DONE) {
                w.lost++;
                break;
            }
        }
    }
    w.states = seen.count;
    free(stack);
    free(seen.slots);
    free(seen.used);
    return w;
}

/* --- tests ------------------------------------------------------------------------------- */

static void
no_wake_up_is_lost(void)
{
    static const setting settings[] = {
        {.ranks = 2, .rounds = 1},
        {.ranks = 2, .rounds = 4},
        {.ranks = 3, .rounds = 1},
        {.ranks = 3, .rounds = 2},
        {.ranks = 2, .rounds = 1, .abort = true},
    };
    for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
        walk w = walk_through(&settings[i]);
        fprintf(stderr, "  %d ranks, %d rounds%s: %zu states\n", settings[i].ranks,
                settings[i].rounds, settings[i].abort ? ", abort" : "", w.states);
        CHECK(w.states > 50);
        CHECK_INT(w.lost, 0);
    }
}

static void
each_order_is_needed(void)
{
    static const weakness all[] = {STORE_WORD, LOAD_SLEEPERS, COUNT_SLEEPERS,
                                   LOAD_WORD,  LATE_BELL,     NO_BELL};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        setting p = {.ranks = 2, .rounds = 2, .weak = all[i]};
        walk w = walk_through(&p);
        fprintf(stderr, "  without order %d: %zu of %zu states\n", (int)all[i], w.lost,
                w.states);
        CHECK(w.lost > 0);
    }
    setting p = {.ranks = 2, .rounds = 1, .abort = true, .weak = ABORT_UNRUNG};
    CHECK(walk_through(&p).lost > 0);
}

TEST_MAIN(TEST(no_wake_up_is_lost), TEST(each_order_is_needed))
