/* Rewrites progressive JPEGs as baseline ones with the same coefficients, for NVIDIA's JPEG engines, which decode
 * baseline files alone.
 *
 * See chunk_files.py, which has the headers of the result read by header_scan.c. A file is rewritten only if every
 * coefficient of every block is there, at full precision, and each scan ends where its data end; anything else is left
 * to the CPU's decoder. The formats: ITU-T T.81, annexes B, F (baseline) and G (progressive); the Huffman tables that
 * are written are those of annex K.
 *
 * For each block there is a mask of its coefficients that are not 0. A scan that refines them reads only these, and so
 * does the baseline encoder. Masks and blocks have the first coefficient last, at bit and place 63: files have it in
 * their highest bits.
 *
 * Each code's place depends on the one before it, and what it says cannot be predicted. So what counts is how long the
 * way from one code to the next is, and that no branch depends on a coefficient's sign, or on whether it is refined.
 */

#include "header_scan.h"
#include "pool.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Columns of a file, as in chunk_files.py. */
enum { ADDRESS, LENGTH, TARGET, ROOM, SIZE, FIELDS };

enum { LOOKUP_BITS = 11, ENTRIES = 1 << LOOKUP_BITS };
enum { MARGIN = 512 }; /* zeros after data: more than one coded unit reads past their end */
enum { MOST_SEGMENTS = 512, MOST_SCANS = 128 };
/* 64 MB of coefficients: a photograph of 22 million pixels with 4:2:0. */
enum { MOST_BLOCKS = 1 << 19, DC_BITS = 11, AC_BITS = 10 };
enum { COEFFICIENT_BYTES = 64 * sizeof(int16_t) + sizeof(uint64_t) }; /* of a block, and its mask */
enum { MOST_KEPT = 1 << 23 };                                         /* bytes that a thread keeps from file to file */

struct table {
    const uint8_t *segment;   /* that it was made of: see `struct headers` */
    uint16_t lookup[ENTRIES]; /* symbol << 4 | bits of its code; 0 if the code is longer or invalid */
    int32_t first[18], place[17]; /* of each number of bits: its first code, as 16 bits, and symbol */
};

struct component {
    int across, down;
    int64_t columns, rows; /* blocks that hold pixels */
    int64_t pitch, lines;  /* with those that fill up the coded units */
    int16_t *blocks;       /* [lines, pitch, 64]: the last coefficient in zigzag order first */
    uint64_t *masks;       /* [lines, pitch] */
    int8_t precision[64];  /* the lowest bit that is known of each coefficient; -1 before the first one */
};

struct bits {
    const uint8_t *data;
    int64_t at, end; /* the number of the next bit, and how many there are */
    uint64_t ahead;  /* the next bits, the first one the highest, then zeros */
};

struct memory {
    int16_t *blocks;
    int64_t count; /* of blocks; a mask for each follows them */
    uint8_t *data;
    int64_t size;
    struct table tables[2][MOST_TABLES]; /* as `huffman` of `struct headers` */
};

/* Makes room for data, of a scan or of the whole result. 0 if there is no memory. */
static int has_bytes(struct memory *m, int64_t size) {
    if (m->size < size) {
        free(m->data);
        m->data = malloc((size_t)size);
        m->size = m->data ? size : 0;
    }
    return m->data != NULL;
}

/* --- reading ----------------------------------------------------------------------------------------------------- */

/* Compiled into each of the functions that rewrite a file, for processors with other instructions. */
#define INLINE __attribute__((always_inline)) static inline

/* Makes at least 57 bits ready. */
INLINE void refill(struct bits *b) {
    uint64_t word;
    memcpy(&word, b->data + (b->at >> 3), 8);
    b->ahead = __builtin_bswap64(word) << (b->at & 7);
}

INLINE void skip(struct bits *b, int64_t count) {
    b->ahead <<= count;
    b->at += count;
}

/* How many bits are left; negative after too many were read. */
INLINE int64_t left_of(const struct bits *b) { return b->end - b->at; }

/* The next bits, at most 32, which are ready. */
INLINE uint32_t take(struct bits *b, int64_t count) {
    uint32_t value = (uint32_t)(b->ahead >> 1 >> (~count & 63)); /* 63 - count, in fewer instructions */
    skip(b, count);
    return value;
}

/* The symbol of a code of more than LOOKUP_BITS bits, or -1. */
static int read_long_code(const struct table *t, int32_t code, int *bits) {
    for (int count = LOOKUP_BITS + 1; count <= 16; count++)
        if (code >= t->first[count] && code < t->first[count + 1]) {
            *bits = count;
            return t->segment[17 + t->place[count] + ((code - t->first[count]) >> (16 - count))];
        }
    return -1;
}

/* The next code's symbol, or -1. 16 bits are ready, and 40 afterwards: the code is looked up while others are read. */
INLINE int read_symbol(struct bits *b, const struct table *t) {
    int entry = t->lookup[b->ahead >> (64 - LOOKUP_BITS)], bits = entry & 15, symbol = entry >> 4;
    refill(b);
    if (!entry)
        symbol = read_long_code(t, (int32_t)(b->ahead >> 48), &bits);
    skip(b, bits);
    return symbol;
}

/* The number that these bits stand for: without their highest one, a negative number. */
INLINE int extended(uint32_t bits, int count) {
    int is_negative = (int)(bits >> (count - 1)) - 1; /* -1, or 0 */
    return (int)bits + (is_negative & (1 - (1 << count)));
}

/* Makes a table of a segment's part, if it is not made of it yet. */
static void make_table(struct table *t, const uint8_t *segment) {
    if (t->segment == segment)
        return;
    memset(t, 0, sizeof *t);
    t->segment = segment;
    int32_t code = 0, place = 0;
    for (int count = 1; count <= 16; count++) {
        t->first[count] = code;
        t->place[count] = place;
        for (int i = 0; i < segment[count]; i++, place++, code += 1 << (16 - count)) {
            int from = code >> (16 - LOOKUP_BITS), same = count <= LOOKUP_BITS ? 1 << (LOOKUP_BITS - count) : 0;
            for (int k = 0; k < same; k++)
                t->lookup[from + k] = (uint16_t)(segment[17 + place] << 4 | count);
        }
    }
    t->first[17] = code;
}

/* Copies a scan's data without stuffed zeros. Returns where they end in the file, at a marker, or NULL. */
static const uint8_t *unstuff(struct memory *m, const uint8_t *at, const uint8_t *end, int64_t *size) {
    uint8_t *to = m->data;
    for (;;) {
        const uint8_t *mark = memchr(at, 0xFF, (size_t)(end - at));
        if (!mark || mark + 1 >= end)
            return NULL;
        memcpy(to, at, (size_t)(mark - at));
        to += mark - at;
        if (mark[1]) {
            *size = to - m->data;
            memset(to, 0, MARGIN);
            return mark;
        }
        *to++ = 0xFF;
        at = mark + 2;
    }
}

/* --- scans ------------------------------------------------------------------------------------------------------- */

struct scan {
    int count, first, last, former, low; /* components; coefficients; the lowest bit before, and after it */
    struct component *components[3];
    struct table *tables[3]; /* of each component */
};

INLINE int read_dc(struct bits *b, const struct table *t, int *before, int16_t *coefficient, int low) {
    int count = read_symbol(b, t);
    if (count < 0 || count > DC_BITS + 1)
        return 0;
    if (count)
        *before += extended(take(b, count), count);
    if (*before < -4096 || *before > 4096)
        return 0;
    int value = *before * (1 << low);
    if (value < INT16_MIN || value > INT16_MAX)
        return 0;
    *coefficient = (int16_t)value;
    return 1;
}

INLINE int read_dc_block(struct bits *b, const struct scan *s, int place, int *before, int64_t at) {
    int16_t *coefficient = s->components[place]->blocks + 64 * at + 63;
    if (!s->former)
        return read_dc(b, s->tables[place], before, coefficient, s->low);
    refill(b);
    *coefficient = (int16_t)(*coefficient | (int)take(b, 1) << s->low);
    return 1;
}

/* across, down: coded units of the picture. Those of a scan of one component are single blocks. */
INLINE int read_dc_scan(struct bits *b, const struct scan *s, int64_t across, int64_t down) {
    int before[3] = {0}, is_single = s->count == 1;
    if (is_single) {
        across = s->components[0]->columns;
        down = s->components[0]->rows;
    }
    for (int64_t row = 0; row < down; row++)
        for (int64_t column = 0; column < across; column++)
            for (int i = 0; i < s->count; i++) {
                const struct component *c = s->components[i];
                int wide = is_single ? 1 : c->across, high = is_single ? 1 : c->down;
                for (int y = 0; y < high; y++)
                    for (int x = 0; x < wide; x++)
                        if (!read_dc_block(b, s, i, &before[i], (row * high + y) * c->pitch + column * wide + x) ||
                            left_of(b) < 0)
                            return 0;
            }
    return 1;
}

/* How many blocks, from this one on, have no further code. */
INLINE int eob_run(struct bits *b, int run) { return (1 << run) + (int)take(b, run); }

INLINE int read_first_ac(struct bits *b, const struct scan *s, int16_t *block, uint64_t *mask, int *run) {
    for (int k = 63 - s->first; k >= 63 - s->last; k--) {
        int symbol = read_symbol(b, s->tables[0]), zeros = symbol >> 4, count = symbol & 15;
        if (symbol < 0)
            return 0;
        if (!count) {
            if (zeros < 15) {
                *run = eob_run(b, zeros) - 1;
                return 1;
            }
            k -= 15;
            if (k < 63 - s->last)
                return 0;
            continue;
        }
        k -= zeros;
        if (k < 63 - s->last || count + s->low > AC_BITS) /* what it will be refined to fits, too */
            return 0;
        block[k] = (int16_t)(extended(take(b, count), count) * (1 << s->low));
        *mask |= 1ull << k;
    }
    return 1;
}

INLINE uint64_t first_of(uint64_t mask) { return 1ull << (63 - __builtin_clzll(mask)); }

typedef int16_t lanes __attribute__((vector_size(32), aligned(16), may_alias));

/* Moves the coefficients of a mask a step away from 0; those that are 0, to where `negative` says. Their bit `low`,
 * which the step sets, is not set yet. */
INLINE void refine(int16_t *block, uint64_t mask, uint64_t negative, int16_t step) {
    const lanes bits = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, INT16_MIN};
    for (lanes *at = (lanes *)block + 3; mask; at--, mask <<= 16, negative <<= 16) {
        lanes sign = (*at >> 15) | ((((lanes){0} + (int16_t)(negative >> 48)) & bits) == bits);
        lanes is_refined = (((lanes){0} + (int16_t)(mask >> 48)) & bits) == bits;
        *at += ((((lanes){0} + step) ^ sign) - sign) & is_refined;
    }
}

/* The lowest bits of a number at the places of a mask. fast: the processor has an instruction for that. */
INLINE uint64_t deposit(uint64_t bits, uint64_t mask, int fast) {
    uint64_t found = 0;
#if defined(__x86_64__)
    if (fast) {
        __asm__("pdepq %2, %1, %0" : "=r"(found) : "r"(bits), "r"(mask));
        return found;
    }
#else
    (void)fast;
#endif
    for (; bits && mask; bits >>= 1, mask &= mask - 1)
        found |= (mask & -mask) & -(bits & 1);
    return found;
}

/* Appends bits to those that were taken. 39 are ready, and 16 afterwards. */
INLINE uint64_t take_more(struct bits *b, uint64_t taken, int count) {
    for (; count > 23; count -= 23) {
        taken = taken << 23 | take(b, 23);
        refill(b);
    }
    return taken << count | take(b, count);
}

/* The coefficient after the first `zeros` ones of a mask; 0 if there is none. Those before it are left out of `next`.
 * fast: `next` is the first one's bit if the mask's bits stood together, else the mask that is left. */
INLINE uint64_t one_after(uint64_t *next, uint64_t mask, int zeros, int fast) {
    uint64_t found;
    if (fast) {
        *next >>= zeros;
        found = deposit(*next, mask, fast);
        *next >>= 1;
        return found;
    }
    for (; zeros && *next; zeros--)
        *next ^= first_of(*next);
    found = *next ? first_of(*next) : 0;
    *next ^= found;
    return found;
}

/* Refines a block. A code leads over some coefficients that were 0 until now to the next of them. After it there is a
 * bit for each other coefficient on the way: whether it is refined. */
INLINE int refine_ac(struct bits *b, const struct scan *s, int16_t *block, uint64_t *mask, int *run, int fast) {
    const uint64_t all = ~0ull >> s->first & ~0ull << (63 - s->last), known = *mask & all, zero = all & ~known;
    uint64_t next = fast && zero ? 1ull << (__builtin_popcountll(zero) - 1) : zero; /* see `one_after` */
    uint64_t rest = *run ? 0 : all;               /* where no code has led yet */
    uint64_t made = 0, negative = 0, refined = 0; /* new coefficients, their signs, and a bit for each known one */
    int left = __builtin_popcountll(known);       /* known ones without a bit until now */
    while (rest) {
        int symbol = read_symbol(b, s->tables[0]), count = symbol & 15;
        if (count != 1) {
            if (count || symbol < 0)
                return 0;
            if (symbol < 0xF0) {
                *run = eob_run(b, symbol >> 4);
                break;
            }
        }
        uint64_t sign = (uint64_t)((int64_t)~b->ahead >> 63); /* all ones: of a new coefficient below 0, if one comes */
        skip(b, count);
        uint64_t found = one_after(&next, zero, symbol >> 4, fast);
        if (!found)
            return 0;
        rest = all & (found - 1);
        int after = __builtin_popcountll(rest & known);
        refined = take_more(b, refined, left - after);
        left = after;
        made |= found & -(uint64_t)count;
        negative |= found & sign;
    }
    if (*run) {
        refill(b);
        refined = take_more(b, refined, left);
        --*run;
    }
    *mask |= made;
    refine(block, deposit(refined, known, fast) | made, negative, (int16_t)(1 << s->low));
    return 1;
}

INLINE int read_ac_scan(struct bits *b, const struct scan *s, int fast) {
    struct component *c = s->components[0];
    int run = 0;
    for (int64_t row = 0; row < c->rows; row++) {
        int16_t *block = c->blocks + 64 * row * c->pitch;
        uint64_t *mask = c->masks + row * c->pitch;
        for (int64_t column = 0; column < c->columns; column++, block += 64, mask++) {
            if (s->former) {
                if (!refine_ac(b, s, block, mask, &run, fast))
                    return 0;
            } else if (run) {
                run--;
            } else if (!read_first_ac(b, s, block, mask, &run)) {
                return 0;
            }
            if (left_of(b) < 0)
                return 0;
        }
    }
    return !run;
}

/* --- headers ----------------------------------------------------------------------------------------------------- */

struct picture {
    struct headers headers;
    int64_t across, down; /* coded units */
    struct component components[3];
};

/* Makes room for the coefficients of all blocks, zeros. 0 if there are too many. */
static int has_room(struct memory *m, struct picture *p) {
    int64_t count = 0, used = 0;
    for (int i = 0; i < p->headers.count; i++)
        count += p->components[i].pitch * p->components[i].lines;
    if (count > MOST_BLOCKS)
        return 0;
    const size_t bytes = (size_t)count * COEFFICIENT_BYTES;
    if (m->count < count) {
        free(m->blocks);
        m->blocks = malloc(bytes);
        m->count = m->blocks ? count : 0;
    }
    if (!m->count)
        return 0;
    memset(m->blocks, 0, bytes);
    uint64_t *masks = (uint64_t *)(m->blocks + 64 * count);
    for (int i = 0; i < p->headers.count; i++) {
        struct component *c = &p->components[i];
        c->blocks = m->blocks + 64 * used;
        c->masks = masks + used;
        used += c->pitch * c->lines;
    }
    return 1;
}

/* Begins a picture whose frame header was read. 0 if there is no room for its coefficients. */
static int begin_picture(struct memory *m, struct picture *p) {
    const struct headers *h = &p->headers;
    int most_across = h->components[0].across, most_down = h->components[0].down;
    p->across = (h->width + 8 * most_across - 1) / (8 * most_across);
    p->down = (h->height + 8 * most_down - 1) / (8 * most_down);
    for (int i = 0; i < h->count; i++) {
        struct component *c = &p->components[i];
        c->across = h->components[i].across;
        c->down = h->components[i].down;
        c->columns = ((h->width * c->across + most_across - 1) / most_across + 7) / 8;
        c->rows = ((h->height * c->down + most_down - 1) / most_down + 7) / 8;
        c->pitch = p->across * c->across;
        c->lines = p->down * c->down;
        memset(c->precision, -1, sizeof c->precision);
    }
    return has_room(m, p);
}

/* at: of the scan header's marker; its `length` bytes are there. */
static int read_scan_header(struct memory *m, struct picture *p, const uint8_t *at, int64_t length, struct scan *s) {
    const struct headers *h = &p->headers;
    s->count = length > 2 ? at[4] : 0;
    if (s->count < 1 || s->count > h->count || length != 6 + 2 * s->count)
        return 0;
    const uint8_t *last = at + 5 + 2 * s->count;
    s->first = last[0];
    s->last = last[1];
    s->former = last[2] >> 4;
    s->low = last[2] & 15;
    int is_dc = !s->first;
    if (is_dc ? s->last != 0 : s->count != 1 || s->last < s->first || s->last > 63)
        return 0;
    if (s->low > (is_dc ? 13 : AC_BITS - 1) || (s->former && s->former != s->low + 1))
        return 0;
    for (int i = 0, from = 0; i < s->count; i++) {
        while (from < h->count && h->components[from].number != at[5 + 2 * i])
            from++;
        if (from == h->count)
            return 0;
        struct component *c = s->components[i] = &p->components[from++];
        int dc = at[6 + 2 * i] >> 4, ac = at[6 + 2 * i] & 15;
        if (dc >= MOST_TABLES || ac >= MOST_TABLES)
            return 0;
        const uint8_t *segment = is_dc ? h->huffman[0][dc] : h->huffman[1][ac];
        int has_codes = !is_dc || !s->former;
        if ((has_codes && !segment) || (!is_dc && c->precision[0] < 0))
            return 0;
        s->tables[i] = is_dc ? &m->tables[0][dc] : &m->tables[1][ac];
        if (has_codes)
            make_table(s->tables[i], segment);
        for (int k = s->first; k <= s->last; k++) {
            if (c->precision[k] != (s->former ? s->former : -1))
                return 0;
            c->precision[k] = (int8_t)s->low;
        }
    }
    return 1;
}

/* Reads all scans. Whether the file is one to rewrite, and nothing is missing. */
INLINE int read_all(struct memory *m, const uint8_t *file, int64_t size, struct picture *p, int fast) {
    struct headers *h = &p->headers;
    const uint8_t *at = file + 2, *end = file + size;
    int scans = 0;
    for (int i = 0; i < MOST_TABLES; i++)
        m->tables[0][i].segment = m->tables[1][i].segment = NULL;
    if (size < 4 || file[0] != 0xFF || file[1] != 0xD8 || !has_bytes(m, size + MARGIN))
        return 0;
    for (int segments = 0; segments < MOST_SEGMENTS && end - at >= 2; segments++) {
        if (at[0] != 0xFF)
            return 0;
        if (at[1] == 0xD9) {
            int whole = scans > 0;
            for (int i = 0; i < h->count; i++)
                for (int k = 0; k < 64; k++)
                    whole &= !p->components[i].precision[k];
            return whole;
        }
        if (end - at < 4)
            return 0;
        int64_t length = at[2] << 8 | at[3];
        if (length < 2 || end - at < 2 + length)
            return 0;
        const uint8_t *after = at + 2 + length;
        if (at[1] == 0xDA) {
            struct scan s;
            if (!h->count || ++scans > MOST_SCANS || !read_scan_header(m, p, at, length, &s))
                return 0;
            int64_t bytes = 0;
            at = unstuff(m, after, end, &bytes);
            struct bits b = {m->data, 0, 8 * bytes, 0};
            refill(&b);
            if (!at || !(s.first ? read_ac_scan(&b, &s, fast) : read_dc_scan(&b, &s, p->across, p->down)))
                return 0;
            if (left_of(&b) >= 8)
                return 0;
            continue;
        }
        if (at[1] == 0xC0 || (at[1] == 0xDB && scans) || !read_segment(h, at, after) || h->interval)
            return 0;
        if (h->has_odd_tables || h->may_be_rgb)
            return 0;
        if (at[1] == 0xC2 && !begin_picture(m, p))
            return 0;
        at = after;
    }
    return 0;
}

/* --- writing ----------------------------------------------------------------------------------------------------- */

/* Annex K.3, as segments have tables: class and number, counts of codes of 1 to 16 bits, and symbols; of DC and AC
 * coefficients, luma and chroma. */
enum { DC_BYTES = 17 + 12, AC_BYTES = 17 + 162 };
static const uint8_t dc_tables[2][DC_BYTES] = {
    {0x00, 0, 1, 5, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11},
    {0x01, 0, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}};
static const uint8_t ac_tables[2][AC_BYTES] = {
    {0x10, 0, 2, 1, 3, 3, 2, 4, 3, 5, 5, 4, 4, 0, 0, 1, 0x7d,
     0x01, 0x02, 0x03, 0x00, 0x04, 0x11, 0x05, 0x12, 0x21, 0x31, 0x41, 0x06, 0x13, 0x51, 0x61, 0x07, 0x22, 0x71,
     0x14, 0x32, 0x81, 0x91, 0xa1, 0x08, 0x23, 0x42, 0xb1, 0xc1, 0x15, 0x52, 0xd1, 0xf0, 0x24, 0x33, 0x62, 0x72,
     0x82, 0x09, 0x0a, 0x16, 0x17, 0x18, 0x19, 0x1a, 0x25, 0x26, 0x27, 0x28, 0x29, 0x2a, 0x34, 0x35, 0x36, 0x37,
     0x38, 0x39, 0x3a, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48, 0x49, 0x4a, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58, 0x59,
     0x5a, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68, 0x69, 0x6a, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78, 0x79, 0x7a, 0x83,
     0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8a, 0x92, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99, 0x9a, 0xa2, 0xa3,
     0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xb2, 0xb3, 0xb4, 0xb5, 0xb6, 0xb7, 0xb8, 0xb9, 0xba, 0xc2, 0xc3,
     0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9, 0xca, 0xd2, 0xd3, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8, 0xd9, 0xda, 0xe1, 0xe2,
     0xe3, 0xe4, 0xe5, 0xe6, 0xe7, 0xe8, 0xe9, 0xea, 0xf1, 0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7, 0xf8, 0xf9, 0xfa},
    {0x11, 0, 2, 1, 2, 4, 4, 3, 4, 7, 5, 4, 4, 0, 1, 2, 0x77,
     0x00, 0x01, 0x02, 0x03, 0x11, 0x04, 0x05, 0x21, 0x31, 0x06, 0x12, 0x41, 0x51, 0x07, 0x61, 0x71, 0x13, 0x22,
     0x32, 0x81, 0x08, 0x14, 0x42, 0x91, 0xa1, 0xb1, 0xc1, 0x09, 0x23, 0x33, 0x52, 0xf0, 0x15, 0x62, 0x72, 0xd1,
     0x0a, 0x16, 0x24, 0x34, 0xe1, 0x25, 0xf1, 0x17, 0x18, 0x19, 0x1a, 0x26, 0x27, 0x28, 0x29, 0x2a, 0x35, 0x36,
     0x37, 0x38, 0x39, 0x3a, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48, 0x49, 0x4a, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58,
     0x59, 0x5a, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68, 0x69, 0x6a, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78, 0x79, 0x7a,
     0x82, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8a, 0x92, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99, 0x9a,
     0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xb2, 0xb3, 0xb4, 0xb5, 0xb6, 0xb7, 0xb8, 0xb9, 0xba,
     0xc2, 0xc3, 0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9, 0xca, 0xd2, 0xd3, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8, 0xd9, 0xda,
     0xe2, 0xe3, 0xe4, 0xe5, 0xe6, 0xe7, 0xe8, 0xe9, 0xea, 0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7, 0xf8, 0xf9, 0xfa}};

enum { SMALL = 32, COUNT_BITS = 6, COUNT = (1 << COUNT_BITS) - 1 };

/* Each entry is bits to write and their number, bits << COUNT_BITS | number. A value is a coefficient that is not 0, or
 * a difference between two first coefficients; its size is its number of bits without the sign. */
struct codes {
    uint32_t of_difference[DC_BITS + 1]; /* of a size */
    uint32_t of[256];                    /* of a symbol, zeros << 4 | size */
    uint32_t small[16][2 * SMALL];       /* of zeros and a coefficient + SMALL, the coefficient's bits included */
};

static struct codes written[2]; /* of luma, and of chroma */
static pthread_once_t codes_made = PTHREAD_ONCE_INIT;

INLINE int size_of(int value) {
    unsigned magnitude = (unsigned)(value < 0 ? -value : value);
    return magnitude ? 32 - __builtin_clz(magnitude) : 0;
}

/* A symbol's code with the low bits of a value after it; of a negative one, of what is one less. */
INLINE uint64_t with_value(uint64_t code, int value, int size) {
    uint64_t low = (uint64_t)(value + (value >> 31)) & ((1u << size) - 1);
    return ((code >> COUNT_BITS << size | low) << COUNT_BITS) + (code & COUNT) + (uint64_t)size;
}

static void make_codes_of(uint32_t *codes, const uint8_t *table) {
    uint32_t code = 0;
    for (uint32_t count = 1, place = 17; count <= 16; count++, code <<= 1)
        for (int i = 0; i < table[count]; i++)
            codes[table[place++]] = code++ << COUNT_BITS | count;
}

static void make_small(struct codes *codes) {
    for (int zeros = 0; zeros < 16; zeros++)
        for (int value = -SMALL; value < SMALL; value++) {
            int size = size_of(value);
            codes->small[zeros][value + SMALL] = (uint32_t)with_value(codes->of[zeros << 4 | size], value, size);
        }
}

static void make_codes(void) {
    for (int i = 0; i < 2; i++) {
        make_codes_of(written[i].of_difference, dc_tables[i]);
        make_codes_of(written[i].of, ac_tables[i]);
        make_small(&written[i]);
    }
}

struct writer {
    uint8_t *at, *end;
    uint64_t bits, have; /* the lowest `have` ones, at most 7 */
};

/* Appends at most 27 bits. Twice at most until `flush`. */
INLINE void append(struct writer *w, uint64_t code) {
    w->bits = w->bits << (code & COUNT) | code >> COUNT_BITS;
    w->have += code & COUNT;
}

/* Writes whole bytes. Eight bytes of room are needed. */
INLINE void flush(struct writer *w) {
    uint64_t first = __builtin_bswap64(w->bits << (-w->have & 63));
    memcpy(w->at, &first, 8);
    w->at += w->have >> 3;
    w->have &= 7;
}

/* A block's codes: 27 bits for each coefficient, and what `put` writes too much. */
enum { BLOCK_BYTES = 64 * 27 / 8 + 16 };

/* Appends the code of the first coefficient of a mask, and takes it from the mask. */
INLINE void append_one(struct writer *w, const struct codes *codes, const int16_t **last, uint64_t *mask) {
    int64_t zeros = __builtin_clzll(*mask);
    *mask = *mask << zeros << 1;
    *last -= zeros + 1;
    for (; zeros > 15; zeros -= 16) {
        append(w, codes->of[0xF0]);
        flush(w);
    }
    int64_t value = **last;
    if ((uint64_t)(value + SMALL) < 2 * SMALL) {
        append(w, codes->small[zeros][value + SMALL]);
    } else {
        int size = size_of((int)value); /* at most AC_BITS */
        append(w, with_value(codes->of[zeros << 4 | size], (int)value, size));
    }
}

INLINE int write_block(struct writer *w, const int16_t *block, uint64_t mask, int *before, int kind) {
    const struct codes *codes = &written[kind];
    const int16_t *last = block + 63; /* that was written */
    int apart = *last - *before, size = size_of(apart);
    if (size > DC_BITS || w->end - w->at < BLOCK_BYTES)
        return 0;
    *before = *last;
    append(w, with_value(codes->of_difference[size], apart, size));
    for (mask <<= 1; mask;) {
        append_one(w, codes, &last, &mask);
        flush(w);
        if (!mask)
            break;
        append_one(w, codes, &last, &mask);
    }
    if (last != block)
        append(w, codes->of[0]);
    flush(w);
    return 1;
}

static uint8_t *put_bytes(uint8_t *to, const void *from, int64_t count) {
    memcpy(to, from, (size_t)count);
    return to + count;
}

static uint8_t *put_marker(uint8_t *to, int marker, int length) {
    uint8_t bytes[4] = {0xFF, (uint8_t)marker, (uint8_t)(length >> 8), (uint8_t)length};
    return put_bytes(to, bytes, 4);
}

enum { MOST_HEADER = 20 + 3 * 69 + 19 + 2 * (4 + DC_BYTES) + 2 * (4 + AC_BYTES) + 14 };

static uint8_t *write_header(const struct headers *h, uint8_t *to) {
    static const uint8_t start[20] = {0xFF, 0xD8, 0xFF, 0xE0, 0, 16, 'J', 'F', 'I', 'F', 0, 1, 1, 0, 0, 1, 0, 1, 0, 0};
    to = put_bytes(to, start, sizeof start);
    for (int i = 0; i < h->count; i++) {
        int number = h->components[i].quantisation, again = 0;
        for (int k = 0; k < i; k++)
            again |= h->components[k].quantisation == number;
        if (again)
            continue;
        to = put_marker(to, 0xDB, 67);
        *to++ = (uint8_t)number;
        to = put_bytes(to, h->quantisation[number] + 1, 64);
    }
    to = put_marker(to, 0xC0, 8 + 3 * h->count);
    uint8_t frame[6] = {8, (uint8_t)(h->height >> 8), (uint8_t)h->height, (uint8_t)(h->width >> 8), (uint8_t)h->width,
                        (uint8_t)h->count};
    to = put_bytes(to, frame, 6);
    for (int i = 0; i < h->count; i++) {
        int sampling = h->components[i].across << 4 | h->components[i].down;
        uint8_t one[3] = {(uint8_t)h->components[i].number, (uint8_t)sampling, (uint8_t)h->components[i].quantisation};
        to = put_bytes(to, one, 3);
    }
    for (int kind = 0; kind < (h->count > 1 ? 2 : 1); kind++) {
        to = put_bytes(put_marker(to, 0xC4, 2 + DC_BYTES), dc_tables[kind], DC_BYTES);
        to = put_bytes(put_marker(to, 0xC4, 2 + AC_BYTES), ac_tables[kind], AC_BYTES);
    }
    to = put_marker(to, 0xDA, 6 + 2 * h->count);
    *to++ = (uint8_t)h->count;
    for (int i = 0; i < h->count; i++) {
        *to++ = (uint8_t)h->components[i].number;
        *to++ = i ? 0x11 : 0;
    }
    static const uint8_t all[3] = {0, 63, 0};
    return put_bytes(to, all, 3);
}

/* Copies data with a 0 after each 0xFF. NULL if there is no room. */
static uint8_t *stuff(const uint8_t *at, const uint8_t *end, uint8_t *to, const uint8_t *to_end) {
    while (at < end) {
        const uint8_t *mark = memchr(at, 0xFF, (size_t)(end - at));
        int64_t count = (mark ? mark + 1 : end) - at;
        if (to_end - to < count + 1)
            return NULL;
        to = put_bytes(to, at, count);
        at += count;
        if (mark)
            *to++ = 0;
    }
    return to;
}

/* Returns the number of bytes; 0 if there is no room, or a value that a baseline file cannot have. */
INLINE int64_t write_all(struct memory *m, const struct picture *p, uint8_t *to, int64_t room) {
    if (room < MOST_HEADER || !has_bytes(m, room + BLOCK_BYTES))
        return 0;
    struct writer w = {m->data, m->data + room + BLOCK_BYTES, 0, 0};
    int before[3] = {0};
    for (int64_t row = 0; row < p->down; row++)
        for (int64_t column = 0; column < p->across; column++)
            for (int i = 0; i < p->headers.count; i++) {
                const struct component *c = &p->components[i];
                for (int y = 0; y < c->down; y++)
                    for (int x = 0; x < c->across; x++) {
                        int64_t at = (row * c->down + y) * c->pitch + column * c->across + x;
                        if (!write_block(&w, c->blocks + 64 * at, c->masks[at], &before[i], i > 0))
                            return 0;
                    }
            }
    uint64_t fill = -w.have & 7; /* with ones */
    append(&w, ((1u << fill) - 1) << COUNT_BITS | fill);
    flush(&w);
    uint8_t *end = stuff(m->data, w.at, write_header(&p->headers, to), to + room - 2);
    if (!end)
        return 0;
    end[0] = 0xFF;
    end[1] = 0xD9;
    return end + 2 - to;
}

/* --- files ------------------------------------------------------------------------------------------------------- */

INLINE int64_t rewrite(struct memory *m, const int64_t *file, int fast) {
    struct picture p = {0};
    const uint8_t *bytes = (const uint8_t *)(uintptr_t)file[ADDRESS];
    if (!read_all(m, bytes, file[LENGTH], &p, fast))
        return 0;
    for (int i = 0; i < p.headers.count; i++)
        if (!p.headers.quantisation[p.headers.components[i].quantisation])
            return 0;
    return write_all(m, &p, (uint8_t *)(uintptr_t)file[TARGET], file[ROOM]);
}

typedef int64_t rewriter(struct memory *m, const int64_t *file);

static int64_t rewrite_anywhere(struct memory *m, const int64_t *file) { return rewrite(m, file, 0); }

#if defined(__x86_64__)
__attribute__((target("bmi,lzcnt,popcnt"))) static int64_t rewrite_by_counts(struct memory *m, const int64_t *file) {
    return rewrite(m, file, 0);
}

__attribute__((target("avx2,bmi,bmi2,lzcnt,popcnt"))) static int64_t rewrite_fast(struct memory *m,
                                                                                  const int64_t *file) {
    return rewrite(m, file, 1);
}
#endif

/* The fastest one for this processor. All that have BMI have LZCNT; the first Zen processors have a slow pdep.
 * most: as in chunk_files.py. */
static rewriter *choose(int64_t most) {
    rewriter *fastest = rewrite_anywhere;
#if defined(__x86_64__)
    if (most > 0 && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt"))
        fastest = rewrite_by_counts;
    if (most > 1 && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("avx2") &&
        !__builtin_cpu_is("znver1") && !__builtin_cpu_is("znver2"))
        fastest = rewrite_fast;
#endif
    (void)most;
    return fastest;
}

/* Frees what has more than `most` bytes. */
static void shrink(struct memory *m, int64_t most) {
    if (m->count * COEFFICIENT_BYTES > most) {
        free(m->blocks);
        m->blocks = NULL;
        m->count = 0;
    }
    if (m->size > most) {
        free(m->data);
        m->data = NULL;
        m->size = 0;
    }
}

static void release(void *memory) {
    struct memory *m = memory;
    if (!m)
        return;
    shrink(m, -1);
    free(m);
}

struct files {
    int64_t *described;
    rewriter *rewrite;
};

static void rewrite_file(void *files, int64_t number, void **memory) {
    struct files *all = files;
    int64_t *file = all->described + number * FIELDS;
    if (!*memory)
        *memory = calloc(1, sizeof(struct memory));
    file[SIZE] = *memory ? all->rewrite(*memory, file) : 0;
    if (*memory)
        shrink(*memory, MOST_KEPT);
}

static const struct work rewrite_files = {rewrite_file, release, FOR_REWRITING};

/* files [count, FIELDS]: writes SIZE, the bytes of the rewritten file at TARGET, or 0 if it is not one to rewrite.
 * pool: see `run_on_pool`. most: as in chunk_files.py. */
void gpuflow_baseline(int64_t *files, int64_t count, struct pool *pool, int64_t most) {
    struct files all = {files, choose(most)};
    pthread_once(&codes_made, make_codes);
    run_on_pool(pool, &rewrite_files, &all, count);
}
