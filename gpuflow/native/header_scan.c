/* Reads the headers of ordinary JPEGs, for chunk_files.py.
 *
 * An ordinary baseline file is one that NVIDIA's JPEG engines certainly decode as the CPU does, within one level: one
 * scan, gray or Y, Cb and Cr, with a common chroma sampling, not too narrow, with all the tables that it uses and no
 * segment that libjpeg refuses. An ordinary progressive one has at most the given number of scans. Other files are left
 * to `probe` in codecs.py. The formats: ITU-T T.81, annex B, and for the orientation JEITA CP-3451 (EXIF).
 */

#include "header_scan.h"

#include <string.h>

/* Columns of the result, and the kinds of files, as in chunk_files.py. */
enum { KIND, HEIGHT, WIDTH, ORIENTATION, SAMPLING, SCAN, INTERVAL, COLUMNS };
enum { OTHER, BASELINE, PROGRESSIVE };
enum { ORIENTATION_TAG = 0x0112 };
enum { MOST_SEGMENTS = 10000 };
enum { LEAST_WIDTH = 5, DC_SYMBOLS = 16, MOST_SYMBOLS = 256 };

static int read_quantisation(struct headers *h, const uint8_t *at, const uint8_t *end) {
    while (at < end) {
        int is_wide = *at >> 4 != 0, number = *at & 15; /* of 16 bits */
        int64_t bytes = is_wide ? 129 : 65;
        if (number >= MOST_TABLES || end - at < bytes)
            return 0;
        h->quantisation[number] = is_wide ? NULL : at;
        h->has_odd_tables |= is_wide;
        at += bytes;
    }
    return 1;
}

static int read_huffman(struct headers *h, const uint8_t *at, const uint8_t *end) {
    while (at < end) {
        int kind = *at >> 4, number = *at & 15;
        if (end - at < 17 || kind > 1 || number >= MOST_TABLES)
            return 0;
        int64_t symbols = 0, codes = 0; /* of 16 bits; a valid table does not use the one of ones alone */
        for (int bits = 1; bits <= 16; bits++) {
            symbols += at[bits];
            codes += (int64_t)at[bits] << (16 - bits);
        }
        if (symbols > MOST_SYMBOLS || end - at < 17 + symbols)
            return 0;
        int is_valid = codes < 1 << 16;
        for (int64_t i = 0; kind == 0 && i < symbols; i++)
            is_valid &= at[17 + i] < DC_SYMBOLS;
        h->huffman[kind][number] = is_valid ? at : NULL;
        h->has_odd_tables |= !is_valid;
        at += 17 + symbols;
    }
    return 1;
}

static int read_frame(struct headers *h, const uint8_t *at, int64_t length) {
    if (h->count || length < 8 || at[4] != 8 || (at[9] != 1 && at[9] != 3) || length != 8 + 3 * at[9])
        return 0;
    h->count = at[9];
    h->height = at[5] << 8 | at[6];
    h->width = at[7] << 8 | at[8];
    h->is_progressive = at[1] == 0xC2;
    if (!h->height || h->width < LEAST_WIDTH)
        return 0;
    for (int i = 0; i < h->count; i++) {
        const uint8_t *component = at + 10 + 3 * i;
        int across = component[1] >> 4, down = component[1] & 15, most = i || h->count == 1 ? 1 : 2;
        if (across < 1 || across > most || down < 1 || down > most || component[2] >= MOST_TABLES)
            return 0;
        for (int k = 0; k < i; k++)
            if (h->components[k].number == component[0])
                return 0;
        h->components[i].number = component[0];
        h->components[i].across = across;
        h->components[i].down = down;
        h->components[i].quantisation = component[2];
    }
    return h->count == 1 || at[10] != 'R' || at[13] != 'G' || at[16] != 'B';
}

int read_segment(struct headers *h, const uint8_t *at, const uint8_t *after) {
    int64_t length = after - at - 2;
    switch (at[1]) {
    case 0xC0:
    case 0xC2:
        return read_frame(h, at, length);
    case 0xC4:
        return read_huffman(h, at + 4, after);
    case 0xDB:
        return read_quantisation(h, at + 4, after);
    case 0xDD:
        h->interval = length == 4 ? at[4] << 8 | at[5] : 0;
        return length == 4;
    case 0xEE: /* Adobe's transform 0, or none, may mean RGB */
        h->may_be_rgb |= length >= 7 && !memcmp(at + 4, "Adobe", 5) && (length < 14 || !at[15]);
        return 1;
    default:
        return at[1] == 0xFE || (at[1] >= 0xE0 && at[1] <= 0xEF);
    }
}

/* at: of the scan header's marker; its `length` bytes are there. Whether the scan holds the whole image, and all its
 * tables were there before it. */
static int read_scan(const struct headers *h, const uint8_t *at, int64_t length) {
    if (length != 6 + 2 * h->count || at[4] != h->count || (h->count == 3 && h->may_be_rgb))
        return 0;
    for (int i = 0; i < h->count; i++) {
        int dc = at[6 + 2 * i] >> 4, ac = at[6 + 2 * i] & 15;
        if (at[5 + 2 * i] != h->components[i].number || dc >= MOST_TABLES || ac >= MOST_TABLES)
            return 0;
        if (!h->huffman[0][dc] || !h->huffman[1][ac] || !h->quantisation[h->components[i].quantisation])
            return 0;
    }
    const uint8_t *last = at + 5 + 2 * h->count;
    return last[0] == 0 && last[1] == 63 && last[2] == 0;
}

/* Whether the image ends in these bytes, the last of a file. */
static int has_end(const uint8_t *begin, const uint8_t *end) {
    for (const uint8_t *at = end - 2; at >= begin; at--)
        if (at[0] == 0xFF && at[1] == 0xD9)
            return 1;
    return 0;
}

/* Whether at most `most` scans follow from a marker on, and not absurdly many segments. */
static int has_few_scans(const uint8_t *at, const uint8_t *end, int64_t most) {
    int64_t scans = 0;
    for (int segments = 0; segments < MOST_SEGMENTS; segments++) {
        int marker = 0;
        while (!marker) { /* one that begins a segment or ends the image */
            at = memchr(at, 0xFF, (size_t)(end - at));
            if (!at || ++at == end)
                return 1;
            if (*at != 0xFF && *at != 0x01 && (*at < 0xD0 || *at > 0xD8))
                marker = *at;
        }
        scans += marker == 0xDA;
        int64_t length = end - at < 3 ? 2 : at[1] << 8 | at[2];
        if (length < 2) /* which is wrong: at least the length itself is there */
            length = 2;
        if (marker == 0xD9 || scans > most || end - at <= 1 + length)
            return scans <= most;
        at += 1 + length;
    }
    return 0;
}

static uint32_t read_number(const uint8_t *at, int bytes, int is_little) {
    uint32_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint32_t)at[i] << 8 * (is_little ? i : bytes - 1 - i);
    return value;
}

/* Bytes of an integer of a type of EXIF data (SHORT, LONG, SBYTE, SSHORT, SLONG); 0 for types from which no orientation
 * is read, by Pillow neither. */
static const uint8_t INTEGER_BYTES[] = {[3] = 2, [4] = 4, [6] = 1, [8] = 2, [9] = 4};

/* The orientation that EXIF data give, which are a TIFF block; 1 if they give none, or are malformed. */
static int64_t read_orientation(const uint8_t *at, const uint8_t *end) {
    if (end - at >= 6 && !memcmp(at, "Exif\0", 6)) /* some programs write the prefix twice */
        at += 6;
    int64_t size = end - at;
    int is_little = size >= 2 && at[0] == 'I' && at[1] == 'I';
    if (size < 8 || (!is_little && (at[0] != 'M' || at[1] != 'M')))
        return 1;
    int64_t begin = read_number(at + 4, 4, is_little);
    if (size - begin < 2)
        return 1;
    int64_t entries = read_number(at + begin, 2, is_little);
    for (int64_t i = 0, entry = begin + 2; i < entries && size - entry >= 4; i++, entry += 12) {
        uint32_t kind = read_number(at + entry + 2, 2, is_little);
        int bytes = kind < sizeof INTEGER_BYTES ? INTEGER_BYTES[kind] : 0;
        if (read_number(at + entry, 2, is_little) == ORIENTATION_TAG && bytes) {
            if (size - entry < 8 + bytes)
                return 1;
            uint32_t value = read_number(at + entry + 8, bytes, is_little);
            return value >= 1 && value <= 8 ? value : 1;
        }
    }
    return 1;
}

static void read_file(const uint8_t *file, int64_t size, int reads_orientation, int64_t most_scans, int64_t *found) {
    struct headers h; /* not all is cleared, which would take a sixth of the time */
    memset(h.quantisation, 0, sizeof h.quantisation);
    memset(h.huffman, 0, sizeof h.huffman);
    h.count = h.interval = h.is_progressive = h.has_odd_tables = h.may_be_rgb = 0;
    const uint8_t *at = file + 2, *end = file + size;
    int64_t orientation = 0; /* of the first EXIF segment; later ones may continue its data */
    if (size < 4 || file[0] != 0xFF || file[1] != 0xD8)
        return;
    for (int segments = 0; segments < MOST_SEGMENTS; segments++) {
        while (end - at >= 4 && at[0] == 0xFF && at[1] == 0xFF) /* fill bytes */
            at++;
        if (end - at < 4)
            return;
        int64_t length = at[2] << 8 | at[3];
        if (at[0] != 0xFF || length < 2 || end - at < 2 + length)
            return;
        const uint8_t *after = at + 2 + length;
        if (at[1] == 0xDA) {
            if (!h.count || !has_end(at, end))
                return;
            if (h.is_progressive ? !has_few_scans(at, end, most_scans) : !read_scan(&h, at, length))
                return;
            found[HEIGHT] = h.height;
            found[WIDTH] = h.width;
            found[ORIENTATION] = orientation ? orientation : 1;
            if (!h.is_progressive && h.count > 1)
                found[SAMPLING] = h.components[0].across << 4 | h.components[0].down;
            found[SCAN] = after - file;
            found[INTERVAL] = h.interval;
            found[KIND] = h.is_progressive ? PROGRESSIVE : BASELINE;
            return;
        }
        if (!read_segment(&h, at, after))
            return;
        if (at[1] == 0xE1 && reads_orientation && !orientation && end - at >= 10 && !memcmp(at + 4, "Exif\0", 6))
            orientation = read_orientation(at + 10, length < 8 ? at + 10 : after);
        at = after;
    }
}

/* offsets, sizes [count]: of the files in `bytes`. orientation: whether to read that, which is else 1. most_scans: a
 * file with more of them is not ordinary. found [count, COLUMNS]: zeros, where the files' rows are written. */
void gpuflow_headers(const uint8_t *bytes, const int64_t *offsets, const int64_t *sizes, int64_t count,
                     int64_t orientation, int64_t most_scans, int64_t *found) {
    for (int64_t i = 0; i < count; i++)
        read_file(bytes + offsets[i], sizes[i], orientation != 0, most_scans, found + i * COLUMNS);
}
