/* Segments of JPEGs' headers, for header_scan.c and baseline.c. */

#include <stdint.h>

enum { MOST_TABLES = 4 };

/* What the segments of a file have said until now. quantisation, huffman: where each table begins, at its class and
 * number, or NULL; huffman[0]: of DC coefficients. count: of components, 0 before the frame header. interval: coded
 * units between two restart markers, or 0. has_odd_tables: whether one of 16 bits, or of invalid codes, was left out.
 * may_be_rgb: whether Adobe's segment does not say that three components are Y, Cb and Cr. */
struct headers {
    const uint8_t *quantisation[MOST_TABLES], *huffman[2][MOST_TABLES];
    int count, height, width, interval, is_progressive, has_odd_tables, may_be_rgb;
    struct {
        int number, across, down, quantisation;
    } components[3];
};

/* Reads the segment that begins at a marker, other than the header of a scan. after: its end, in the file. Returns 0 if
 * it is not one of an ordinary file: one whose frame has 1 component, or Y, Cb and Cr, with up to 2x2 blocks of Y. */
int read_segment(struct headers *headers, const uint8_t *at, const uint8_t *after);
