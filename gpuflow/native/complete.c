/* Finds out which baseline JPEGs hold the data of all their blocks, and of at most a few more, by reading their Huffman
 * codes in order, several short ones at a time.
 *
 * See chunk_files.py, which describes the files. No coefficient is computed: a code and the bits that belong to it
 * are skipped, and blocks are counted. The format: ITU-T T.81, annexes B, C and F.
 */

#include "pool.h"

#include <stdlib.h>
#include <string.h>

/* Columns of the description of a file, as in chunk_files.py. */
enum { FILE_ADDRESS, LENGTH, SCAN, COMPONENTS, LUMA, UNITS, INTERVAL, RESTARTS, FIELDS };

enum { LOOKUP_BITS = 12, ENTRIES = 1 << LOOKUP_BITS, MARGIN = 16, MOST_EXTRA = 3 };
enum { MOST_SEGMENTS = 256, MOST_TABLES = 64, MOST_FILL = 64, MOST_KEPT = 1 << 20 };

/* An entry: the bits of a code and of what belongs to it, by how many coefficients it advances (0: to the end of the
 * block), and the bits of the code alone. An entry of 0 is an invalid code. */
enum { BITS = 31, STEP_SHIFT = 5, CODE_SHIFT = 10, LONG = 0xFFFF };
/* An entry for several codes has their bits, how far they advance, and whether the last one ends the block. */
enum { STEPS = 63, ENDS = 1 << 11 };

struct table {
    int64_t bytes;                  /* of `segment` that are there; 0 if the file has no such table */
    uint8_t segment[17 + 16 * 255]; /* as in the file's header: its class and number, 16 counts, symbols */
    int32_t first[17], place[17];   /* of each number of bits: its first code, as 16 bits, and symbol */
    uint16_t one[ENTRIES], several[ENTRIES];
};

/* Unlike in baseline.c: with the number of the next bit instead, a file takes a fourth longer here, because there is
 * little other work between two codes. */
struct bits {
    const uint8_t *next;
    uint64_t ahead; /* upcoming bits, the first one the highest */
    int have;       /* how many of them there are; those below are upcoming ones, too, or 0 */
    int64_t left;   /* until the data end */
};

static uint16_t entry_of(const struct table *t, int bits, int32_t place, int is_dc) {
    if (17 + place >= t->bytes)
        return 0;
    int symbol = t->segment[17 + place], run = symbol >> 4, more = symbol & 15, step = symbol ? run + 1 : 0;
    if (is_dc) {
        if (run)
            return 0;
        step = 1;
    } else if (!more && run && run != 15) {
        return 0;
    }
    return (uint16_t)((bits + more) | step << STEP_SHIFT | (bits <= LOOKUP_BITS ? bits : 0) << CODE_SHIFT);
}

/* The last table of this class and number in the header, which ends at `end`. */
static const uint8_t *find_table(const uint8_t *file, int64_t end, int wanted) {
    const uint8_t *found = NULL;
    int64_t at = 2;
    int seen = 0;
    for (int segments = 0; at + 4 <= end && segments < MOST_SEGMENTS; segments++) {
        if (file[at + 1] == 0xFF) { /* a fill byte before the marker */
            at++;
            continue;
        }
        int64_t length = file[at + 2] * 256 + file[at + 3];
        if (file[at + 1] == 0xC4) {
            int64_t table = at + 4, after = at + 2 + length < end ? at + 2 + length : end;
            for (; table + 17 <= after && seen < MOST_TABLES; seen++) {
                if (file[table] == wanted)
                    found = file + table;
                int64_t symbols = 0;
                for (int i = 1; i <= 16; i++)
                    symbols += file[table + i];
                table += 17 + symbols;
            }
        }
        at += 2 + (length > 2 ? length : 2);
    }
    return found;
}

/* Keeps the table of the file before if it is the same, as in many files. */
static void build_table(struct table *t, const uint8_t *file, int64_t end, int wanted) {
    const uint8_t *found = find_table(file, end, wanted);
    int64_t bytes = found ? 17 : 0;
    for (int i = 1; found && i <= 16; i++)
        bytes += found[i];
    if (found && bytes > file + end - found)
        bytes = file + end - found;
    if (t->bytes == bytes && (!bytes || !memcmp(t->segment, found, (size_t)bytes)))
        return;
    t->bytes = bytes;
    memset(t->one, 0, sizeof t->one);
    memset(t->several, 0, sizeof t->several);
    if (!found)
        return;
    memcpy(t->segment, found, (size_t)bytes);
    int is_dc = wanted < 16;
    int32_t code = 0, place = 0;
    for (int bits = 1; bits <= 16; bits++) {
        t->first[bits] = code;
        t->place[bits] = place;
        int shift = LOOKUP_BITS - bits;
        for (int i = 0; i < found[bits]; i++, code += 1 << (16 - bits), place++) {
            if (bits > LOOKUP_BITS || code >= 1 << 16)
                continue;
            uint16_t entry = entry_of(t, bits, place, is_dc);
            int start = code >> (16 - LOOKUP_BITS);
            for (int k = 0; k < 1 << shift && start + k < ENTRIES; k++)
                t->one[start + k] = entry;
        }
    }
    int32_t limit = t->first[LOOKUP_BITS + 1]; /* longer codes are looked for one by one */
    for (int i = limit < 1 << 16 ? limit >> (16 - LOOKUP_BITS) : ENTRIES; i < ENTRIES; i++)
        t->one[i] = LONG;
    if (is_dc)
        return;
    for (int i = 0; i < ENTRIES; i++) {
        int used = 0, steps = 0, ends = 0;
        while (!ends) {
            uint16_t one = t->one[i << used & (ENTRIES - 1)];
            int step = one >> STEP_SHIFT & 31;
            if (!one || one == LONG || used + (one >> CODE_SHIFT) > LOOKUP_BITS || steps + step > STEPS)
                break;
            used += one & BITS;
            steps += step;
            ends = !step;
            if (used >= LOOKUP_BITS)
                break;
        }
        t->several[i] = (uint16_t)(used | steps << STEP_SHIFT | (ends ? ENDS : 0));
    }
}

static uint16_t long_entry(const struct table *t, int32_t code, int is_dc) {
    for (int bits = LOOKUP_BITS + 1; bits <= 16; bits++)
        if (code >= t->first[bits] && code < t->first[bits] + (t->segment[bits] << (16 - bits)))
            return entry_of(t, bits, t->place[bits] + ((code - t->first[bits]) >> (16 - bits)), is_dc);
    return 0;
}

/* Makes at least 56 bits ready. */
static inline void refill(struct bits *b) {
    uint64_t word;
    memcpy(&word, b->next, 8);
    b->ahead |= __builtin_bswap64(word) >> b->have;
    b->next += (63 - b->have) >> 3;
    b->have |= 56;
}

/* The entry for the next code, of which 16 bits are ready; 56 afterwards. It is looked up while others are read. */
static inline uint16_t look_up(struct bits *b, const uint16_t *entries) {
    uint16_t entry = entries[b->ahead >> (64 - LOOKUP_BITS)];
    refill(b);
    return entry;
}

static inline void skip(struct bits *b, int count) {
    b->ahead <<= count;
    b->have -= count;
    b->left -= count;
}

/* Skips one code and returns how far it advances, or -1: it is invalid, or not all of it is there. */
static inline int read_one(struct bits *b, const struct table *t, int is_dc) {
    uint16_t one = look_up(b, t->one);
    if (one == LONG)
        one = long_entry(t, (int32_t)(b->ahead >> 48), is_dc);
    if (!one || (one & BITS) > b->left)
        return -1;
    skip(b, one & BITS);
    return one >> STEP_SHIFT & 31;
}

/* Whether a whole block can be read. */
static int read_block(struct bits *b, const struct table *dc, const struct table *ac) {
    if (read_one(b, dc, 1) < 0)
        return 0;
    for (int k = 1; k < 64;) {
        uint16_t several = look_up(b, ac->several);
        int steps = several >> STEP_SHIFT & STEPS;
        if (several && k + steps < 64 && (several & BITS) <= b->left) {
            skip(b, several & BITS);
            if (several & ENDS)
                return 1;
            k += steps;
            continue;
        }
        int step = read_one(b, ac, 0);
        if (step < 0 || k + step > 64)
            return 0;
        k = step ? k + step : 64;
    }
    return 1;
}

/* places: where intervals begin. data: follow them. size: bytes of both. */
struct memory {
    int64_t *places, size;
    uint8_t *data;
    struct table tables[4];
};

/* Makes room for a file's data, and for where the intervals between restart markers begin. 0 if there is no memory. */
static int has_room(struct memory *m, int64_t size, int64_t places) {
    size += places * (int64_t)sizeof *m->places;
    if (m->size < size) {
        free(m->places);
        m->places = malloc((size_t)size);
        m->size = m->places ? size : 0;
    }
    m->data = m->places ? (uint8_t *)(m->places + places) : NULL;
    return m->data != NULL;
}

/* Copies compressed data without stuffed zeros and restart markers, and notes where intervals begin, and their end.
 * Returns the size, or -1 if there is a marker that should not be there. */
static int64_t unstuff(struct memory *m, const uint8_t *at, const uint8_t *end, int64_t restarts) {
    uint8_t *to = m->data;
    int64_t seen = 0;
    m->places[0] = 0;
    while (at < end) {
        const uint8_t *mark = memchr(at, 0xFF, (size_t)(end - at));
        if (!mark || mark + 1 == end)
            return -1;
        memcpy(to, at, (size_t)(mark - at));
        to += mark - at;
        at = mark + 2;
        if (mark[1] == 0) {
            *to++ = 0xFF;
        } else if (mark[1] >= 0xD0 && mark[1] < 0xD8) {
            if ((mark[1] & 7) != (seen & 7) || seen == restarts)
                return -1;
            m->places[++seen] = to - m->data;
        } else {
            for (int fill = 0; mark + 1 < end && mark[1] == 0xFF && fill < MOST_FILL; fill++)
                mark++;
            if (mark + 1 == end || mark[1] != 0xD9 || seen != restarts)
                return -1;
            memset(to, 0, MARGIN);
            return m->places[restarts + 1] = to - m->data;
        }
    }
    return -1;
}

static int is_complete(struct memory *m, const int64_t *file) {
    const uint8_t *bytes = (const uint8_t *)(uintptr_t)file[FILE_ADDRESS];
    int64_t scan = file[SCAN], restarts = file[RESTARTS], components = file[COMPONENTS], luma = file[LUMA];
    if (!has_room(m, file[LENGTH] - scan + MARGIN, restarts + 2))
        return 0;
    int64_t size = unstuff(m, bytes + scan, bytes + file[LENGTH], restarts);
    if (size <= 0)
        return 0;
    const struct table *dc[3], *ac[3];
    for (int64_t i = 0; i < components; i++) {
        int both = bytes[scan - 2 - 2 * components + 2 * i]; /* its tables in the scan's header */
        if (both & 0xEE)
            return 0;
        dc[i] = &m->tables[both >> 4];
        ac[i] = &m->tables[2 + (both & 1)];
    }
    for (int i = 0; i < 4; i++)
        build_table(&m->tables[i], bytes, scan, i / 2 * 16 + i % 2);
    int64_t blocks = luma + components - 1, expected = file[UNITS] * blocks;
    int64_t each = restarts ? file[INTERVAL] * blocks : expected;
    for (int64_t i = 0; i <= restarts; i++) {
        int64_t begin = m->places[i], left = (m->places[i + 1] - begin) * 8;
        int64_t want = expected - i * each < each ? expected - i * each : each, read = 0;
        struct bits b = {m->data + begin, 0, 0, left};
        refill(&b);
        int64_t most = restarts ? want : want + MOST_EXTRA + 1;
        for (int64_t c = 0; read < most; read++, c = c + 1 == blocks ? 0 : c + 1) {
            int64_t component = c < luma ? 0 : c - luma + 1;
            if (!read_block(&b, dc[component], ac[component]))
                break;
        }
        if (read < want || read > want + MOST_EXTRA || (restarts && b.left >= 8))
            return 0;
    }
    return 1;
}

static void release(void *memory) {
    struct memory *m = memory;
    if (m)
        free(m->places);
    free(m);
}

struct files {
    const int64_t *described;
    uint8_t *found;
};

static void check_file(void *files, int64_t number, void **memory) {
    struct files *all = files;
    if (!*memory)
        *memory = calloc(1, sizeof(struct memory));
    struct memory *m = *memory;
    all->found[number] = m && is_complete(m, all->described + number * FIELDS);
    if (m && m->size > MOST_KEPT) {
        free(m->places);
        m->places = NULL;
        m->size = 0;
    }
}

static const struct work check_files = {check_file, release, FOR_CHECKS};

/* Writes 1 to `found` [count] for each complete file, else 0. pool: see `run_on_pool`. */
void gpuflow_complete(const int64_t *files, int64_t count, struct pool *pool, uint8_t *found) {
    struct files all = {files, found};
    run_on_pool(pool, &check_files, &all, count);
}
